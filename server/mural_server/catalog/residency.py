"""Weights in the engine: who uses them, one load per content, and their going."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    ManifestMismatch,
    RateLimited,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.tenants import Principal
from mural_server.catalog.leases import ContentLeases
from mural_server.catalog.names import Entry, KnownNames
from mural_server.engine.client import EngineClient
from mural_server.engine.messages import AdapterInfo, AdapterLevel, FreedBytes

__all__ = ["RETRY_AFTER_S", "Residency", "log_refusal"]

logger = logging.getLogger("mural.catalog")

MAX_UNUSABLE = 1024
UNUSABLE_S = 300.0
DRAIN_S = 60.0
RETRY_AFTER_S = 5.0


class _Flight(NamedTuple):
    """A load under way, and the name on whose behalf it is."""

    name: str
    task: asyncio.Task[AdapterInfo]


class Residency:
    """Which content is used, loaded and on its way out, by ``lora_int_id``.

    Content in use keeps an unload waiting and its files in the disk cache.
    """

    def __init__(
        self,
        client: EngineClient,
        registry: LoRAResolverRegistry,
        names: KnownNames,
        *,
        adapter_wait_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.leases = ContentLeases(registry)
        self._client = client
        self._registry = registry
        self._names = names
        self._adapter_wait_s = adapter_wait_s
        self._clock = clock
        self._uses: Counter[int] = Counter()
        self._unused: dict[int, asyncio.Event] = {}
        self._loads: dict[int, _Flight] = {}
        self._removals: dict[int, asyncio.Task[FreedBytes]] = {}
        self._unusable = _Unusable(clock)

    def resident(self) -> dict[int, AdapterInfo]:
        """What is in host memory or in a slot."""
        return {info.lora_int_id: info for info in self._client.stats().adapters}

    def is_loading(self, lora_int_id: int) -> bool:
        """Whether a load of it is under way on a request's behalf."""
        return lora_int_id in self._loads

    def is_wanted(self, lora_int_id: int) -> bool:
        """Whether it is used or being loaded."""
        return lora_int_id in self._uses or lora_int_id in self._loads

    def removal(self, lora_int_id: int) -> asyncio.Task[FreedBytes] | None:
        """Its unload, if one is under way: it must have gone before it comes again."""
        return self._removals.get(lora_int_id)

    def hold(self, lora_int_id: int) -> None:
        """Have an unload wait until ``release``."""
        self._uses[lora_int_id] += 1
        self.leases.used(lora_int_id)

    def release(self, lora_int_id: int) -> None:
        """One use less."""
        self._uses[lora_int_id] -= 1
        if self._uses[lora_int_id] == 0:
            del self._uses[lora_int_id]
            self.leases.unused(lora_int_id)
            event = self._unused.pop(lora_int_id, None)
            if event is not None:
                event.set()

    async def ensure(self, principal: Principal, entry: Entry) -> None:
        """Have held content resident; raises what a load is refused with."""
        if entry.lora.lora_int_id in self.resident():
            self.leases.renew(principal, entry)
            return
        self._unusable.refuse(entry.lora.digest)
        await self._load_once(principal, entry)

    async def add(
        self, principal: Principal, entry: Entry, level: AdapterLevel, pinned: bool
    ) -> AdapterInfo:
        """Load, after a removal that is under way, within ``adapter_wait_s``; else 503."""
        lora_int_id = entry.lora.lora_int_id
        try:
            async with asyncio.timeout(self._adapter_wait_s):
                while (removal := self._removals.get(lora_int_id)) is not None:
                    await asyncio.wait({removal})
                self.hold(lora_int_id)
                try:
                    return await self._load(principal, entry, level, pinned)
                finally:
                    self.release(lora_int_id)
        except TimeoutError:
            raise Unavailable(
                "The adapter could not be loaded in time.", retry_after_s=RETRY_AFTER_S
            ) from None

    async def pin(self, lora_int_id: int, *, pinned: bool) -> AdapterInfo:
        """Pin or unpin what is resident."""
        return await self._client.pin_lora(lora_int_id, pinned=pinned)

    def remove(self, lora_int_id: int) -> asyncio.Task[FreedBytes]:
        """Drain and unload, beside whoever asks; the one that is under way, if there is one."""
        removal = self._removals.get(lora_int_id)
        if removal is None:
            removal = asyncio.create_task(self._remove(lora_int_id), name=f"unload {lora_int_id}")
            self._removals[lora_int_id] = removal
            removal.add_done_callback(lambda task: self._removed(lora_int_id, task))
        return removal

    async def close(self) -> None:
        """Cancel what is under way, and let go of the leases."""
        tasks = [*(flight.task for flight in self._loads.values()), *self._removals.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.leases.close()

    def check_integrity(self) -> None:
        """Raise `AssertionError` when an idle server still holds uses or flights."""
        assert not +self._uses, self._uses
        loads = [flight.task for flight in self._loads.values()]
        assert all(not task.done() for task in (*loads, *self._removals.values()))
        self.leases.check_integrity()

    # -- loading ----------------------------------------------------------------------------------

    async def _load_once(self, principal: Principal, entry: Entry) -> AdapterInfo:
        """One flight per content; a waiter that leaves does not stop it."""
        lora_int_id = entry.lora.lora_int_id
        while True:
            flight = self._loads.get(lora_int_id)
            if flight is None:
                flight = _Flight(
                    entry.name,
                    asyncio.create_task(
                        self._load_held(principal, entry), name=f"load {entry.name}"
                    ),
                )
                self._loads[lora_int_id] = flight
                flight.task.add_done_callback(partial(self._loaded, entry, self._clock()))
            await asyncio.wait({flight.task})
            if flight.task.cancelled():
                raise Unavailable("The server is shutting down.")
            error = flight.task.exception()
            if flight.name != entry.name and _is_of_a_name(error):
                # Another name's folder no longer holds this content, or is gone; ours may.
                continue
            return flight.task.result()

    def _loaded(self, entry: Entry, began: float, task: asyncio.Task[AdapterInfo]) -> None:
        self._loads.pop(entry.lora.lora_int_id, None)
        self._names.changed()
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log_refusal(entry.name, error)
            # A mismatch says that this is not the content, and nothing of the content itself.
            if isinstance(error, UnusableAdapter) and not isinstance(error, ManifestMismatch):
                self._unusable.remember(entry.lora.digest, error)
        else:
            rank, seconds = task.result().rank, self._clock() - began
            logger.info("adapter %s is loaded: rank %d, %.1f s", entry.name, rank, seconds)

    async def _load_held(self, principal: Principal, entry: Entry) -> AdapterInfo:
        """The flight uses what it loads: its waiters may all have left."""
        self.hold(entry.lora.lora_int_id)
        try:
            return await self._load(principal, entry, "host", pinned=False)
        finally:
            self.release(entry.lora.lora_int_id)

    async def _load(
        self, principal: Principal, entry: Entry, level: AdapterLevel, pinned: bool
    ) -> AdapterInfo:
        info = await self._load_files(principal, entry, level, pinned)
        # Still told when the weights have left the memory again.
        entry.host_bytes = info.bytes
        return info

    async def _load_files(
        self, principal: Principal, entry: Entry, level: AdapterLevel, pinned: bool
    ) -> AdapterInfo:
        if entry.parsed is None:
            return await self._client.add_lora(entry.lora, level=level, pinned=pinned)
        try:
            return await self._load_leased(principal, entry, level, pinned)
        except UnusableAdapter:
            # Bits rot on disks; what is sound and unusable all the same stays refused.
            if not await self._registry.repair(entry.lora):
                raise
        logger.warning("the cached files of %s were damaged; fetched anew", entry.name)
        await self.leases.release(entry.lora.lora_int_id)
        return await self._load_leased(principal, entry, level, pinned)

    async def _load_leased(
        self, principal: Principal, entry: Entry, level: AdapterLevel, pinned: bool
    ) -> AdapterInfo:
        folder = await self.leases.folder(principal, entry)
        lora = msgspec.structs.replace(entry.lora, lora_path=str(folder))
        return await self._client.add_lora(lora, level=level, pinned=pinned)

    # -- unloading --------------------------------------------------------------------------------

    def _removed(self, lora_int_id: int, task: asyncio.Task[FreedBytes]) -> None:
        self._removals.pop(lora_int_id, None)
        self._names.changed()
        if not task.cancelled() and task.exception() is not None:
            logger.warning("unloading adapter %d failed: %s", lora_int_id, task.exception())

    async def _remove(self, lora_int_id: int) -> FreedBytes:
        """Drain here first, so that no request that holds the id can bring it back."""
        deadline = self._clock() + DRAIN_S
        if self._uses[lora_int_id] > 0:
            event = self._unused.setdefault(lora_int_id, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), DRAIN_S)
            except TimeoutError:
                logger.warning("adapter %d is unloaded under running requests", lora_int_id)
        left = max(0.0, deadline - self._clock())
        freed = await self._client.remove_lora(lora_int_id, drain_timeout_s=left)
        disk = await self.leases.release(lora_int_id)
        return msgspec.structs.replace(freed, disk=disk)


class _Unusable:
    """Content that could not be loaded, and why: reading it again would end the same way.

    Kept for minutes only, since a busy machine can make a sound adapter miss a deadline.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reasons: OrderedDict[str, tuple[float, UnusableAdapter]] = OrderedDict()

    def refuse(self, digest: str) -> None:
        """Raise what the content was refused with, if it was so a short while ago."""
        until, error = self._reasons.get(digest, (0.0, None))
        if error is None:
            return
        if self._clock() < until:
            raise error.with_traceback(None)
        del self._reasons[digest]

    def remember(self, digest: str, error: UnusableAdapter) -> None:
        self._reasons[digest] = (self._clock() + UNUSABLE_S, error)
        self._reasons.move_to_end(digest)
        while len(self._reasons) > MAX_UNUSABLE:
            self._reasons.popitem(last=False)


def log_refusal(name: str, error: BaseException) -> None:
    """The client is told; whoever is woken up has only the log."""
    logger.info("adapter %s is not loaded: %s", name, error)


def _is_of_a_name(error: BaseException | None) -> bool:
    """Whether a load failed for what its name means or may, rather than for its content."""
    of_a_name = (AdapterNotFound, Conflict, Forbidden, ManifestMismatch, RateLimited)
    return isinstance(error, of_a_name)
