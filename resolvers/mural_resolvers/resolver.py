"""Where adapters come from: the interface of a source, and the registry that asks the sources.

The registry authorises, then asks its sources in order, with one flight per name, bounded
waiting, and negative answers kept for seconds. A source is a ``LoRAResolver``: a directory, an
object store, a hub. One that downloads keeps what it downloaded through ``lease``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import AdapterNotFound, MuralError, RateLimited, Unavailable
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.tenants import Principal, authorize

__all__ = ["LoRAResolver", "LoRAResolverRegistry", "RegistrySettings", "ResolvedAdapter"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """A source's answer: the exact name (never an alias), a local folder, what lies in it.

    ``source`` is the resolver's ``name``.
    """

    name: AdapterName
    path: Path
    manifest: Manifest
    source: str


class LoRAResolver(ABC):
    """A source of adapters.

    ``resolve`` gives None for what the source does not have, which lets the next one be asked.
    It raises ``Unavailable`` when it cannot tell, and any other ``MuralError`` (it refuses, the
    content is unusable) to end the look-up. It is cancelled at the registry's timeout.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The source's name, for logs and answers; unique in a registry."""

    @abstractmethod
    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> ResolvedAdapter | None:
        """Find the adapter, on behalf of a principal that may use the name.

        An alias is resolved to its version. The content lies verified at ``path`` on return.
        """

    def lease(self, adapter: ResolvedAdapter) -> AbstractAsyncContextManager[Path]:
        """Hold an answer's folder in place while the context is open, and give its path.

        A source that evicts what it downloaded overrides this, and fetches again what is gone.
        """
        return _stays(adapter.path)

    async def close(self) -> None:
        """Let go of connections and threads; nothing is asked of the source afterwards."""
        return


@asynccontextmanager
async def _stays(path: Path) -> AsyncIterator[Path]:
    yield path


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """Bounds of a registry.

    ``timeout_s``: the longest that one look-up takes, waiting for its turn included.
    ``max_concurrent`` and ``max_concurrent_per_tenant``: look-ups at one time.
    ``max_pending`` and ``max_pending_per_tenant``: look-ups that run or wait for their turn;
    beyond the first 503 at once, beyond the second 429.
    ``negative_ttl_s`` and ``max_negative``: how long and how many "not found" are remembered.
    ``max_resolved``: answers remembered for leases.
    """

    timeout_s: float = 30.0
    max_concurrent: int = 16
    max_concurrent_per_tenant: int = 4
    max_pending: int = 1024
    max_pending_per_tenant: int = 64
    negative_ttl_s: float = 5.0
    max_negative: int = 4096
    max_resolved: int = 4096
    retry_after_s: float = 2.0


class _Scope(NamedTuple):
    """What two requests must share to share a flight: a source may refuse one principal."""

    tenant: str | None
    rights: frozenset[str]
    grants: tuple[str, ...]
    name: AdapterName

    @property
    def payer(self) -> str:
        """The tenant whose share a look-up takes."""
        return self.tenant or self.name.tenant


class LoRAResolverRegistry:
    """Asks its resolvers in order and hands out ``LoRARequest``s. For one event loop."""

    def __init__(
        self,
        resolvers: Sequence[LoRAResolver],
        base: BaseSpec,
        ids: LoRAIdAllocator,
        settings: RegistrySettings | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or RegistrySettings()
        self._resolvers = {resolver.name: resolver for resolver in resolvers}
        if len(self._resolvers) != len(resolvers):
            raise ValueError("two resolvers share a name")
        self._base = base
        self._ids = ids
        self._settings = settings
        self._flights: dict[_Scope, asyncio.Task[ResolvedAdapter | MuralError]] = {}
        self._pending: Counter[str] = Counter()
        self._turns = _Turns(settings)
        self._negative = _NegativeAnswers(settings, clock)
        self._resolved: OrderedDict[tuple[str, str], ResolvedAdapter] = OrderedDict()
        self._closed = False

    async def get(self, principal: Principal, name: AdapterName) -> LoRARequest:
        """Find an adapter that the principal may use.

        ``lora_name`` of the answer is the exact version's short form. Raises ``Forbidden``
        before any look-up, ``AdapterNotFound``, ``Unavailable`` (a source was down, or no
        answer in time), or what a source refused with. Cancelling one waiter leaves the others'
        look-up alone; once nobody waits it still ends at its timeout.
        """
        adapter = await self.resolve(principal, name)
        digest = adapter.manifest.digest
        return LoRARequest(
            lora_name=adapter.name.short,
            lora_int_id=self._ids.id_for(digest),
            lora_path=str(adapter.path),
            digest=digest,
        )

    async def resolve(self, principal: Principal, name: AdapterName) -> ResolvedAdapter:
        """As ``get``, with the whole answer (manifest, source)."""
        authorize(principal, name)
        if self._closed:
            raise Unavailable("The server is shutting down.")
        scope = _Scope(principal.tenant, principal.rights, principal.grants, name)
        if self._negative.holds(scope):
            raise _not_found(name)
        flight = self._flights.get(scope) or self._start(scope, principal)
        # wait() rather than await: cancelling a waiter must not cancel the flight. The bound is
        # for a source that does not let itself be cancelled at the flight's own.
        await asyncio.wait({flight}, timeout=self._settings.timeout_s)
        if not flight.done():
            raise self._unavailable("No source answered in time.")
        if flight.cancelled():
            raise Unavailable("The server is shutting down.")
        outcome = flight.result()
        if isinstance(outcome, MuralError):
            raise outcome.with_traceback(None)
        return outcome

    @asynccontextmanager
    async def lease(self, principal: Principal, request: LoRARequest) -> AsyncIterator[Path]:
        """Hold the files of a request that ``get`` gave in place while they are read.

        Raises as ``get`` where the source has to be asked again, and ``Unavailable`` when it
        then has other content.
        """
        adapter = self._resolved.get((request.lora_name, request.digest))
        if adapter is None:
            adapter = await self.resolve(principal, parse_name(request.lora_name))
            if adapter.manifest.digest != request.digest:
                raise Unavailable("The adapter's content changed while it was waited for.")
        async with self._resolvers[adapter.source].lease(adapter) as path:
            yield path

    def forget(self, name: AdapterName) -> None:
        """Drop "not found" of a name that has just been created."""
        self._negative.forget(name)

    async def close(self) -> None:
        """Cancel look-ups, whose waiters get ``Unavailable``, and close the resolvers."""
        self._closed = True
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        for resolver in self._resolvers.values():
            await resolver.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when an idle registry still holds flights or turns."""
        assert self._pending.total() == len(self._flights)
        assert self._flights or self._turns.idle
        assert len(self._negative) <= self._settings.max_negative
        assert len(self._resolved) <= self._settings.max_resolved

    def _start(
        self, scope: _Scope, principal: Principal
    ) -> asyncio.Task[ResolvedAdapter | MuralError]:
        settings = self._settings
        if self._pending[scope.payer] >= settings.max_pending_per_tenant:
            raise RateLimited(
                "Too many of this tenant's adapters are being looked up.",
                retry_after_s=settings.retry_after_s,
            )
        if len(self._flights) >= settings.max_pending:
            raise self._unavailable("Too many adapters are being looked up.")
        flight = asyncio.create_task(self._fly(scope, principal), name=f"resolve {scope.name}")
        self._flights[scope] = flight
        self._pending[scope.payer] += 1
        flight.add_done_callback(lambda _: self._land(scope))
        return flight

    def _land(self, scope: _Scope) -> None:
        del self._flights[scope]
        self._pending[scope.payer] -= 1
        if not self._pending[scope.payer]:
            del self._pending[scope.payer]

    async def _fly(self, scope: _Scope, principal: Principal) -> ResolvedAdapter | MuralError:
        """One look-up, with its errors as values: it may end when nobody waits any more."""
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                async with self._turns.turn(scope.payer):
                    adapter = await self._ask_in_order(principal, scope.name)
        except TimeoutError:
            return self._unavailable("No source answered in time.")
        except AdapterNotFound as error:
            self._negative.remember(scope)
            return error
        except MuralError as error:
            return error
        self._remember(adapter)
        return adapter

    async def _ask_in_order(self, principal: Principal, name: AdapterName) -> ResolvedAdapter:
        down: list[str] = []
        for resolver in self._resolvers.values():
            try:
                adapter = await resolver.resolve(principal, name, self._base)
            except AdapterNotFound:
                continue
            except Unavailable:
                down.append(resolver.name)
                continue
            except MuralError:
                raise
            except Exception:
                # A source that fails in a way it does not know is down, and says nothing of
                # whether the adapter exists. The user is not told what it was.
                logger.exception("resolver %s failed on %s", resolver.name, name)
                down.append(resolver.name)
                continue
            if adapter is not None and _names_the_same(adapter.name, name):
                # The registry knows whom it asked: leases depend on it.
                return replace(adapter, source=resolver.name)
            if adapter is not None:
                logger.error("resolver %s gave %s for %s", resolver.name, adapter.name, name)
                down.append(resolver.name)
        if down:
            raise self._unavailable("A source of adapters cannot be reached.")
        raise _not_found(name)

    def _remember(self, adapter: ResolvedAdapter) -> None:
        key = (adapter.name.short, adapter.manifest.digest)
        self._resolved[key] = adapter
        self._resolved.move_to_end(key)
        while len(self._resolved) > self._settings.max_resolved:
            self._resolved.popitem(last=False)

    def _unavailable(self, message: str) -> Unavailable:
        return Unavailable(message, retry_after_s=self._settings.retry_after_s)


def _names_the_same(answer: AdapterName, asked: AdapterName) -> bool:
    """Whether they differ in the version at most: an answer must not leave what was allowed."""
    return (answer.tenant, answer.adapter) == (asked.tenant, asked.adapter)


def _not_found(name: AdapterName) -> AdapterNotFound:
    return AdapterNotFound(f"The adapter {name} does not exist.")


class _Turns:
    """Bounded concurrency, in total and per tenant; a tenant's own queue comes first.

    A look-up waits in the total's queue only once its tenant's bound lets it, so that a tenant
    with many look-ups does not stand in the others' way.
    """

    def __init__(self, settings: RegistrySettings) -> None:
        self._total = asyncio.Semaphore(settings.max_concurrent)
        self._per_tenant = settings.max_concurrent_per_tenant
        self._tenants: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether nobody holds a turn or waits for one."""
        return not self._tenants and not self._total.locked()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it."""
        semaphore = self._enter(tenant)
        try:
            async with semaphore, self._total:
                yield
        finally:
            self._leave(tenant)

    def _enter(self, tenant: str) -> asyncio.Semaphore:
        semaphore, users = self._tenants.get(tenant, (asyncio.Semaphore(self._per_tenant), 0))
        self._tenants[tenant] = (semaphore, users + 1)
        return semaphore

    def _leave(self, tenant: str) -> None:
        semaphore, users = self._tenants.pop(tenant)
        if users > 1:
            self._tenants[tenant] = (semaphore, users - 1)


class _NegativeAnswers:
    """Who was told "not found" of what, until when; the oldest are dropped first."""

    def __init__(self, settings: RegistrySettings, clock: Callable[[], float]) -> None:
        self._ttl_s = settings.negative_ttl_s
        self._max = settings.max_negative
        self._clock = clock
        self._until: OrderedDict[_Scope, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def holds(self, scope: _Scope) -> bool:
        until = self._until.get(scope)
        if until is None:
            return False
        if self._clock() < until:
            return True
        del self._until[scope]
        return False

    def remember(self, scope: _Scope) -> None:
        self._until[scope] = self._clock() + self._ttl_s
        self._until.move_to_end(scope)
        while len(self._until) > self._max:
            self._until.popitem(last=False)

    def forget(self, name: AdapterName) -> None:
        for scope in [scope for scope in self._until if scope.name == name]:
            del self._until[scope]
