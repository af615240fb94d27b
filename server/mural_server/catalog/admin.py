"""What admins and the control API do to names and weights."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    InvalidInput,
    TooLarge,
    Unavailable,
    quoted,
)
from mural_resolvers.files import is_folder
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import Manifest, checked_manifest
from mural_resolvers.names import AdapterName, validate_admin_name
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.tenants import Principal
from mural_resolvers.turns import KeyedLocks
from mural_server.catalog.lookup import LookUp
from mural_server.catalog.names import (
    MAX_ADMIN_NAMES,
    OPERATOR,
    AdapterView,
    Entry,
    KnownNames,
)
from mural_server.catalog.residency import RETRY_AFTER_S, Residency
from mural_server.engine.messages import AdapterInfo, AdapterLevel, FreedBytes

__all__ = ["AdminActions", "AlreadyLoaded"]


class AlreadyLoaded(InvalidInput):
    """The load endpoint was given a name that is taken; vLLM's words and status."""

    type = "InvalidUserInput"
    code = "already_loaded"


class AdminActions:
    """Registering, loading, pinning and unloading, one change of a name at a time.

    ``roots`` are the folders from which the load endpoint may take adapters.
    """

    def __init__(
        self,
        ids: LoRAIdAllocator,
        names: KnownNames,
        look_up: LookUp,
        residency: Residency,
        *,
        served: tuple[str, ...],
        adapter_wait_s: float,
        roots: Iterable[Path],
        limits: AdapterLimits,
    ) -> None:
        self._ids = ids
        self._names = names
        self._look_up = look_up
        self._residency = residency
        self._served = served
        self._adapter_wait_s = adapter_wait_s
        self._roots = tuple(_real(root) for root in roots)
        self._limits = limits
        self._name_locks = KeyedLocks()

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

    async def unload(self, name: str) -> FreedBytes:
        """Drop a name; with the last name of its content the weights are drained and freed.

        Raises `AdapterNotFound` for a name that is not known here.
        """
        async with self._name_locks.hold(name):
            entry = self._names.known(name)
            if self._names.admin.pop(name, None) is None:
                self._names.resolved.pop(entry.name, None)
            self._names.changed()
            if self._names.of_content(entry.lora.lora_int_id) > 0:
                return FreedBytes()
            return await asyncio.shield(self._residency.remove(entry.lora.lora_int_id))

    def drop(self, name: AdapterName) -> None:
        """Forget a version that its source has just lost; its weights drain beside."""
        entry = self._names.resolved.get(name.short)
        if entry is not None:
            self._look_up.forget(entry)

    async def pin(self, name: str, *, pinned: bool) -> AdapterInfo:
        """Keep a name's weights resident, loading them if need be, or let them go again."""
        entry = self._names.known(name)
        if pinned:
            return await self._residency.add(OPERATOR, entry, "slot", True)
        if entry.lora.lora_int_id not in self._residency.resident():
            raise AdapterNotFound(f"The lora adapter {quoted(name)} is not resident.")
        return await self._residency.pin(entry.lora.lora_int_id, pinned=False)

    async def make_resident(
        self,
        name: str,
        *,
        digest: str | None,
        level: AdapterLevel,
        pinned: bool,
        source: str | None = None,
    ) -> AdapterView:
        """Idempotent; raises `Conflict` when the content is another than ``digest``.

        With ``source`` no other source is asked, nor believed.
        """
        asker = self._asker(name, source)
        entry = await self._content(asker, name, digest)
        info = await self._residency.add(asker, entry, level, pinned)
        if info.pinned != pinned:
            info = await self._residency.pin(entry.lora.lora_int_id, pinned=pinned)
        self._names.changed()
        return entry.view(info, loading=self._residency.is_loading(entry.lora.lora_int_id))

    async def prefetch(self, name: str, *, digest: str | None, source: str | None) -> AdapterView:
        """Have the files on this machine, as `make_resident` does, and load nothing.

        They are leased for a moment, then stay as whatever else is cached does. Raises
        `InvalidInput` where there is no disk cache.
        """
        asker = self._asker(name, source)
        if not self._look_up.caches:
            raise InvalidInput("There is no disk cache here: every source lies on this machine.")
        entry = await self._content(asker, name, digest)
        if entry.cached:
            await self._fetch(asker, entry)
        self._names.changed()
        lora_int_id = entry.lora.lora_int_id
        return entry.view(
            self._residency.resident().get(lora_int_id),
            loading=self._residency.is_loading(lora_int_id),
        )

    def check_integrity(self) -> None:
        """Raise `AssertionError` when idle actions still hold locks."""
        assert self._name_locks.idle

    # -- finding ----------------------------------------------------------------------------------

    def _asker(self, name: str, source: str | None) -> Principal:
        """The operator, or the operator as one who may ask a single source."""
        if name in self._served:
            raise InvalidInput("The base model is always resident.")
        if source is None:
            return OPERATOR
        if source not in self._look_up.sources:
            known = ", ".join(self._look_up.sources) or "none"
            raise InvalidInput(f"There is no source {quoted(source)} here; there is {known}.")
        if name in self._names.admin:
            raise InvalidInput(f"{quoted(name)} is an admin's name, which is of no source.")
        return replace(OPERATOR, rights=frozenset(), grants=("*",), sources=frozenset({source}))

    async def _content(self, asker: Principal, name: str, digest: str | None) -> Entry:
        self._look_up.authorize(asker, name)
        try:
            async with asyncio.timeout(self._adapter_wait_s):
                entry = await self._look_up.find(asker, name)
        except TimeoutError:
            raise Unavailable("No source answered in time.", retry_after_s=RETRY_AFTER_S) from None
        if digest is not None and digest != entry.lora.digest:
            raise Conflict(f"{quoted(entry.name)} has the digest {entry.lora.digest} here.")
        return entry

    async def _fetch(self, asker: Principal, entry: Entry) -> None:
        """Have cached content where it was found, though it may have been evicted since."""
        lora_int_id = entry.lora.lora_int_id
        self._residency.hold(lora_int_id)
        try:
            async with asyncio.timeout(self._adapter_wait_s):
                await self._residency.leases.folder(asker, entry)
        except TimeoutError:
            raise Unavailable(
                "The adapter could not be fetched in time.", retry_after_s=RETRY_AFTER_S
            ) from None
        finally:
            self._residency.release(lora_int_id)

    # -- registering ------------------------------------------------------------------------------

    def _check_free(self, name: str, *, inplace: bool) -> None:
        if name in self._served:
            raise AlreadyLoaded(f"The name {quoted(name)} is the base model's.")
        validate_admin_name(name)
        if name in self._names.admin and not inplace:
            raise AlreadyLoaded(f"The lora adapter '{name}' has already been loaded.")
        if name not in self._names.admin and len(self._names.admin) >= MAX_ADMIN_NAMES:
            raise TooLarge(f"At most {MAX_ADMIN_NAMES} names can be registered.")

    def _contained(self, path: str) -> tuple[Path, Path]:
        base = self._roots[0] if self._roots else Path("/")
        try:
            folder = _real(base / path)
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
            entry = Entry(
                name=name,
                lora=LoRARequest(name, self._ids.id_for(digest), str(folder), digest),
                manifest=manifest,
                shared=shared,
            )
            info = await self._add_to_stay(entry, pinned)
            old = self._names.admin.get(name)
            self._names.admin[name] = entry
            self._names.changed()
            if old is not None and self._names.of_content(old.lora.lora_int_id) == 0:
                # The old content drains under its own id while new requests get the new one.
                self._residency.remove(old.lora.lora_int_id)
            return info

    async def _add_to_stay(self, entry: Entry, pinned: bool) -> AdapterInfo:
        """Load what has no name yet; what comes too late for one is freed again."""
        lora_int_id = entry.lora.lora_int_id
        try:
            level: AdapterLevel = "slot" if pinned else "host"
            info = await self._residency.add(OPERATOR, entry, level, pinned)
            while self._residency.removal(lora_int_id) is not None:
                # Its last other name was unloaded meanwhile, and the weights go with that.
                info = await self._residency.add(OPERATOR, entry, level, pinned)
        except Unavailable:
            if self._names.of_content(lora_int_id) == 0:
                # The core may be loading it still, and a pin would keep it under no name.
                self._residency.remove(lora_int_id)
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


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))
