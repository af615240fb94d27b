"""From a request's ``model`` to the content that it means: allowed, then known or asked for."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable

from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    MalformedName,
    MuralError,
    TooLarge,
    Unavailable,
    UnusableAdapter,
    quoted,
)
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.names import AdapterName, parse_name, validate_admin_name
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.resolver import ResolvedAdapter
from mural_resolvers.tenants import Principal, authorize
from mural_server.catalog.names import MAX_RESOLVED_NAMES, Asker, Entry, KnownNames
from mural_server.catalog.residency import Residency, log_refusal
from mural_server.lora.host_size import host_bytes_of_files

__all__ = ["LookUp"]

logger = logging.getLogger("mural.catalog")

MAX_ASKERS = 256
RECHECK_S = 10.0
STALE_S = 60.0


class LookUp:
    """Finds names, and asks the sources again now and then whether they still have them."""

    def __init__(
        self,
        registry: LoRAResolverRegistry,
        ids: LoRAIdAllocator,
        names: KnownNames,
        residency: Residency,
        *,
        adapters_on: bool,
        dtype: str,
        limits: AdapterLimits,
        clock: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._ids = ids
        self._names = names
        self._residency = residency
        self._adapters_on = adapters_on
        self._dtype = dtype
        self._limits = limits
        self._clock = clock
        self._rechecks: dict[tuple[str, Asker], asyncio.Task[None]] = {}
        self._aliases: OrderedDict[tuple[str, Asker], tuple[float, Entry]] = OrderedDict()

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the sources, in the order in which they are asked."""
        return self._registry.source_names

    @property
    def caches(self) -> bool:
        """Whether there is a disk cache, which there is where a source downloads."""
        return self._registry.fetcher is not None

    def authorize(self, principal: Principal, model: str) -> None:
        """Raise `Forbidden` or `MalformedName`, from the name alone, before any look-up."""
        entry = self._names.admin.get(model)
        if entry is not None:
            authorize(principal, model, shared=entry.shared)
            return
        try:
            name = parse_name(model)
        except MalformedName:
            if not _is_admin_name(model):
                raise
            # It might have been an admin's name: whoever may not use those learns nothing.
            authorize(principal, model)
        else:
            authorize(principal, name)

    async def find(self, principal: Principal, model: str) -> Entry:
        """The entry of a name that was authorised; raises `AdapterNotFound`, `Unavailable`, …."""
        entry = self._names.admin.get(model)
        if entry is not None:
            return entry
        try:
            name = parse_name(model)
        except MalformedName:
            raise AdapterNotFound(f"The model {quoted(model)} does not exist.") from None
        if not self._adapters_on:
            raise AdapterNotFound("This server serves its base model only: adapters are off.")
        asker = Asker.of(principal)
        known = self._names.resolved.get(name.short) or self._aliased(name, asker)
        if known is None or asker not in known.checked:
            return await self._ask(principal, name, None)
        age_s = self._clock() - known.checked[asker]
        if age_s >= STALE_S:
            return await self._ask(principal, name, known)
        self._names.resolved.move_to_end(known.name)
        if age_s >= RECHECK_S:
            self._recheck(principal, name, known)
        return known

    def forget(self, entry: Entry) -> None:
        """Drop a resolved name; its weights go in the background if it was the last one."""
        self._names.resolved.pop(entry.name, None)
        self._names.changed()
        if self._names.of_content(entry.lora.lora_int_id) == 0:
            self._residency.remove(entry.lora.lora_int_id)

    async def close(self) -> None:
        """Cancel what is asked beside requests."""
        tasks = list(self._rechecks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _aliased(self, alias: AdapterName, asker: Asker) -> Entry | None:
        """What an alias meant a moment ago, where its source lets it be remembered."""
        until, entry = self._aliases.get((alias.short, asker), (0.0, None))
        if entry is None or self._clock() >= until:
            return None
        return entry if self._names.resolved.get(entry.name) is entry else None

    def _note_alias(self, alias: AdapterName, asker: Asker, entry: Entry, ttl_s: float) -> None:
        key = (alias.short, asker)
        self._aliases[key] = (self._clock() + ttl_s, entry)
        self._aliases.move_to_end(key)
        while len(self._aliases) > MAX_RESOLVED_NAMES:
            self._aliases.popitem(last=False)

    # -- asking -----------------------------------------------------------------------------------

    def _recheck(self, principal: Principal, name: AdapterName, known: Entry) -> None:
        """Ask the sources beside the request: a slow one must not delay what is resident."""
        key = (known.name, Asker.of(principal))
        if key not in self._rechecks:
            task = asyncio.create_task(
                self._ask_quietly(principal, name, known), name=f"recheck {known.name}"
            )
            self._rechecks[key] = task
            task.add_done_callback(lambda _: self._rechecks.pop(key))

    async def _ask_quietly(self, principal: Principal, name: AdapterName, known: Entry) -> None:
        try:
            await self._ask(principal, name, known)
        except MuralError as error:
            log_refusal(known.name, error)

    async def _ask(self, principal: Principal, name: AdapterName, known: Entry | None) -> Entry:
        """Ask the sources; ``known`` is what they said to this principal before."""
        asker = Asker.of(principal)
        try:
            adapter = await self._residency.leases.making_room(
                lambda: self._registry.resolve(principal, name)
            )
            host_bytes = await self._host_bytes(adapter)
            entry = self._remember(adapter, host_bytes, asker)
        except Unavailable as error:
            # A source that is down takes nothing away from what is known already.
            if known is not None:
                known.checked[asker] = self._clock() - RECHECK_S
                return known
            log_refusal(name.short, error)
            raise
        except Forbidden:
            # The source's own refusal, of this principal: others may still have it.
            if known is not None:
                known.checked.pop(asker, None)
            raise
        except AdapterNotFound:
            if known is not None and principal.sources is not None:
                # Of the sources that this key may use: others may find it elsewhere.
                known.checked.pop(asker, None)
            elif known is not None:
                self.forget(known)
            raise
        except (Conflict, TooLarge, UnusableAdapter) as error:
            log_refusal(name.short, error)
            raise
        if adapter.alias_ttl_s > 0:
            self._note_alias(name, asker, entry, adapter.alias_ttl_s)
        return entry

    async def _host_bytes(self, adapter: ResolvedAdapter) -> int | None:
        """What new content will take in host memory, as far as its files tell."""
        old = self._names.resolved.get(adapter.name.short)
        if old is not None and old.lora.digest == adapter.manifest.digest:
            return old.host_bytes
        return await asyncio.to_thread(host_bytes_of_files, adapter.path, self._dtype, self._limits)

    def _remember(self, adapter: ResolvedAdapter, host_bytes: int | None, asker: Asker) -> Entry:
        short, digest = adapter.name.short, adapter.manifest.digest
        old = self._names.resolved.get(short)
        if old is not None and old.lora.digest == digest:
            self._note(old, adapter, asker)
            return old
        if old is not None and adapter.source not in old.sources:
            raise Conflict(
                f"{quoted(short)} has the digest {old.lora.digest} here, and other content in "
                f"the source {quoted(adapter.source)}."
            )
        if old is not None:
            # A version is immutable, so its folder was tampered with: never mix the two.
            logger.warning("the content of %s changed in its source", short)
            self.forget(old)
        entry = Entry(
            name=short,
            lora=LoRARequest(short, self._ids.id_for(digest), str(adapter.path), digest),
            manifest=adapter.manifest,
            parsed=adapter.name,
            cached=adapter.cached,
            checked={asker: self._clock()},
            sources={adapter.source},
            host_bytes=host_bytes,
        )
        self._names.resolved[short] = entry
        self._bound_names()
        self._names.changed()
        return entry

    def _note(self, entry: Entry, adapter: ResolvedAdapter, asker: Asker) -> None:
        """A source still has what is known."""
        entry.checked.pop(asker, None)
        entry.checked[asker] = self._clock()
        if len(entry.checked) > MAX_ASKERS:
            del entry.checked[next(iter(entry.checked))]
        entry.sources.add(adapter.source)
        entry.cached = adapter.cached
        self._names.resolved.move_to_end(entry.name)

    def _bound_names(self) -> None:
        if len(self._names.resolved) <= MAX_RESOLVED_NAMES:
            return
        # What is resident or in use keeps its name, so that it can be listed and unloaded.
        resident = self._residency.resident()
        for name, entry in list(self._names.resolved.items()):
            lora_int_id = entry.lora.lora_int_id
            if lora_int_id not in resident and not self._residency.is_wanted(lora_int_id):
                del self._names.resolved[name]
                return
        self.forget(next(iter(self._names.resolved.values())))


def _is_admin_name(text: str) -> bool:
    try:
        validate_admin_name(text)
    except MalformedName:
        return False
    return True
