"""Adapters in an S3 store as a source."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    InvalidInput,
    MuralError,
    Unavailable,
    quoted,
)
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.names import LATEST, AdapterName
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, SourceFile
from mural_resolvers.s3.answers import CredentialsRefused, ObjectChanged, ObjectMissing
from mural_resolvers.s3.client import S3Client
from mural_resolvers.s3.layout import S3Layout
from mural_resolvers.s3.settings import S3Settings
from mural_resolvers.store import Aliases
from mural_resolvers.tenants import Principal
from mural_resolvers.versions import AliasTarget, highest_version, pick_target

__all__ = ["S3Resolver"]

logger = logging.getLogger("mural.s3")

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MAX_REMEMBERED = 4096
_REFUSED_RETRY_S = 10.0


class S3Resolver(LoRAResolver):
    """The source over one bucket and prefix. For one event loop.

    A version with a ``manifest.json`` is described by it; its revision is the digest. A folder
    without one is described, where the settings accept it, by its objects' ETags, which are held
    to when it is read. ``latest`` without an alias is the highest version. Aliases, and what is the
    highest version, are believed for ``alias_cache_s``.

    A refusal counts as the tenant's (``Forbidden``) only where the store lets us list the
    adapter's folder or the whole prefix, so that the credentials are good for the source. Else it
    is the source's own trouble: ``Unavailable``, with the reason in the log.

    A client that is given is not closed. ``draw`` gives a number from [0, 1) for each pick among
    an alias's versions.
    """

    def __init__(
        self,
        settings: S3Settings,
        limits: AdapterLimits = DEFAULT_LIMITS,
        *,
        name: str = "s3",
        client: S3Client | None = None,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._client = client or S3Client(settings)
        self._owns_client = client is None
        self._layout = S3Layout(self._client, settings, limits)
        self._draw = draw
        self._aliases: _Recent[tuple[str, str], Aliases] = _Recent(settings.alias_cache_s, clock)
        self._highest: _Recent[tuple[str, str], str] = _Recent(settings.alias_cache_s, clock)

    @property
    def name(self) -> str:
        """The source's name."""
        return self._name

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        """Describe the version; reads records and no content.

        Raises ``Conflict`` for a name that is both an alias and a version, ``AdapterNotFound`` for
        an alias of an absent version, ``UnusableAdapter``, ``Forbidden``, ``Unavailable``.
        """
        try:
            return await self._resolve(name)
        except (Forbidden, InvalidInput) as error:
            raise await self._judged(name, error) from None

    @asynccontextmanager
    async def open(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Read a range of an object, which must be the one that was described."""
        key = self._layout.key(adapter.name, file.path)
        try:
            async with self._client.stream(key, start, stop, file.size, file.tag) as pieces:
                yield pieces
        except ObjectMissing:
            raise AdapterNotFound(f"{adapter.name} is gone from its store.") from None
        except ObjectChanged:
            raise Conflict(
                f"The content of {adapter.name} changed; a version is immutable: "
                "use another version."
            ) from None
        except (Forbidden, InvalidInput) as error:
            raise await self._judged(adapter.name, error) from None

    async def close(self) -> None:
        """Close the connections, unless they are another's."""
        if self._owns_client:
            await self._client.close()

    async def _resolve(self, name: AdapterName) -> AdapterDescription | None:
        aliases, exact = await asyncio.gather(
            self._known_aliases(name), self._layout.describe(name)
        )
        targets = aliases.get(name.version)
        if exact is not None and (targets or name.version == LATEST):
            raise Conflict(f"{quoted(name.version)} is both an alias and a version.")
        if exact is not None:
            return exact
        if targets:
            return await self._aliased(name, targets)
        return await self._latest(name) if name.version == LATEST else None

    async def _known_aliases(self, name: AdapterName) -> Aliases:
        key = (name.tenant, name.adapter)
        known = self._aliases.get(key)
        if known is None:
            record = await self._layout.aliases(*key)
            known = self._aliases.put(key, record.aliases)
        return known

    async def _aliased(
        self, name: AdapterName, targets: tuple[AliasTarget, ...]
    ) -> AdapterDescription:
        version = pick_target(targets, self._draw())
        found = await self._layout.describe(name.at(version))
        if found is None:
            raise AdapterNotFound(
                f"The alias {quoted(name.version)} names the version {quoted(version)}, "
                "which is absent."
            )
        return found

    async def _latest(self, name: AdapterName) -> AdapterDescription | None:
        key = (name.tenant, name.adapter)
        known = self._highest.get(key)
        if known is not None:
            found = await self._layout.describe(name.at(known))
            if found is not None:
                return found
        versions = await self._layout.versions(*key)
        highest = highest_version(version.name.version for version in versions)
        if highest is None:
            return None
        return await self._layout.describe(name.at(self._highest.put(key, highest)))

    async def _judged(self, name: AdapterName, refusal: MuralError) -> MuralError:
        """Whether a refusal is this adapter's or all of the source's: what to raise."""
        if isinstance(refusal, Forbidden) and not isinstance(refusal, CredentialsRefused):
            for prefix in (self._layout.adapter(name.tenant, name.adapter), self._layout.root):
                try:
                    await self._layout.is_readable(prefix)
                except Forbidden:
                    continue
                except Unavailable as error:
                    return error
                return Forbidden()
        logger.warning(
            "source %s cannot be used: %s Its credentials must be valid, with the right to get "
            "objects and to list the prefix.",
            self._name,
            refusal.message,
        )
        return Unavailable(
            "A source of adapters cannot be used at present.", retry_after_s=_REFUSED_RETRY_S
        )


class _Recent(Generic[K, V]):
    """A bounded map that believes an entry for some seconds."""

    def __init__(self, ttl_s: float, clock: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()

    def get(self, key: K) -> V | None:
        entry = self._entries.get(key)
        return entry[1] if entry is not None and self._clock() < entry[0] else None

    def put(self, key: K, value: V) -> V:
        self._entries[key] = (self._clock() + self._ttl_s, value)
        self._entries.move_to_end(key)
        while len(self._entries) > _MAX_REMEMBERED:
            self._entries.popitem(last=False)
        return value
