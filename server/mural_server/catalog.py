"""Which names this server answers to, and which weights stand behind each.

A name is looked up in the order of the design: the base's served names, names that an admin
registered, then the grammar ``tenant/adapter:version`` through the resolvers. Authorisation comes
before any look-up. Names with one digest share one ``lora_int_id``, so the weights go with the
last name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from mural_resolvers.digest import TEMPLATE_FILE, FileEntry
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    InvalidInput,
    MalformedName,
    ManifestMismatch,
    MuralError,
    RateLimited,
    TooLarge,
    Unavailable,
    UnusableAdapter,
    quoted,
)
from mural_resolvers.files import is_folder
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.manifest import Manifest, checked_manifest
from mural_resolvers.names import AdapterName, parse_name, validate_admin_name
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.resolver import ResolvedAdapter
from mural_resolvers.tenants import (
    ADMIN,
    Principal,
    authorize,
    authorize_base,
    may_use,
    may_use_source,
)
from mural_resolvers.turns import KeyedLocks
from mural_server.engine.client import EngineClient
from mural_server.engine.messages import AdapterInfo, AdapterLevel, FreedBytes

__all__ = [
    "OPERATOR",
    "AdapterCatalog",
    "AdapterView",
    "AlreadyLoaded",
    "ServedModel",
]

logger = logging.getLogger("mural.catalog")

OPERATOR = Principal(tenant=None, rights=frozenset({ADMIN}), key_id="operator")
"""The principal of the command line and of the control API."""

MAX_ADMIN_NAMES = 4096
MAX_RESOLVED_NAMES = 4096
MAX_ASKERS = 256
RECHECK_S = 10.0
STALE_S = 60.0
MAX_UNUSABLE = 1024
UNUSABLE_S = 300.0
DRAIN_S = 60.0
RETRY_AFTER_S = 5.0

AdapterState = Literal["slot", "host", "disk"]


class AlreadyLoaded(InvalidInput):
    """The load endpoint was given a name that is taken; vLLM's words and status."""

    type = "InvalidUserInput"
    code = "already_loaded"


class ServedModel(NamedTuple):
    """What a request's ``model`` means: the exact name, and the adapter (None: the base)."""

    name: str
    lora: LoRARequest | None = None
    template: FileEntry | None = None
    """The chat template that the adapter ships, as its digest knows it."""


class AdapterView(msgspec.Struct, frozen=True, kw_only=True):
    """One known name, as lists show it."""

    name: str
    digest: str
    path: str
    rank: int
    bytes: int
    state: AdapterState
    loading: bool = False
    pinned: bool = False
    running: int = 0
    waiting: int = 0
    registered: bool = False
    """By an admin, rather than found through the grammar."""


class _Asker(NamedTuple):
    tenant: str | None
    rights: frozenset[str]
    grants: tuple[str, ...]
    sources: frozenset[str] | None

    @classmethod
    def of(cls, principal: Principal) -> _Asker:
        return cls(principal.tenant, principal.rights, principal.grants, principal.sources)


class _Flight(NamedTuple):
    """A load under way, and the name on whose behalf it is."""

    name: str
    task: asyncio.Task[AdapterInfo]


class _Entry(msgspec.Struct, kw_only=True):
    name: str
    lora: LoRARequest
    manifest: Manifest
    shared: bool = False
    parsed: AdapterName | None = None
    """None for an admin's name."""
    checked: dict[_Asker, float] = {}
    """When the sources last gave this to whom: a source may refuse one and not another."""
    sources: set[str] = set()
    """Those that have it, as far as is known."""

    def served(self) -> ServedModel:
        template = next((f for f in self.manifest.files if f.path == TEMPLATE_FILE), None)
        return ServedModel(self.name, self.lora, template)

    def usable_by(self, principal: Principal) -> bool:
        return may_use(principal, self.parsed or self.name, shared=self.shared) and (
            self.parsed is None or any(may_use_source(principal, name) for name in self.sources)
        )


class AdapterCatalog:
    """The names of one server. For one event loop.

    ``roots`` are the folders from which the load endpoint may take adapters. ``adapter_wait_s``
    bounds how long a request waits for look-up and load together.
    """

    def __init__(
        self,
        client: EngineClient,
        registry: LoRAResolverRegistry,
        ids: LoRAIdAllocator,
        *,
        served: Sequence[str],
        adapter_wait_s: float,
        roots: Iterable[Path] = (),
        limits: AdapterLimits = DEFAULT_LIMITS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.served = tuple(served)
        self.version = 0
        """Grows with every change of the names; for those who watch."""
        self._client = client
        self._registry = registry
        self._ids = ids
        self._adapter_wait_s = adapter_wait_s
        self._roots = tuple(Path(os.path.realpath(root)) for root in roots)
        self._limits = limits
        self._clock = clock
        self._admin: dict[str, _Entry] = {}
        self._resolved: OrderedDict[str, _Entry] = OrderedDict()
        self._uses: Counter[int] = Counter()
        self._unused: dict[int, asyncio.Event] = {}
        self._loads: dict[int, _Flight] = {}
        self._rechecks: dict[tuple[str, _Asker], asyncio.Task[None]] = {}
        self._unusable = _Unusable(clock)
        self._removals: dict[int, asyncio.Task[FreedBytes]] = {}
        # One admin's change of a name at a time.
        self._name_locks = KeyedLocks()

    # -- a request's look-up ----------------------------------------------------------------------

    @asynccontextmanager
    async def use(self, principal: Principal, model: str) -> AsyncIterator[ServedModel]:
        """Resolve ``model``, have its adapter resident, and keep an unload waiting meanwhile.

        Raises `MalformedName`, `Forbidden` (before any look-up), `AdapterNotFound`,
        `UnusableAdapter`, or `Unavailable` when it takes longer than ``adapter_wait_s``.
        """
        if model in self.served:
            authorize_base(principal)
            yield ServedModel(self.served[0])
            return
        self._authorize(principal, model)
        try:
            async with asyncio.timeout(self._adapter_wait_s):
                entry = await self._find_and_hold(principal, model)
                try:
                    await self._await_resident(principal, entry)
                except BaseException:
                    self._release(entry.lora.lora_int_id)
                    raise
        except TimeoutError:
            raise Unavailable(
                "The adapter could not be made ready in time.", retry_after_s=RETRY_AFTER_S
            ) from None
        try:
            yield entry.served()
        finally:
            self._release(entry.lora.lora_int_id)

    @asynccontextmanager
    async def files(self, lora: LoRARequest) -> AsyncIterator[Path]:
        """Hold the folder of an adapter in use in its place, while a file of it is read.

        Weights may be resident longer than the disk cache keeps their folder, which is fetched
        again then. Raises as a look-up.
        """
        if ":" not in lora.lora_name:
            # An admin's name: its folder is not the cache's.
            yield Path(lora.lora_path)
            return
        async with self._registry.lease(OPERATOR, lora) as folder:
            yield folder

    async def find(self, principal: Principal, model: str) -> ServedModel:
        """As `use`, without making the adapter resident."""
        if model in self.served:
            authorize_base(principal)
            return ServedModel(self.served[0])
        self._authorize(principal, model)
        return (await self._find(principal, model)).served()

    async def _find_and_hold(self, principal: Principal, model: str) -> _Entry:
        while True:
            entry = await self._find(principal, model)
            removal = self._removals.get(entry.lora.lora_int_id)
            if removal is None:
                # No await lies between the look-up and the hold that makes an unload wait.
                self._hold(entry.lora.lora_int_id)
                return entry
            # The same content is on its way out: it must have gone before it comes again.
            await asyncio.wait({removal})

    def _authorize(self, principal: Principal, model: str) -> None:
        entry = self._admin.get(model)
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

    async def _find(self, principal: Principal, model: str) -> _Entry:
        entry = self._admin.get(model)
        if entry is not None:
            return entry
        try:
            name = parse_name(model)
        except MalformedName:
            raise AdapterNotFound(f"The model {quoted(model)} does not exist.") from None
        if self._client.info.max_loras == 0:
            raise AdapterNotFound("This server serves its base model only: adapters are off.")
        asker = _Asker.of(principal)
        known = self._resolved.get(name.short)
        if known is None or asker not in known.checked:
            return await self._ask(principal, name, None)
        age_s = self._clock() - known.checked[asker]
        if age_s >= STALE_S:
            return await self._ask(principal, name, known)
        self._resolved.move_to_end(name.short)
        if age_s >= RECHECK_S:
            self._recheck(principal, name, known)
        return known

    def _recheck(self, principal: Principal, name: AdapterName, known: _Entry) -> None:
        """Ask the sources beside the request: a slow one must not delay what is resident."""
        key = (known.name, _Asker.of(principal))
        if key not in self._rechecks:
            task = asyncio.create_task(
                self._ask_quietly(principal, name, known), name=f"recheck {known.name}"
            )
            self._rechecks[key] = task
            task.add_done_callback(lambda _: self._rechecks.pop(key))

    async def _ask_quietly(self, principal: Principal, name: AdapterName, known: _Entry) -> None:
        try:
            await self._ask(principal, name, known)
        except MuralError as error:
            _log_refusal(known.name, error)

    async def _ask(self, principal: Principal, name: AdapterName, known: _Entry | None) -> _Entry:
        """Ask the sources; ``known`` is what they said to this principal before."""
        asker = _Asker.of(principal)
        try:
            adapter = await self._registry.resolve(principal, name)
        except Unavailable as error:
            # A source that is down takes nothing away from what is known already.
            if known is not None:
                known.checked[asker] = self._clock() - RECHECK_S
                return known
            _log_refusal(name.short, error)
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
                self._forget(known)
            raise
        except (Conflict, TooLarge, UnusableAdapter) as error:
            _log_refusal(name.short, error)
            raise
        return self._remember(adapter, asker)

    def _remember(self, adapter: ResolvedAdapter, asker: _Asker) -> _Entry:
        short, digest = adapter.name.short, adapter.manifest.digest
        old = self._resolved.get(short)
        if old is not None and old.lora.digest == digest:
            old.checked.pop(asker, None)
            old.checked[asker] = self._clock()
            old.sources.add(adapter.source)
            if len(old.checked) > MAX_ASKERS:
                del old.checked[next(iter(old.checked))]
            self._resolved.move_to_end(short)
            return old
        if old is not None:
            # A version is immutable, so its folder was tampered with: never mix the two.
            logger.warning("the content of %s changed in its source", short)
            self._forget(old)
        entry = _Entry(
            name=short,
            lora=LoRARequest(short, self._ids.id_for(digest), str(adapter.path), digest),
            manifest=adapter.manifest,
            parsed=adapter.name,
            checked={asker: self._clock()},
            sources={adapter.source},
        )
        self._resolved[short] = entry
        self._bound_resolved()
        self.version += 1
        return entry

    def _bound_resolved(self) -> None:
        if len(self._resolved) <= MAX_RESOLVED_NAMES:
            return
        # What is resident or in use keeps its name, so that it can be listed and unloaded.
        resident = {info.lora_int_id for info in self._client.stats().adapters}
        for name, entry in list(self._resolved.items()):
            if entry.lora.lora_int_id not in resident | self._uses.keys() | self._loads.keys():
                del self._resolved[name]
                return
        self._forget(next(iter(self._resolved.values())))

    def _forget(self, entry: _Entry) -> None:
        """Drop a resolved name; its weights go in the background if it was the last one."""
        self._resolved.pop(entry.name, None)
        self.version += 1
        if self._names_of(entry.lora.lora_int_id) == 0:
            self._start_removal(entry.lora.lora_int_id)

    # -- residency --------------------------------------------------------------------------------

    async def _await_resident(self, principal: Principal, entry: _Entry) -> None:
        lora_int_id = entry.lora.lora_int_id
        if lora_int_id not in self._resident():
            self._unusable.refuse(entry.lora.digest)
            await self._load_once(principal, entry)

    def _resident(self) -> dict[int, AdapterInfo]:
        return {info.lora_int_id: info for info in self._client.stats().adapters}

    async def _load_once(self, principal: Principal, entry: _Entry) -> AdapterInfo:
        """One flight per content; a waiter that leaves does not stop it."""
        lora_int_id = entry.lora.lora_int_id
        while True:
            flight = self._loads.get(lora_int_id)
            if flight is None:
                flight = _Flight(
                    entry.name,
                    asyncio.create_task(self._load(principal, entry), name=f"load {entry.name}"),
                )
                self._loads[lora_int_id] = flight
                flight.task.add_done_callback(lambda task: self._loaded(entry, task))
            await asyncio.wait({flight.task})
            if flight.task.cancelled():
                raise Unavailable("The server is shutting down.")
            error = flight.task.exception()
            if flight.name != entry.name and _is_of_a_name(error):
                # Another name's folder no longer holds this content, or is gone; ours may.
                continue
            return flight.task.result()

    def _loaded(self, entry: _Entry, task: asyncio.Task[AdapterInfo]) -> None:
        self._loads.pop(entry.lora.lora_int_id, None)
        self.version += 1
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log_refusal(entry.name, error)
            # A mismatch says that this is not the content, and nothing of the content itself.
            if isinstance(error, UnusableAdapter) and not isinstance(error, ManifestMismatch):
                self._unusable.remember(entry.lora.digest, error)
        else:
            logger.debug("adapter %s is loaded: rank %d", entry.name, task.result().rank)

    async def _load(
        self,
        principal: Principal,
        entry: _Entry,
        level: AdapterLevel = "host",
        pinned: bool = False,
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
        return await self._load_leased(principal, entry, level, pinned)

    async def _load_leased(
        self, principal: Principal, entry: _Entry, level: AdapterLevel, pinned: bool
    ) -> AdapterInfo:
        async with self._registry.lease(principal, entry.lora) as folder:
            lora = msgspec.structs.replace(entry.lora, lora_path=str(folder))
            return await self._client.add_lora(lora, level=level, pinned=pinned)

    def _hold(self, lora_int_id: int) -> None:
        self._uses[lora_int_id] += 1

    def _release(self, lora_int_id: int) -> None:
        self._uses[lora_int_id] -= 1
        if self._uses[lora_int_id] == 0:
            del self._uses[lora_int_id]
            event = self._unused.pop(lora_int_id, None)
            if event is not None:
                event.set()

    def _names_of(self, lora_int_id: int) -> int:
        entries = (*self._admin.values(), *self._resolved.values())
        return sum(entry.lora.lora_int_id == lora_int_id for entry in entries)

    def _start_removal(self, lora_int_id: int) -> asyncio.Task[FreedBytes]:
        removal = self._removals.get(lora_int_id)
        if removal is None:
            removal = asyncio.create_task(self._remove(lora_int_id), name=f"unload {lora_int_id}")
            self._removals[lora_int_id] = removal
            removal.add_done_callback(lambda task: self._removed(lora_int_id, task))
        return removal

    def _removed(self, lora_int_id: int, task: asyncio.Task[FreedBytes]) -> None:
        self._removals.pop(lora_int_id, None)
        self.version += 1
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
        return await self._client.remove_lora(lora_int_id, drain_timeout_s=left)

    # -- what admins and the control API do -------------------------------------------------------

    async def load(
        self,
        name: str,
        path: str,
        *,
        inplace: bool = False,
        shared: bool = False,
        pinned: bool = False,
    ) -> AdapterInfo:
        """Register an admin's name for a folder inside ``roots`` and load it.

        Raises `MalformedName`, `AlreadyLoaded`, `Forbidden` for a path outside, `AdapterNotFound`
        for an absent folder, `UnusableAdapter`, `Unavailable`; nothing is left behind then.
        """
        self._check_free(name, inplace=inplace)
        folder, root = self._contained(path)
        return await self._register(
            name, folder, within=root, inplace=inplace, shared=shared, pinned=pinned
        )

    async def load_trusted(self, name: str, path: str, *, shared: bool) -> AdapterInfo:
        """As `load`, for a folder that the operator named on the command line."""
        self._check_free(name, inplace=False)
        folder = await asyncio.to_thread(_real, path)
        return await self._register(
            name, folder, within=folder, inplace=False, shared=shared, pinned=False
        )

    def _check_free(self, name: str, *, inplace: bool) -> None:
        if name in self.served:
            raise AlreadyLoaded(f"The name {quoted(name)} is the base model's.")
        validate_admin_name(name)
        if name in self._admin and not inplace:
            raise AlreadyLoaded(f"The lora adapter '{name}' has already been loaded.")
        if name not in self._admin and len(self._admin) >= MAX_ADMIN_NAMES:
            raise TooLarge(f"At most {MAX_ADMIN_NAMES} names can be registered.")

    def _contained(self, path: str) -> tuple[Path, Path]:
        base = self._roots[0] if self._roots else Path("/")
        try:
            folder = Path(os.path.realpath(base / path))
        except (ValueError, OSError):
            raise InvalidInput("lora_path is not a path.") from None
        for root in self._roots:
            if folder != root and folder.is_relative_to(root):
                return folder, root
        raise Forbidden(
            "lora_path is outside the folders given by --adapter-dir and --allowed-adapter-path."
        )

    async def _register(
        self, name: str, folder: Path, *, within: Path, inplace: bool, shared: bool, pinned: bool
    ) -> AdapterInfo:
        async with self._name_locks.hold(name):
            self._check_free(name, inplace=inplace)
            manifest = await asyncio.to_thread(self._read_folder, name, folder, within)
            digest = manifest.digest
            entry = _Entry(
                name=name,
                lora=LoRARequest(name, self._ids.id_for(digest), str(folder), digest),
                manifest=manifest,
                shared=shared,
            )
            info = await self._add_to_stay(entry, pinned)
            old = self._admin.get(name)
            self._admin[name] = entry
            self.version += 1
            if old is not None and self._names_of(old.lora.lora_int_id) == 0:
                # The old content drains under its own id while new requests get the new one.
                self._start_removal(old.lora.lora_int_id)
            return info

    async def _add_to_stay(self, entry: _Entry, pinned: bool) -> AdapterInfo:
        """Load what has no name yet; what comes too late for one is freed again."""
        lora_int_id = entry.lora.lora_int_id
        try:
            info = await self._add(OPERATOR, entry, "host", pinned)
            while lora_int_id in self._removals:
                # Its last other name was unloaded meanwhile, and the weights go with that.
                info = await self._add(OPERATOR, entry, "host", pinned)
        except Unavailable:
            if self._names_of(lora_int_id) == 0:
                # The core may be loading it still, and a pin would keep it under no name.
                self._start_removal(lora_int_id)
            raise
        return info

    def _read_folder(self, name: str, folder: Path, within: Path) -> Manifest:
        try:
            if not is_folder(folder):
                raise AdapterNotFound(f"The folder of the lora adapter '{name}' does not exist.")
            return checked_manifest(folder, self._limits, within=within)
        except OSError as error:
            # strerror alone: the path is not the user's to know.
            raise Unavailable(f"The folder cannot be read: {error.strerror}.") from error

    async def _add(
        self, principal: Principal, entry: _Entry, level: AdapterLevel, pinned: bool
    ) -> AdapterInfo:
        lora_int_id = entry.lora.lora_int_id
        try:
            async with asyncio.timeout(self._adapter_wait_s):
                while (removal := self._removals.get(lora_int_id)) is not None:
                    await asyncio.wait({removal})
                self._hold(lora_int_id)
                try:
                    return await self._load(principal, entry, level, pinned)
                finally:
                    self._release(lora_int_id)
        except TimeoutError:
            raise Unavailable(
                "The adapter could not be loaded in time.", retry_after_s=RETRY_AFTER_S
            ) from None

    async def unload(self, name: str) -> FreedBytes:
        """Drop a name; with the last name of its content the weights are drained and freed.

        Raises `AdapterNotFound` for a name that is not known here.
        """
        async with self._name_locks.hold(name):
            entry = self._known(name)
            if self._admin.pop(name, None) is None:
                self._resolved.pop(entry.name, None)
            self.version += 1
            if self._names_of(entry.lora.lora_int_id) > 0:
                return FreedBytes()
            return await asyncio.shield(self._start_removal(entry.lora.lora_int_id))

    def drop(self, name: AdapterName) -> None:
        """Forget a version that its source has just lost; its weights drain beside."""
        entry = self._resolved.get(name.short)
        if entry is not None:
            self._forget(entry)

    async def pin(self, name: str, *, pinned: bool) -> AdapterInfo:
        """Keep a name's weights resident, loading them if need be, or let them go again."""
        entry = self._known(name)
        if pinned:
            return await self._add(OPERATOR, entry, "host", True)
        if entry.lora.lora_int_id not in self._resident():
            raise AdapterNotFound(f"The lora adapter {quoted(name)} is not resident.")
        return await self._client.pin_lora(entry.lora.lora_int_id, pinned=False)

    async def make_resident(
        self, name: str, *, digest: str | None, level: AdapterLevel, pinned: bool
    ) -> AdapterView:
        """Idempotent; raises `Conflict` when the content is another than ``digest``."""
        if name in self.served:
            raise InvalidInput("The base model is always resident.")
        self._authorize(OPERATOR, name)
        try:
            async with asyncio.timeout(self._adapter_wait_s):
                entry = await self._find(OPERATOR, name)
        except TimeoutError:
            raise Unavailable("No source answered in time.", retry_after_s=RETRY_AFTER_S) from None
        if digest is not None and digest != entry.lora.digest:
            raise Conflict(f"{quoted(entry.name)} has the digest {entry.lora.digest} here.")
        info = await self._add(OPERATOR, entry, level, pinned)
        if info.pinned != pinned:
            info = await self._client.pin_lora(entry.lora.lora_int_id, pinned=pinned)
        self.version += 1
        return self._view(entry, info)

    def _known(self, name: str) -> _Entry:
        entry = self._admin.get(name) or self._resolved.get(_short(name))
        if entry is None:
            raise AdapterNotFound(f"The lora adapter {quoted(name)} cannot be found.")
        return entry

    # -- lists ------------------------------------------------------------------------------------

    def view(self) -> list[AdapterView]:
        """Every known name, with where its weights are."""
        resident = self._resident()
        return [
            self._view(entry, resident.get(entry.lora.lora_int_id))
            for entry in (*self._admin.values(), *self._resolved.values())
        ]

    def digest_of(self, name: str) -> str | None:
        """The digest behind a name, if it is known here."""
        entry = self._admin.get(name) or self._resolved.get(_short(name))
        return None if entry is None else entry.lora.digest

    def visible(self, principal: Principal) -> list[AdapterView]:
        """The names that the principal may use."""
        resident = self._resident()
        return [
            self._view(entry, resident.get(entry.lora.lora_int_id))
            for entry in (*self._admin.values(), *self._resolved.values())
            if entry.usable_by(principal)
        ]

    def _view(self, entry: _Entry, info: AdapterInfo | None) -> AdapterView:
        return AdapterView(
            name=entry.name,
            digest=entry.lora.digest,
            path=entry.lora.lora_path,
            rank=entry.manifest.facts.rank,
            bytes=entry.manifest.num_bytes if info is None else info.bytes,
            state="disk" if info is None else info.level,
            loading=entry.lora.lora_int_id in self._loads,
            pinned=info is not None and info.pinned,
            running=0 if info is None else info.running,
            waiting=0 if info is None else info.waiting,
            registered=entry.parsed is None,
        )

    # -- inside -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel what is under way."""
        loads = [flight.task for flight in self._loads.values()]
        tasks = [*loads, *self._removals.values(), *self._rechecks.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when an idle catalog still holds uses, flights or locks."""
        assert not +self._uses, self._uses
        loads = [flight.task for flight in self._loads.values()]
        assert all(not task.done() for task in (*loads, *self._removals.values()))
        assert self._name_locks.idle
        assert len(self._resolved) <= MAX_RESOLVED_NAMES
        assert len(self._admin) <= MAX_ADMIN_NAMES
        for name, entry in (*self._admin.items(), *self._resolved.items()):
            assert name == entry.name
            assert entry.lora.lora_int_id == self._ids.id_for(entry.lora.digest)


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


def _log_refusal(name: str, error: BaseException) -> None:
    """The client is told; whoever is woken up has only the log."""
    logger.info("adapter %s is not loaded: %s", name, error)


def _is_of_a_name(error: BaseException | None) -> bool:
    """Whether a load failed for what its name means or may, rather than for its content."""
    of_a_name = (AdapterNotFound, Conflict, Forbidden, ManifestMismatch, RateLimited)
    return isinstance(error, of_a_name)


def _real(path: str) -> Path:
    return Path(os.path.realpath(path))


def _is_admin_name(text: str) -> bool:
    try:
        validate_admin_name(text)
    except MalformedName:
        return False
    return True


def _short(name: str) -> str:
    try:
        return parse_name(name).short
    except MalformedName:
        return name
