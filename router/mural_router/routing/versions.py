"""From the name that was asked for to the exact version: aliases with weights, and ``latest``.

What a store says is kept for seconds, so that an alias that is pointed elsewhere holds soon and
without a restart, and so that a store that is down for a while stops nobody; what is changed by way
of this router holds for the next request. What objects or a
file of the router's own say comes before it, and is asked for each request.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import msgspec

from mural_resolvers.errors import (
    AdapterNotFound,
    Forbidden,
    MuralError,
    Unavailable,
    UnusableAdapter,
    quoted,
)
from mural_resolvers.names import LATEST, AdapterName
from mural_resolvers.store import AdapterStore, Aliases
from mural_resolvers.versions import AliasTarget, highest_version, pick_target

__all__ = [
    "AliasOverlay",
    "Exact",
    "KnownVersions",
    "StoreVersions",
    "VersionSettings",
    "VersionSource",
    "Versions",
]

MAX_REFRESHES: Final = 16
DOWN_S: Final = 1.0

MANIFESTS_AT_ONCE: Final = 16
MAX_ADAPTERS: Final = 10_000

logger = logging.getLogger("mural.router.versions")


@dataclass(frozen=True, slots=True)
class KnownVersions:
    """What a source says of one adapter.

    ``digests`` are its published versions, None where the digest is not known; None altogether
    where the source knows nothing of versions.
    """

    aliases: Aliases = field(default_factory=dict)
    digests: Mapping[str, str | None] | None = None


_NOTHING: Final = KnownVersions()


class VersionSource(ABC):
    """Where versions and their aliases are written down."""

    @abstractmethod
    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        """What is said of an adapter, nothing for an unknown one.

        Raises a ``MuralError`` where it cannot be told now.
        """

    async def close(self) -> None:
        """Let go of connections."""
        return


class AliasOverlay(ABC):
    """Aliases that come before those of the store, one by one."""

    @abstractmethod
    def targets(self, name: AdapterName) -> Sequence[AliasTarget] | None:
        """What stands behind ``name.version``, an alias, now; None: the store may say.

        From memory, since it is asked for each request. One of the weights is above 0.
        """


class StoreVersions(VersionSource):
    """A store's records, which ``mural adapters alias`` and the upload API write.

    A published version is immutable, so the manifest that states its digest is read once.
    """

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._digests: OrderedDict[tuple[str, str], dict[str, str]] = OrderedDict()

    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        """The alias record, the published versions, and the digests of those that state one."""
        aliases, versions = await asyncio.gather(
            self._store.aliases(tenant, adapter), self._store.versions(tenant, adapter)
        )
        before = self._digests.pop((tenant, adapter), {})
        new = [AdapterName(tenant, adapter, each) for each in versions if each not in before]
        turns = asyncio.Semaphore(MANIFESTS_AT_ONCE)
        read = await asyncio.gather(*(self._digest(name, turns) for name in new))
        found = before | {
            name.version: digest for name, digest in zip(new, read, strict=True) if digest
        }
        # One that went and came again is read again.
        kept = {version: found[version] for version in versions if version in found}
        self._digests[tenant, adapter] = kept
        if len(self._digests) > MAX_ADAPTERS:
            self._digests.popitem(last=False)
        return KnownVersions(aliases, {version: kept.get(version) for version in versions})

    async def _digest(self, name: AdapterName, turns: asyncio.Semaphore) -> str | None:
        async with turns:
            try:
                manifest = await self._store.manifest(name)
            except UnusableAdapter:
                # The replica will say so to whoever asks for it: that hides none of the others.
                return None
        return None if manifest is None else manifest.digest

    async def close(self) -> None:
        """Close the store."""
        await self._store.close()


class Exact(msgspec.Struct, frozen=True):
    """An exact version. ``alias``: the name that was asked for, where it was one.

    ``listed``: a source says that it is published.
    """

    name: AdapterName
    digest: str | None = None
    alias: AdapterName | None = None
    listed: bool = False


@dataclass(frozen=True, slots=True)
class VersionSettings:
    """``ttl_s``: for how long an answer holds. One up to twice as old still serves, while a new
    one is fetched; an older one is waited for, for ``timeout_s``, and holds on if none comes.
    ``max_adapters`` are remembered."""

    ttl_s: float = 5.0
    timeout_s: float = 2.0
    max_adapters: int = 10_000


class Versions:
    """Resolves names. For one event loop.

    What ``overlay`` has no alias for, and no source, is taken as exact.
    """

    def __init__(
        self,
        source: VersionSource | None,
        settings: VersionSettings | None = None,
        *,
        overlay: AliasOverlay | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._source = source
        self.overlay = overlay
        """May be replaced at any time."""
        self.settings = settings or VersionSettings()
        self._clock = clock
        self._draw = draw
        self._known: OrderedDict[tuple[str, str], _Answer] = OrderedDict()
        self._flights: dict[tuple[str, str], asyncio.Task[None]] = {}
        """Look-ups that began after the last change that is known of."""
        self._all_flights: set[asyncio.Task[None]] = set()
        self._down_until = -math.inf
        """The source is asked for nothing before."""
        self._unreadable: OrderedDict[tuple[str, str], float] = OrderedDict()
        """Adapters whose own records are none, and until when they are not asked for."""
        self._turns = asyncio.Semaphore(MAX_REFRESHES)
        self.failed = 0
        """Look-ups that a source could not answer."""

    async def resolve(self, name: AdapterName, sticky: str | None = None) -> Exact:
        """The version that a name means for those who share ``sticky`` (None: for this request).

        A name that no source lists is taken as exact: the replica says 404 when it is not. Raises
        ``AdapterNotFound`` for a ``latest`` of nothing, ``Unavailable`` when nothing is known and
        the source does not answer.
        """
        known = _NOTHING if self._source is None else await self._find(name)
        return self._pick(name, known, sticky)

    def resolve_now(self, name: AdapterName, sticky: str | None = None) -> Exact | None:
        """`resolve` where nothing has to be looked up; None: it has."""
        if self._source is None:
            if self.overlay is None and name.version != LATEST:
                return Exact(name)
            return self._pick(name, _NOTHING, sticky)
        answer = self._known.get((name.tenant, name.adapter))
        if answer is None or self._clock() - answer.at >= self.settings.ttl_s:
            return None
        self._known.move_to_end((name.tenant, name.adapter))
        return self._pick(name, answer.versions, sticky)

    def changed(self, tenant: str) -> None:
        """Something of a tenant's has just been changed: ask anew before it is answered by.

        What was known holds on only while the source does not answer.
        """
        for key in [key for key in self._known if key[0] == tenant]:
            self._known[key] = _Answer(self._known[key].versions, -math.inf)
        for key in [key for key in self._unreadable if key[0] == tenant]:
            del self._unreadable[key]
        # They may have read what was there before.
        for key in [key for key in self._flights if key[0] == tenant]:
            del self._flights[key]

    def _pick(self, name: AdapterName, known: KnownVersions, sticky: str | None) -> Exact:
        targets = None if self.overlay is None else self.overlay.targets(name)
        if targets is None:
            targets = known.aliases.get(name.version)
        digests = known.digests or {}
        if targets:
            version = pick_target(targets, self._draw_for(name, sticky))
        elif name.version != LATEST:
            version = name.version
            return Exact(name, digests.get(version), listed=version in digests)
        else:
            highest = highest_version(digests)
            if self._source is None:
                raise AdapterNotFound(
                    f"{quoted(name.short)} names no version, and this router has no store in "
                    "which to look for the latest."
                )
            if highest is None:
                raise AdapterNotFound(f"The model {quoted(name.short)} does not exist.")
            version = highest
        return Exact(name.at(version), digests.get(version), name, version in digests)

    async def close(self) -> None:
        """End look-ups and close the source."""
        flights = list(self._all_flights)
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)
        if self._source is not None:
            await self._source.close()

    def _draw_for(self, name: AdapterName, sticky: str | None) -> float:
        """From [0, 1): the same on every router, and for every set of weights."""
        if sticky is None:
            return self._draw()
        text = f"{name.exact}\0{sticky}".encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big") / (1 << 56)

    async def _find(self, name: AdapterName) -> KnownVersions:
        key = (name.tenant, name.adapter)
        answer, now = self._known.get(key), self._clock()
        age = math.inf if answer is None else now - answer.at
        if answer is not None and age < self.settings.ttl_s:
            self._known.move_to_end(key)
            return answer.versions
        if now < max(self._down_until, self._unreadable.get(key, -math.inf)):
            return self._whatever_is_known(key)
        flight = self._flights.get(key) or self._refresh(key)
        if answer is not None and age < 2 * self.settings.ttl_s:
            return answer.versions
        await asyncio.wait({flight}, timeout=self.settings.timeout_s)
        return self._whatever_is_known(key)

    def _whatever_is_known(self, key: tuple[str, str]) -> KnownVersions:
        answer = self._known.get(key)
        if answer is None:
            raise Unavailable("The versions of this adapter cannot be looked up now.")
        return answer.versions

    def _refresh(self, key: tuple[str, str]) -> asyncio.Task[None]:
        flight = asyncio.create_task(self._read(key), name="look up versions")
        self._flights[key] = flight
        self._all_flights.add(flight)
        flight.add_done_callback(partial(self._landed, key))
        return flight

    def _landed(self, key: tuple[str, str], flight: asyncio.Task[None]) -> None:
        self._all_flights.discard(flight)
        if self._flights.get(key) is flight:
            del self._flights[key]

    async def _read(self, key: tuple[str, str]) -> None:
        assert self._source is not None
        try:
            async with self._turns, asyncio.timeout(10 * self.settings.timeout_s):
                versions = await self._source.read(*key)
        except (Unavailable, Forbidden, OSError) as error:
            self._leave_alone()
            self._fail(key, str(error) or "no answer in time")
            return
        except MuralError as error:
            # What is written down of this adapter is none, which is nobody else's trouble.
            self._unreadable[key] = self._clock() + DOWN_S
            while len(self._unreadable) > self.settings.max_adapters:
                self._unreadable.popitem(last=False)
            self._fail(key, error.message)
            return
        except Exception:
            # Whatever a store's client raises, what is known must go on being served.
            logger.exception("versions could not be looked up")
            self._leave_alone()
            self._fail(key, "an unexpected error")
            return
        self._down_until = -math.inf
        self._unreadable.pop(key, None)
        if self._flights.get(key) is asyncio.current_task():
            self._keep(key, _Answer(versions, self._clock()))
        elif key not in self._known:
            # Better than nothing, for as long as nothing newer comes.
            self._keep(key, _Answer(versions, -math.inf))

    def _leave_alone(self) -> None:
        """The source is down: ask it for nobody's adapters for a while."""
        self._down_until = self._clock() + DOWN_S

    def _fail(self, key: tuple[str, str], reason: str) -> None:
        """Go by what is known."""
        self.failed += 1
        logger.warning("the versions of %s/%s cannot be looked up: %s", *key, reason)

    def _keep(self, key: tuple[str, str], answer: _Answer) -> None:
        self._known[key] = answer
        self._known.move_to_end(key)
        while len(self._known) > self.settings.max_adapters:
            self._known.popitem(last=False)


@dataclass(frozen=True, slots=True)
class _Answer:
    versions: KnownVersions
    at: float
