"""The names of one server, as requests and lists see them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from mural_resolvers.errors import Unavailable
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.tenants import Principal, authorize_base
from mural_server.catalog.admin import AdminActions
from mural_server.catalog.lookup import LookUp
from mural_server.catalog.names import OPERATOR, AdapterView, Entry, KnownNames, ServedModel
from mural_server.catalog.residency import RETRY_AFTER_S, Residency
from mural_server.engine.client import EngineClient

__all__ = ["AdapterCatalog"]


class AdapterCatalog:
    """The names of one server. For one event loop.

    ``admin`` has what admins do. ``roots`` are the folders from which the load endpoint may take
    adapters. ``adapter_wait_s`` bounds how long a request waits for look-up and load together.
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
        self._registry = registry
        self._ids = ids
        self._adapter_wait_s = adapter_wait_s
        self._names = names = KnownNames()
        self._residency = Residency(
            client, registry, names, adapter_wait_s=adapter_wait_s, clock=clock
        )
        self._look_up = LookUp(
            registry,
            ids,
            names,
            self._residency,
            adapters_on=client.info.max_loras > 0,
            dtype=client.info.dtype,
            limits=limits,
            clock=clock,
        )
        self.admin = AdminActions(
            ids,
            names,
            self._look_up,
            self._residency,
            served=self.served,
            adapter_wait_s=adapter_wait_s,
            roots=roots,
            limits=limits,
        )

    @property
    def version(self) -> int:
        """Grows with every change of the names; for those who watch."""
        return self._names.version

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
        self._look_up.authorize(principal, model)
        try:
            async with asyncio.timeout(self._adapter_wait_s):
                entry = await self._find_and_hold(principal, model)
                try:
                    await self._residency.ensure(principal, entry)
                except BaseException:
                    self._residency.release(entry.lora.lora_int_id)
                    raise
        except TimeoutError:
            raise Unavailable(
                "The adapter could not be made ready in time.", retry_after_s=RETRY_AFTER_S
            ) from None
        try:
            yield entry.served()
        finally:
            self._residency.release(entry.lora.lora_int_id)

    async def _find_and_hold(self, principal: Principal, model: str) -> Entry:
        while True:
            entry = await self._look_up.find(principal, model)
            removal = self._residency.removal(entry.lora.lora_int_id)
            if removal is None:
                # No await lies between the look-up and the hold that makes an unload wait.
                self._residency.hold(entry.lora.lora_int_id)
                return entry
            # The same content is on its way out: it must have gone before it comes again.
            await asyncio.wait({removal})

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
        entry = self._names.resolved.get(lora.lora_name)
        if entry is None or entry.lora.digest != lora.digest:
            # Forgotten since: the request that has it may end all the same.
            async with self._registry.lease(OPERATOR, lora) as folder:
                yield folder
            return
        self._residency.hold(lora.lora_int_id)
        try:
            yield await self._residency.leases.folder(OPERATOR, entry)
        finally:
            self._residency.release(lora.lora_int_id)

    async def find(self, principal: Principal, model: str) -> ServedModel:
        """As `use`, without making the adapter resident."""
        if model in self.served:
            authorize_base(principal)
            return ServedModel(self.served[0])
        self._look_up.authorize(principal, model)
        return (await self._look_up.find(principal, model)).served()

    # -- lists ------------------------------------------------------------------------------------

    def view(self) -> list[AdapterView]:
        """Every known name, with where its weights are."""
        return self._views(self._names)

    def visible(self, principal: Principal) -> list[AdapterView]:
        """The names that the principal may use."""
        return self._views(entry for entry in self._names if entry.usable_by(principal))

    def digest_of(self, name: str) -> str | None:
        """The digest behind a name, if it is known here."""
        entry = self._names.get(name)
        return None if entry is None else entry.lora.digest

    def _views(self, entries: Iterable[Entry]) -> list[AdapterView]:
        resident = self._residency.resident()
        return [
            entry.view(
                resident.get(entry.lora.lora_int_id),
                loading=self._residency.is_loading(entry.lora.lora_int_id),
            )
            for entry in entries
        ]

    # -- inside -----------------------------------------------------------------------------------

    async def close(self) -> None:
        """Cancel what is under way."""
        await self._look_up.close()
        await self._residency.close()

    def check_integrity(self) -> None:
        """Raise `AssertionError` when an idle catalog still holds uses, flights or locks."""
        self._residency.check_integrity()
        self.admin.check_integrity()
        self._names.check_integrity()
        assert all(
            entry.lora.lora_int_id == self._ids.id_for(entry.lora.digest) for entry in self._names
        )
