"""Which adapter a name means: the sources are asked, in order, on behalf of who may use it.

The registry authorises, then asks its sources, with one flight per name, bounded waiting, and
negative answers kept for seconds. What a source describes comes onto this machine through the
fetcher, and what is there goes on being served while a source is down.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.disk_cache import NotCached
from mural_resolvers.errors import (
    AdapterNotFound,
    Forbidden,
    InvalidInput,
    MuralError,
    RateLimited,
    Unavailable,
)
from mural_resolvers.fetcher import AdapterFetcher
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, ResolvedAdapter
from mural_resolvers.source_health import SourceHealth
from mural_resolvers.tenants import Principal, authorize, may_use_source
from mural_resolvers.turns import Turns

__all__ = ["LoRAResolverRegistry", "RegistrySettings"]

logger = logging.getLogger("mural.resolve")

_LEASE_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """Bounds of a registry.

    ``timeout_s``: the longest that a caller waits, for a look-up and a download together; the
    download goes on. ``source_timeout_s``: the longest that one source may take to describe.
    ``max_concurrent`` and ``max_concurrent_per_tenant``: look-ups at one time.
    ``max_pending`` and ``max_pending_per_tenant``: look-ups and downloads that run or wait for
    their turn; beyond the first 503 at once, beyond the second 429.
    ``negative_ttl_s`` and ``max_negative``: how long and how many "not found" are remembered.
    ``down_s``: for how long a source that could not tell is not asked for what is cached.
    ``hung_s``: for how long nobody waits for a source that answered nobody in time; then one
    look-up at a time tries it.
    ``max_resolved``: answers remembered for leases, and aliases for as long as their source says
    and for when it is down.
    """

    timeout_s: float = 30.0
    source_timeout_s: float = 10.0
    max_concurrent: int = 16
    max_concurrent_per_tenant: int = 4
    max_pending: int = 1024
    max_pending_per_tenant: int = 64
    negative_ttl_s: float = 5.0
    max_negative: int = 4096
    down_s: float = 2.0
    hung_s: float = 5.0
    max_resolved: int = 4096
    retry_after_s: float = 2.0


class _Scope(NamedTuple):
    """What two requests must share to share a flight: a source may refuse one principal."""

    tenant: str | None
    rights: frozenset[str]
    grants: tuple[str, ...]
    sources: frozenset[str] | None
    name: AdapterName

    @classmethod
    def of(cls, principal: Principal, name: AdapterName) -> _Scope:
        return cls(principal.tenant, principal.rights, principal.grants, principal.sources, name)

    @property
    def payer(self) -> str:
        """The tenant whose share a look-up takes."""
        return self.tenant or self.name.tenant


class _Described(NamedTuple):
    resolver: LoRAResolver
    description: AdapterDescription


class LoRAResolverRegistry:
    """Asks its resolvers in order and hands out ``LoRARequest``s. For one event loop.

    Without a ``fetcher`` only sources whose content lies on this machine can be served.
    """

    def __init__(
        self,
        resolvers: Sequence[LoRAResolver],
        base: BaseSpec,
        ids: LoRAIdAllocator,
        settings: RegistrySettings | None = None,
        *,
        fetcher: AdapterFetcher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        settings = settings or RegistrySettings()
        self._resolvers = {resolver.name: resolver for resolver in resolvers}
        if len(self._resolvers) != len(resolvers):
            raise InvalidInput("Two sources of adapters share a name.")
        self._base = base
        self._ids = ids
        self._settings = settings
        self._fetcher = fetcher
        self._clock = clock
        self._flights: dict[_Scope, asyncio.Task[ResolvedAdapter | MuralError]] = {}
        self._pending: Counter[str] = Counter()
        self._turns = Turns(settings.max_concurrent, settings.max_concurrent_per_tenant)
        self._negative = _NegativeAnswers(settings, clock)
        self._created: set[_Scope] = set()
        """Flights whose name came to be while they looked for it."""
        self._health = {
            name: SourceHealth(settings.down_s, settings.hung_s, clock) for name in self._resolvers
        }
        self._resolved: OrderedDict[tuple[str, str], ResolvedAdapter] = OrderedDict()
        self._aliases: OrderedDict[AdapterName, AdapterName] = OrderedDict()
        self._closed = False

    @property
    def source_names(self) -> tuple[str, ...]:
        """The sources, in the order in which they are asked."""
        return tuple(self._resolvers)

    @property
    def fetcher(self) -> AdapterFetcher | None:
        """What downloads, and the cache behind it; None where no source needs it."""
        return self._fetcher

    def is_down(self, source: str) -> bool:
        """Whether a source could not tell when it was last asked, a moment ago."""
        health = self._health.get(source)
        return health is not None and health.is_down

    async def get(self, principal: Principal, name: AdapterName) -> LoRARequest:
        """Find an adapter that the principal may use, and have its files on this machine.

        ``lora_name`` of the answer is the exact version's short form. Raises ``Forbidden``
        before any look-up, ``AdapterNotFound``, ``Unavailable`` (a source was down, or no
        answer in time), or what a source refused with. Cancelling one waiter leaves the others'
        look-up alone; once nobody waits it still ends.
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
        return await self._resolve(principal, name)

    async def _resolve(self, principal: Principal, name: AdapterName) -> ResolvedAdapter:
        if self._closed:
            raise Unavailable("The server is shutting down.")
        scope = _Scope.of(principal, name)
        if self._negative.holds(scope):
            raise _not_found(name)
        flight = self._flights.get(scope) or self._start(scope, principal)
        # wait() rather than await: cancelling a waiter must not cancel the flight, and a download
        # goes on for those who come back.
        await asyncio.wait({flight}, timeout=self._settings.timeout_s)
        if not flight.done():
            raise self._unavailable("The adapter could not be brought here in time.")
        if flight.cancelled():
            raise Unavailable("The server is shutting down.")
        outcome = flight.result()
        if isinstance(outcome, MuralError):
            raise outcome.with_traceback(None)
        return outcome

    @asynccontextmanager
    async def lease(
        self, principal: Principal, request: LoRARequest, *, fetch: bool = True
    ) -> AsyncIterator[Path]:
        """Hold the files of a request that ``get`` gave in place while they are in use.

        What was evicted meanwhile is fetched again: raises as ``get`` then, and ``Unavailable``
        when the source has other content. Without ``fetch`` it raises ``NotCached``.
        """
        async with AsyncExitStack() as held:
            yield await self._hold(principal, request, held, fetch=fetch)

    async def _hold(
        self, principal: Principal, request: LoRARequest, held: AsyncExitStack, *, fetch: bool
    ) -> Path:
        adapter = self._resolved.get((request.lora_name, request.digest))
        for _ in range(_LEASE_ATTEMPTS):
            if adapter is None:
                if not fetch:
                    raise NotCached
                # It was allowed when it was asked for, maybe under an alias that alone is granted.
                adapter = await self._resolve(principal, parse_name(request.lora_name))
                if adapter.manifest.digest != request.digest:
                    raise Unavailable("The adapter's content changed while it was waited for.")
            if not adapter.cached or self._fetcher is None:
                return adapter.path
            try:
                return await held.enter_async_context(self._fetcher.lease(request.digest))
            except NotCached:
                adapter = None
        raise self._unavailable("The cache of adapters is too small for what is asked of it.")

    async def repair(self, request: LoRARequest) -> bool:
        """Look again at files that turned out to be other than they were; whether it may help.

        Content in the disk cache is hashed, and dropped where it has rotted, so that the next
        lease fetches it again.
        """
        adapter = self._resolved.get((request.lora_name, request.digest))
        if adapter is None or not adapter.cached or self._fetcher is None:
            return False
        return not await self._fetcher.repair(request.digest)

    def forget(self, name: AdapterName) -> None:
        """Drop "not found" of a name that has just been created; who looks for it looks again."""
        self._negative.forget(name)
        self._created.update(scope for scope in self._flights if scope.name == name)

    async def close(self) -> None:
        """Cancel look-ups, whose waiters get ``Unavailable``, and close the resolvers."""
        self._closed = True
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        if self._fetcher is not None:
            await self._fetcher.close()
        for resolver in self._resolvers.values():
            await resolver.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when an idle registry still holds flights or turns."""
        assert self._pending.total() == len(self._flights)
        assert self._flights or self._turns.idle
        assert self._created <= self._flights.keys()
        assert len(self._negative) <= self._settings.max_negative
        assert len(self._resolved) <= self._settings.max_resolved

    # -- a flight ---------------------------------------------------------------------------------

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
        self._created.discard(scope)
        self._pending[scope.payer] -= 1
        if not self._pending[scope.payer]:
            del self._pending[scope.payer]

    async def _fly(self, scope: _Scope, principal: Principal) -> ResolvedAdapter | MuralError:
        """One look-up, with its errors as values: it may end when nobody waits any more."""
        try:
            try:
                adapter = await self._look_up(scope, principal)
            except AdapterNotFound:
                if scope not in self._created:
                    raise
                # The answer was on its way when the name was created.
                adapter = await self._look_up(scope, principal)
        except AdapterNotFound as error:
            self._negative.remember(scope)
            return error
        except MuralError as error:
            return error
        self._remember(adapter)
        return adapter

    async def _look_up(self, scope: _Scope, principal: Principal) -> ResolvedAdapter:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                async with self._turns.turn(scope.payer):
                    found = await self._ask_in_order(principal, scope.name)
            if found.description.name != scope.name:
                self._note_alias(scope.name, found.description.name)
            adapter = await self._bring(found, scope)
            return replace(adapter, alias_ttl_s=found.description.alias_ttl_s)
        except TimeoutError:
            down = self._unavailable("No source answered in time.")
        except (AdapterNotFound, Forbidden):
            await self._revoke(principal, scope.name)
            raise
        except Unavailable as error:
            down = error
        cached = await self._cached(scope.name)
        if cached is None or not may_use_source(principal, cached.source):
            raise down
        logger.warning("%s is served from the cache: %s", cached.name, down.message)
        return cached

    async def _ask_in_order(self, principal: Principal, name: AdapterName) -> _Described:
        down: list[float] = []
        for resolver in self._resolvers.values():
            if not may_use_source(principal, resolver.name):
                continue
            description = None
            try:
                description = await self._ask(resolver, principal, name)
            except AdapterNotFound:
                continue
            except Unavailable as error:
                down.append(error.retry_after_s or self._settings.retry_after_s)
            except MuralError:
                raise
            except Exception:
                # A source that fails in a way it does not know is down, and says nothing of
                # whether the adapter exists. The user is not told what it was.
                logger.exception("resolver %s failed on %s", resolver.name, name)
                down.append(self._settings.retry_after_s)
            if description is None:
                continue
            if _names_the_same(description.name, name):
                return _Described(resolver, description)
            logger.error("resolver %s gave %s for %s", resolver.name, description.name, name)
            down.append(self._settings.retry_after_s)
        if down:
            raise Unavailable("A source of adapters cannot be reached.", retry_after_s=min(down))
        raise _not_found(name)

    async def _ask(
        self, resolver: LoRAResolver, principal: Principal, name: AdapterName
    ) -> AdapterDescription | None:
        """Ask one source, unless it was down a moment ago and the cache has the name."""
        if self.is_down(resolver.name) and await self._cached(name) is not None:
            raise self._unavailable("The source was down a moment ago.")
        try:
            with self._health[resolver.name].asking():
                async with asyncio.timeout(self._settings.source_timeout_s):
                    return await resolver.resolve(principal, name, self._base)
        except (TimeoutError, Unavailable) as error:
            told = "no answer in time" if isinstance(error, TimeoutError) else error
            logger.warning("resolver %s cannot tell about %s: %s", resolver.name, name, told)
            wait_s = getattr(error, "retry_after_s", None) or self._settings.retry_after_s
            raise Unavailable("The source cannot tell.", retry_after_s=wait_s) from None

    async def _bring(self, found: _Described, scope: _Scope) -> ResolvedAdapter:
        resolver, description = found
        if description.folder is not None and description.manifest is not None:
            return ResolvedAdapter(
                description.name, description.folder, description.manifest, resolver.name
            )
        if self._fetcher is None:
            logger.error("resolver %s downloads, and there is no cache to put it", resolver.name)
            raise self._unavailable("The server has no place for downloaded adapters.")
        return await self._fetcher.fetch(resolver, description, scope.payer)

    # -- what is remembered -----------------------------------------------------------------------

    async def _cached(self, name: AdapterName) -> ResolvedAdapter | None:
        if self._fetcher is None:
            return None
        return await self._fetcher.cached(self._aliases.get(name, name))

    async def _revoke(self, principal: Principal, name: AdapterName) -> None:
        """A source said no: what is cached under the name is not served any more either.

        Unless it came from a source that was not asked, as this principal may not use it.
        """
        if self._fetcher is None:
            return
        try:
            if not (principal.is_admin or principal.sources is None):
                cached = await self._cached(name)
                if cached is None or not may_use_source(principal, cached.source):
                    return
            self._aliases.pop(name, None)
            await self._fetcher.forget(name)
        except Unavailable as error:
            # The answer is the source's no; the disk's trouble is for whoever reads the log.
            logger.warning("%s stays in the cache: %s", name, error.message)

    def _note_alias(self, alias: AdapterName, exact: AdapterName) -> None:
        self._aliases[alias] = exact
        self._aliases.move_to_end(alias)
        while len(self._aliases) > self._settings.max_resolved:
            self._aliases.popitem(last=False)

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
