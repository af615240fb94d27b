"""Uploads as a source of adapters: a resolver over their store that knows what has expired."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.names import AdapterName
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, SourceFile
from mural_resolvers.store import AdapterStore
from mural_resolvers.tenants import Principal
from mural_resolvers.uploads.record import UPLOAD_FILE, UploadRecord

__all__ = ["UPLOADS", "UploadsResolver"]

UPLOADS = "uploads"
"""The source's name."""

_MAX_REMEMBERED = 16_384


class UploadsResolver(LoRAResolver):
    """What another resolver finds in the store, as long as it has not expired.

    An alias that means an expired version finds nothing until the version is reaped. ``now``
    gives seconds since the epoch.
    """

    def __init__(
        self, inner: LoRAResolver, store: AdapterStore, *, now: Callable[[], float] = time.time
    ) -> None:
        self._inner = inner
        self._store = store
        self._now = now
        self._records: OrderedDict[AdapterName, UploadRecord | None] = OrderedDict()

    @property
    def name(self) -> str:
        """``uploads``."""
        return UPLOADS

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
        record = await self._record(found.name)
        return None if record is not None and record.has_expired(self._now()) else found

    async def _record(self, name: AdapterName) -> UploadRecord | None:
        """It is there before its version, and never changed: read once."""
        if name not in self._records:
            data = await self._store.read_record(name, UPLOAD_FILE)
            self._records[name] = None if data is None else UploadRecord.from_json(data)
            while len(self._records) > _MAX_REMEMBERED:
                self._records.popitem(last=False)
        return self._records[name]

    def open(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Read from the resolver behind it."""
        return self._inner.open(adapter, file, start, stop)

    async def close(self) -> None:
        """Close the resolver behind it."""
        await self._inner.close()
