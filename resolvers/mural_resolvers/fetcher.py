"""From a description to content on this machine: through the disk cache, once per content.

A download outlives the request that caused it: whoever waits gives up at its own bound, the
content arrives, and the next request finds it. Downloads take turns, in total and per tenant, and
a tenant's cold loads have a rate, so that one who names ten thousand versions does not keep the
others from theirs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from mural_resolvers.digest import max_file_bytes
from mural_resolvers.disk_cache import (
    CachedVersion,
    CacheUsage,
    DiskCache,
    Lease,
    NotCached,
    Staging,
)
from mural_resolvers.download import Downloader
from mural_resolvers.errors import (
    Conflict,
    ManifestMismatch,
    MuralError,
    RateLimited,
    TooLarge,
    Unavailable,
)
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.manifest import Manifest, manifest_of
from mural_resolvers.names import AdapterName
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, ResolvedAdapter
from mural_resolvers.turns import Rate, Turns

__all__ = ["AdapterFetcher", "Fetch", "FetchCounts", "FetcherSettings"]

logger = logging.getLogger("mural.fetch")

T = TypeVar("T")

_CACHE_THREADS = 4


@dataclass(frozen=True, slots=True)
class FetcherSettings:
    """Bounds on downloads.

    ``deadline_s``: the longest that one may take, its turn not included. ``max_pending`` in all
    and ``max_pending_per_tenant`` run or wait for their turn; beyond the first 503 at once, beyond
    the second 429. A tenant may begin ``cold_loads_per_minute`` downloads, and ``cold_burst`` of
    them at once; above that 429.
    """

    deadline_s: float = 600.0
    max_concurrent: int = 8
    max_concurrent_per_tenant: int = 2
    max_pending: int = 1024
    max_pending_per_tenant: int = 64
    cold_loads_per_minute: float = 60.0
    cold_burst: int = 32
    retry_after_s: float = 2.0


@dataclass(slots=True)
class Fetch:
    """A download under way; ``done`` of ``total`` bytes."""

    name: AdapterName
    source: str
    total: int
    started_at: float
    done: int = 0


@dataclass(slots=True)
class FetchCounts:
    """What happened since the start, for metrics; ``downloaded_bytes`` counts whole versions."""

    hits: int = 0
    downloads: int = 0
    failures: int = 0
    downloaded_bytes: int = 0
    rate_limited: int = 0


@dataclass(frozen=True, slots=True)
class _Order:
    """What a flight is to bring: which version, from where, at whose expense."""

    resolver: LoRAResolver
    description: AdapterDescription
    tenant: str

    @property
    def key(self) -> str:
        """The same for two orders of the same content, as far as their source can tell."""
        found = self.description
        return found.digest or f"{self.resolver.name} {found.name.exact} {found.revision}"

    def stands_for(self, other: _Order) -> bool:
        """Whether what this one fails with is what the other would fail with, too."""
        return (self.resolver.name, self.description.name, self.tenant) == (
            other.resolver.name,
            other.description.name,
            other.tenant,
        )


@dataclass(frozen=True, slots=True)
class _Flight:
    """A download under way or waiting for its turn, and for what order."""

    order: _Order
    task: asyncio.Task[ResolvedAdapter | MuralError]


class AdapterFetcher:
    """Brings described content into the disk cache. For one event loop."""

    def __init__(
        self,
        cache: DiskCache,
        downloader: Downloader,
        settings: FetcherSettings | None = None,
        limits: AdapterLimits = DEFAULT_LIMITS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings = settings or FetcherSettings()
        self._cache = cache
        self._downloader = downloader
        self._limits = limits
        self._clock = clock
        self._turns = Turns(settings.max_concurrent, settings.max_concurrent_per_tenant)
        self._rate = Rate(settings.cold_loads_per_minute / 60, settings.cold_burst, clock)
        self._flights: dict[str, _Flight] = {}
        self._pending: Counter[str] = Counter()
        self._under_way: dict[str, Fetch] = {}
        self._threads = ThreadPoolExecutor(_CACHE_THREADS, thread_name_prefix="adapter-cache")
        self._closed = False
        self.counts = FetchCounts()

    @property
    def under_way(self) -> tuple[Fetch, ...]:
        """The downloads that run now."""
        return tuple(replace(fetch) for fetch in self._under_way.values())

    async def usage(self) -> CacheUsage | None:
        """What the cache holds; None while the disk cannot tell. May wait for a change to end."""
        try:
            return await self._in_thread(self._cache.usage)
        except Unavailable:
            return None

    async def cached(self, name: AdapterName) -> ResolvedAdapter | None:
        """What the cache has under an exact name, whatever the sources say now."""
        found = await self._in_thread(self._cache.find, name)
        return None if found is None else _resolved(found)

    async def forget(self, name: AdapterName) -> None:
        """A source that answers says that the name is not there, or not for us."""
        await self._in_thread(self._cache.forget, name)

    async def fetch(
        self, resolver: LoRAResolver, description: AdapterDescription, tenant: str
    ) -> ResolvedAdapter:
        """Have the described content in the cache, and the name noted for it.

        Raises ``Conflict`` when the name has had other content, ``RateLimited``, ``TooLarge``
        (above a limit or the whole cache), ``UnusableAdapter``, ``Unavailable``.
        """
        order = _Order(resolver, description, tenant)
        _check_sizes(description, self._limits)
        found = await self._in_thread(self._known, order)
        if found is not None:
            self.counts.hits += 1
            return found
        outcome = await self._outcome(order)
        if isinstance(outcome, MuralError):
            raise outcome.with_traceback(None)
        if (outcome.name, outcome.source) == (description.name, resolver.name):
            return outcome
        found = await self._in_thread(self._noted, order, outcome.manifest)
        if found is None:
            # It was evicted before this name, which had waited along, could be noted.
            raise Unavailable("The cache of adapters is too small for what is asked of it.")
        return found

    async def _outcome(self, order: _Order) -> ResolvedAdapter | MuralError:
        """Bring an order's content, or wait for whoever does.

        What another order failed with is of its own name, source and tenant: it is neither told
        nor believed, and this one is tried itself.
        """
        while True:
            flight = self._flights.get(order.key)
            if flight is None:
                flight = self._start(order)
            # wait() rather than await: who leaves must not take the flight along.
            await asyncio.wait({flight.task})
            if flight.task.cancelled():
                raise Unavailable("The server is shutting down.")
            outcome = flight.task.result()
            if not isinstance(outcome, MuralError) or flight.order.stands_for(order):
                return outcome

    @asynccontextmanager
    async def lease(self, digest: str) -> AsyncIterator[Path]:
        """Hold a cached version's folder in place; raises ``NotCached`` where it has gone."""
        lease = await self._acquire(lambda: self._cache.lease(digest), Lease.release)
        try:
            yield lease.path
        finally:
            await self._give_back(lease.release)

    async def repair(self, digest: str) -> bool:
        """Hash a version again; drop what has rotted. Whether it was whole."""
        return await self._in_thread(self._cache.verify, digest)

    async def close(self) -> None:
        """Break off what is under way; its partial files go. Idempotent."""
        if self._closed:
            return
        flights = [flight.task for flight in self._flights.values()]
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        await self._downloader.close()
        self._closed = True
        # Calls that nobody waits for any more come before: what they lease is taken back, too.
        await asyncio.to_thread(self._threads.shutdown)
        await asyncio.to_thread(self._cache.close)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when an idle fetcher still holds flights or turns."""
        assert set(self._under_way) <= set(self._flights)
        assert self._pending.total() == len(self._flights)
        assert self._flights or self._turns.idle
        self._cache.check_integrity()

    # -- in the cache's threads -------------------------------------------------------------------

    def _known(self, order: _Order) -> ResolvedAdapter | None:
        """The content, if it is cached under this name or any other."""
        found = self._cache.find(order.description.name)
        mine = (order.resolver.name, order.description.revision)
        if found is not None and (found.source, found.revision) == mine:
            self._touch(found.manifest.digest)
            return _resolved(found)
        digest = order.description.digest
        if found is not None and digest not in (None, found.manifest.digest):
            # Before anything is downloaded; the cache itself refuses what is only known then.
            raise Conflict(
                f"The content of {order.description.name} changed; a version is immutable: "
                "use another version."
            )
        manifest = None if digest is None else self._cache.content(digest)
        return None if manifest is None else self._link(order, manifest)

    def _touch(self, digest: str) -> None:
        """What is asked for is in use, though its files were read long ago: it goes last."""
        with suppress(NotCached):
            self._cache.lease(digest).release()

    def _noted(self, order: _Order, manifest: Manifest) -> ResolvedAdapter | None:
        """The content under this order's name, which its flight noted if it was its own."""
        return self._known(order) or self._link(order, manifest)

    def _link(self, order: _Order, manifest: Manifest) -> ResolvedAdapter | None:
        found = self._cache.link(
            order.description.name,
            manifest.digest,
            source=order.resolver.name,
            revision=order.description.revision,
            tenant=order.tenant,
        )
        return None if found is None else _resolved(found)

    # -- a flight ---------------------------------------------------------------------------------

    def _start(self, order: _Order) -> _Flight:
        self._check_pending(order.tenant)
        wait_s = self._rate.take(order.tenant)
        if wait_s > 0:
            raise self._limited(wait_s)
        task = asyncio.create_task(self._fly(order), name=f"fetch {order.description.name}")
        flight = self._flights[order.key] = _Flight(order, task)
        self._pending[order.tenant] += 1
        task.add_done_callback(lambda _: self._land(order))
        return flight

    def _land(self, order: _Order) -> None:
        del self._flights[order.key]
        self._pending[order.tenant] -= 1
        if not self._pending[order.tenant]:
            del self._pending[order.tenant]

    def _check_pending(self, tenant: str) -> None:
        """Downloads outlive those who wait for them, so that a slow source would pile them up."""
        if self._pending[tenant] >= self._settings.max_pending_per_tenant:
            raise self._limited(self._settings.retry_after_s)
        if len(self._flights) >= self._settings.max_pending:
            raise self._unavailable("Too many adapters are being fetched.")

    def _limited(self, retry_after_s: float) -> RateLimited:
        self.counts.rate_limited += 1
        return RateLimited(
            "Too many of this tenant's adapters are being fetched.", retry_after_s=retry_after_s
        )

    async def _fly(self, order: _Order) -> ResolvedAdapter | MuralError:
        """One download, its errors as values: it may end when nobody waits any more."""
        try:
            async with self._turns.turn(order.tenant):
                return _resolved(await self._bring(order))
        except MuralError as error:
            return self._failed(order, error)
        except Exception as error:
            # A source, or a disk, that fails in a way nobody knew of: the user's retry may work,
            # and the log has it.
            logger.exception("fetching %s failed", order.description.name)
            return self._failed(order, Unavailable("The adapter could not be fetched."), error)

    async def _bring(self, order: _Order) -> CachedVersion:
        found, source = order.description, order.resolver.name
        fetch = Fetch(found.name, source, found.num_bytes, self._clock())
        self._under_way[order.key] = fetch
        logger.info("fetching %s from %s: %.1f MB", found.name, source, found.num_bytes / 1e6)
        try:
            async with asyncio.timeout(self._settings.deadline_s), self._staged(order) as staging:
                version = await self._fill(order, staging, fetch)
        except TimeoutError:
            raise self._unavailable("The adapter could not be fetched in time.") from None
        finally:
            del self._under_way[order.key]
        seconds = self._clock() - fetch.started_at
        self.counts.downloads += 1
        self.counts.downloaded_bytes += version.manifest.num_bytes
        size_mb = found.num_bytes / 1e6
        logger.info("fetched %s from %s: %.1f MB in %.2f s", found.name, source, size_mb, seconds)
        return version

    @asynccontextmanager
    async def _staged(self, order: _Order) -> AsyncIterator[Staging]:
        num_bytes = order.description.num_bytes
        staging = await self._acquire(
            lambda: self._cache.stage(num_bytes, order.tenant), Staging.discard
        )
        try:
            yield staging
        finally:
            if staging.staged:
                await self._give_back(staging.discard)

    async def _fill(self, order: _Order, staging: Staging, fetch: Fetch) -> CachedVersion:
        def advance(num_bytes: int) -> None:
            fetch.done += num_bytes

        found = order.description
        entries = await self._downloader.download(order.resolver, found, staging.folder, advance)

        def check_and_commit() -> CachedVersion:
            manifest = manifest_of(staging.folder, entries, self._limits)
            stated = found.digest if found.manifest is None else found.manifest.digest
            if stated is not None and stated != manifest.digest:
                raise ManifestMismatch("The content is not what its manifest states.")
            return staging.commit(manifest, found.name, order.resolver.name, found.revision)

        return await self._in_thread(check_and_commit)

    def _failed(
        self, order: _Order, error: MuralError, cause: Exception | None = None
    ) -> MuralError:
        self.counts.failures += 1
        if cause is None:
            logger.warning("fetching %s failed: %s", order.description.name, error.message)
        return error

    def _unavailable(self, message: str) -> Unavailable:
        return Unavailable(message, retry_after_s=self._settings.retry_after_s)

    async def _acquire(self, acquire: Callable[[], T], give_back: Callable[[T], None]) -> T:
        """Get in a thread what has to be given back, which it is where we are cancelled meanwhile.

        Leaves only once the thread has ended, so that closing finds nothing still to come.
        """
        getting = asyncio.ensure_future(self._in_thread(acquire))
        cancelled: asyncio.CancelledError | None = None
        while not getting.done():
            try:
                await asyncio.wait({getting})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is None:
            return getting.result()
        if getting.exception() is None:
            held = getting.result()
            await self._give_back(lambda: give_back(held))
        raise cancelled

    async def _give_back(self, give_back: Callable[[], None]) -> None:
        """Unless the cache was closed, which took back all that it had handed out."""
        if not self._closed:
            await asyncio.shield(self._in_thread(give_back))

    async def _in_thread(self, call: Callable[..., T], *args: object) -> T:
        if self._closed:
            raise Unavailable("The server is shutting down.")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: call(*args))


def _check_sizes(description: AdapterDescription, limits: AdapterLimits) -> None:
    """Refuse what is above a limit before anything of it is read."""
    for file in description.files:
        limit = max_file_bytes(file.path, limits)
        if file.size > limit:
            raise TooLarge(f"{file.path} has {file.size} bytes; the limit is {limit}.")


def _resolved(found: CachedVersion) -> ResolvedAdapter:
    return ResolvedAdapter(found.name, found.path, found.manifest, found.source, cached=True)
