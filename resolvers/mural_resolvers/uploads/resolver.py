"""Uploads as a source of adapters: a resolver over their store that knows what has expired."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.names import AdapterName
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, SourceFile
from mural_resolvers.tenants import Principal

__all__ = ["UploadsResolver"]


class UploadsResolver(LoRAResolver):
    """What another resolver finds, as long as it has not expired.

    ``expires_at`` gives a published version's end in seconds since the epoch, or None. An alias
    that means an expired version finds nothing until the version is reaped.
    """

    def __init__(
        self,
        inner: LoRAResolver,
        expires_at: Callable[[AdapterName], Awaitable[float | None]],
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._inner = inner
        self._expires_at = expires_at
        self._now = now

    @property
    def name(self) -> str:
        """``uploads``."""
        return "uploads"

    @property
    def downloads(self) -> bool:
        """As the resolver behind it."""
        return self._inner.downloads

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        """What the resolver behind it finds; None for what has expired."""
        found = await self._inner.resolve(principal, name, base)
        if found is None:
            return None
        end = await self._expires_at(found.name)
        return None if end is not None and self._now() >= end else found

    def open(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Read from the resolver behind it."""
        return self._inner.open(adapter, file, start, stop)

    async def close(self) -> None:
        """Close the resolver behind it."""
        await self._inner.close()
