"""The disk leases of content in use: one per content, however many use it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from mural_resolvers.disk_cache import CacheFull, NotCached
from mural_resolvers.errors import MuralError, Unavailable
from mural_resolvers.files import is_folder
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.tenants import Principal
from mural_server.catalog.names import Entry

__all__ = ["LINGER_S", "ContentLeases"]

logger = logging.getLogger("mural.catalog")

T = TypeVar("T")

LINGER_S = 30.0
"""For how long a lease outlives its last use, so that a pause does not cost a download."""


@dataclass(slots=True, eq=False)
class _Held:
    """A lease, or one that is being taken; its task enters it and leaves it again."""

    num_bytes: int
    folder: asyncio.Future[Path]
    end: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None
    idle: asyncio.TimerHandle | None = None


class ContentLeases:
    """Keeps what requests use in the disk cache, and lets it go some time after the last of them.

    Whoever uses content says so (``used``, ``unused``). What is merely resident has no lease: its
    files may go, and are fetched again when they are needed. For one event loop.
    """

    def __init__(self, registry: LoRAResolverRegistry) -> None:
        self._registry = registry
        self._held: dict[int, _Held] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def folder(self, principal: Principal, entry: Entry) -> Path:
        """The folder of content in use, which stays; fetched again where it has gone.

        Raises as a look-up does.
        """
        return await self.making_room(lambda: self._folder(principal, entry))

    async def making_room(self, fetch: Callable[[], Awaitable[T]]) -> T:
        """Fetch; where the cache is full, once more without the leases that nobody uses."""
        try:
            return await fetch()
        except CacheFull:
            if not await self._release_idle():
                raise
        return await fetch()

    async def _folder(self, principal: Principal, entry: Entry) -> Path:
        while True:
            mine = False
            held = self._held.get(entry.lora.lora_int_id)
            if held is None:
                held, mine = self._begin(principal, entry, fetch=True), True
            await asyncio.wait({held.folder})
            if held.folder.cancelled():
                raise Unavailable("The server is shutting down.")
            error = held.folder.exception()
            if error is not None and not mine:
                # Of another name's, or of one that was not to fetch: ours may be there.
                continue
            folder = held.folder.result()
            if mine or await asyncio.to_thread(_is_there, folder):
                return folder
            # A lease keeps it from eviction, not from an administrator or another process that
            # found it rotten.
            if self._held.get(entry.lora.lora_int_id) is held:
                await self.release(entry.lora.lora_int_id)

    def renew(self, principal: Principal, entry: Entry) -> None:
        """Have resident content leased, beside the request, where its files are still there."""
        if entry.cached and entry.lora.lora_int_id not in self._held:
            self._begin(principal, entry, fetch=False)

    def used(self, lora_int_id: int) -> None:
        """Content is in use."""
        held = self._held.get(lora_int_id)
        if held is not None and held.idle is not None:
            held.idle.cancel()
            held.idle = None

    def unused(self, lora_int_id: int) -> None:
        """Nobody uses it any longer."""
        held = self._held.get(lora_int_id)
        if held is not None and held.idle is None:
            loop = asyncio.get_running_loop()
            held.idle = loop.call_later(LINGER_S, self._end, lora_int_id)

    async def release(self, lora_int_id: int) -> int:
        """Let go now; gives the bytes that may leave the disk cache with that."""
        held = self._end(lora_int_id)
        if held is None or held.task is None:
            return 0
        await asyncio.wait({held.task})
        whole = not held.folder.cancelled() and held.folder.exception() is None
        return held.num_bytes if whole else 0

    async def _release_idle(self) -> bool:
        idle = [key for key, held in self._held.items() if held.idle is not None]
        return sum([await self.release(key) for key in idle]) > 0

    async def close(self) -> None:
        """Let go of all."""
        for lora_int_id in list(self._held):
            self._end(lora_int_id)
        tasks = list(self._ending)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raise `AssertionError` where a lease has no task to keep it."""
        assert all(held.task is not None and not held.task.done() for held in self._held.values())

    def _begin(self, principal: Principal, entry: Entry, *, fetch: bool) -> _Held:
        lora_int_id = entry.lora.lora_int_id
        num_bytes = entry.manifest.num_bytes if entry.cached else 0
        held = _Held(num_bytes, asyncio.get_running_loop().create_future())
        held.task = asyncio.create_task(
            self._keep(principal, entry, held, fetch=fetch), name=f"lease {entry.name}"
        )
        self._held[lora_int_id] = held
        held.task.add_done_callback(lambda task: self._ended(lora_int_id, held, task))
        return held

    def _end(self, lora_int_id: int) -> _Held | None:
        held = self._held.pop(lora_int_id, None)
        if held is not None and held.task is not None:
            if held.idle is not None:
                held.idle.cancel()
            held.end.set()
            self._ending.add(held.task)
            held.task.add_done_callback(self._ending.discard)
        return held

    async def _keep(self, principal: Principal, entry: Entry, held: _Held, *, fetch: bool) -> None:
        try:
            async with self._registry.lease(principal, entry.lora, fetch=fetch) as folder:
                held.folder.set_result(folder)
                await held.end.wait()
        except NotCached as error:
            _tell(held, error)
        except MuralError as error:
            logger.info("adapter %s has no lease: %s", entry.name, error)
            _tell(held, error)

    def _ended(self, lora_int_id: int, held: _Held, task: asyncio.Task[None]) -> None:
        if self._held.get(lora_int_id) is held:
            del self._held[lora_int_id]
        if not held.folder.done():
            # Cancelled, or failed in a way that nobody knew of.
            held.folder.cancel()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a lease ended: %s", error, exc_info=error)


def _tell(held: _Held, error: MuralError) -> None:
    if not held.folder.done():
        held.folder.set_exception(error)
        # Nobody may be waiting: it is looked at here.
        held.folder.exception()


def _is_there(folder: Path) -> bool:
    try:
        return is_folder(folder)
    except OSError:
        # What is wrong with the disk is told where it is leased anew.
        return False
