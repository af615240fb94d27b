"""What tenants upload: from a body to a version in the store that all replicas share.

An upload is admitted, read into quarantine under its limits, judged, and published with the record
of when it expires. Quotas count what is in the store; of several replicas each holds its own
uploads to them exactly, and the others' from when they are published.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from mural_resolvers.digest import FileEntry
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    InvalidInput,
    MuralError,
    RateLimited,
    TooLarge,
    Unavailable,
    UnusableAdapter,
    quoted,
)
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import LATEST, AdapterName
from mural_resolvers.store import AdapterStore, Aliases, StoredVersion
from mural_resolvers.tenants import Principal, may_use_source
from mural_resolvers.turns import KeyedLocks, Rate
from mural_resolvers.uploads.intake import FileSink, Intake, Quarantine
from mural_resolvers.uploads.record import UPLOAD_FILE, UploadRecord
from mural_resolvers.uploads.resolver import UPLOADS
from mural_resolvers.uploads.settings import UploadSettings
from mural_resolvers.versions import AliasTarget

__all__ = [
    "BodyReader",
    "Judge",
    "OpenedFile",
    "Upload",
    "UploadCounts",
    "UploadObserver",
    "Uploads",
]

logger = logging.getLogger("mural.uploads")

_PIECE_BYTES = 1 << 20
_MAX_REMEMBERED = 16_384
_LOOK_UPS = 8
_LONGEST_RETRY_S = 3600.0

T = TypeVar("T")

Judge = Callable[[AdapterName, Path, Manifest], Awaitable[None]]
"""Raises ``UnusableAdapter`` or ``TooLarge`` where the server could not serve it."""


class BodyReader(Protocol):
    """Takes a body apart, piece by piece, and gives its files to a sink."""

    def feed(self, data: bytes) -> None:
        """The next piece."""

    def finish(self) -> None:
        """The body ended."""


class UploadObserver(Protocol):
    """Who has to know of names that come and go."""

    def published(self, name: AdapterName) -> None:
        """A name is there that may have been asked for in vain."""

    def removed(self, name: AdapterName) -> None:
        """A name is gone that may be known."""


@dataclass(frozen=True, slots=True, order=True)
class Upload:
    """A version in the store of uploads. One that others put there has no ``record``."""

    name: AdapterName
    digest: str
    num_bytes: int
    rank: int
    record: UploadRecord | None


@dataclass(slots=True)
class UploadCounts:
    """What became of uploads since the start, for metrics; ``refused`` by the error's code."""

    created: int = 0
    unchanged: int = 0
    created_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    removed: int = 0


class OpenedFile(NamedTuple):
    """A file of an upload, and its bytes as they are read."""

    file: FileEntry
    pieces: AsyncIterator[bytes]


class Uploads:
    """Takes, tells of, removes and reaps uploads. For one event loop.

    ``now`` gives seconds since the epoch, ``clock`` seconds for rates.
    """

    def __init__(
        self,
        store: AdapterStore,
        quarantine: Quarantine,
        judge: Judge,
        observer: UploadObserver,
        settings: UploadSettings | None = None,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings = settings or UploadSettings()
        self._store = store
        self._quarantine = quarantine
        self._judge = judge
        self._observer = observer
        self._now = now
        self._rate = Rate(settings.per_minute / 60, settings.burst, clock)
        self.counts = UploadCounts()
        self._open: Counter[str] = Counter()
        self._reads: Counter[str] = Counter()
        # One upload of a tenant is counted and published at a time.
        self._locks = KeyedLocks()
        self._known: OrderedDict[AdapterName, Upload] = OrderedDict()
        self._look_ups = asyncio.Semaphore(_LOOK_UPS)
        self._judging = asyncio.Semaphore(1)
        self._threads = ThreadPoolExecutor(
            settings.max_concurrent, thread_name_prefix="adapter-upload"
        )

    @property
    def settings(self) -> UploadSettings:
        """Its bounds."""
        return self._settings

    @staticmethod
    def check_own(principal: Principal, name: AdapterName) -> None:
        """Raise ``Forbidden`` outside the principal's own namespace.

        Grants let a tenant use another's adapters, never change nor copy them.
        """
        if not principal.is_admin and principal.tenant != name.tenant:
            raise Forbidden("This key may not upload to that namespace, nor change what is there.")

    # -- taking -----------------------------------------------------------------------------------

    async def receive(
        self,
        principal: Principal,
        name: AdapterName,
        reader_for: Callable[[FileSink], BodyReader],
        body: AsyncIterator[bytes],
    ) -> tuple[Upload, bool]:
        """Take an upload; tells whether it is new, or was there with the same content.

        Raises ``Forbidden`` outside the principal's own namespace, before anything is read;
        ``RateLimited`` above a limit or the quota of the tenant, ``Unavailable`` where the server
        cannot take it now; ``InvalidInput``, ``TooLarge`` or ``UnusableAdapter`` for what comes,
        ``Conflict`` for a name that is taken; and whatever ``body`` raises. Nothing is left
        behind then.
        """
        try:
            self._check_may_upload(principal, name)
            with self._admitted(name.tenant):
                upload, created = await self._receive(principal, name, reader_for, body)
        except MuralError as error:
            # The client is told; whoever wonders at a tenant's trouble has only the log.
            logger.info("upload of %s is refused: %s", name.exact, error)
            self.counts.refused[error.code] += 1
            raise
        self._count(upload, created)
        return upload, created

    def _check_may_upload(self, principal: Principal, name: AdapterName) -> None:
        self.check_own(principal, name)
        if not may_use_source(principal, UPLOADS):
            raise Forbidden("This key may not use uploads, so there is nothing to upload for.")
        _check_exact(name)

    def _count(self, upload: Upload, created: bool) -> None:
        if created:
            self.counts.created += 1
            self.counts.created_bytes += upload.num_bytes
        else:
            self.counts.unchanged += 1

    async def _receive(
        self,
        principal: Principal,
        name: AdapterName,
        reader_for: Callable[[FileSink], BodyReader],
        body: AsyncIterator[bytes],
    ) -> tuple[Upload, bool]:
        intake = await self._begin(principal, name)
        try:
            await self._read(reader_for(intake), body)
            async with _bounded(self._settings.finish_timeout_s):
                return await self._take(principal, name, intake)
        finally:
            await asyncio.shield(self._in_thread(intake.discard))

    @contextmanager
    def _admitted(self, tenant: str) -> Iterator[None]:
        settings = self._settings
        if self._open[tenant] >= settings.max_concurrent_per_tenant:
            raise RateLimited(
                f"{settings.max_concurrent_per_tenant} uploads of this tenant are under way."
            )
        if self._open.total() >= settings.max_concurrent:
            raise Unavailable("Too many uploads are under way on this server.", retry_after_s=5.0)
        if wait_s := self._rate.take(tenant):
            raise RateLimited("This tenant uploads too often.", retry_after_s=wait_s)
        self._open[tenant] += 1
        try:
            yield
        finally:
            self._open[tenant] -= 1
            if not self._open[tenant]:
                del self._open[tenant]

    async def _begin(self, principal: Principal, name: AdapterName) -> Intake:
        """A place in quarantine for as many bytes as the tenant may still have."""
        largest = self._settings.max_bytes
        over: MuralError = TooLarge(f"An upload has at most {largest} bytes.")
        if await self._store.manifest(name) is None:
            quota = await self._quota(principal, name.tenant)
            quota.check_adapters()
            if quota.bytes_left < largest:
                largest, over = quota.bytes_left, quota.exceeded("bytes")
        return await self._in_thread(partial(self._quarantine.intake, largest, over))

    async def _read(self, reader: BodyReader, body: AsyncIterator[bytes]) -> None:
        pending = bytearray()
        async for piece in body:
            pending += piece
            if len(pending) >= _PIECE_BYTES:
                data = bytes(pending)
                pending.clear()
                await self._in_thread(partial(reader.feed, data))
        await self._in_thread(partial(reader.feed, bytes(pending)))
        await self._in_thread(reader.finish)

    async def _take(
        self, principal: Principal, name: AdapterName, intake: Intake
    ) -> tuple[Upload, bool]:
        manifest = await self._in_thread(intake.finish)
        async with self._locks.hold(name.tenant):
            found = await self._store.manifest(name)
            if found is None:
                quota = await self._quota(principal, name.tenant)
                quota.check_adapters()
                quota.check_bytes(manifest.num_bytes)
            if found is None or found.digest != manifest.digest:
                # One at a time: whoever uploads must not crowd out what is served.
                async with self._judging:
                    await self._judge(name, intake.folder, manifest)
            return await self._publish(principal, name, intake.folder, manifest)

    async def _publish(
        self, principal: Principal, name: AdapterName, folder: Path, manifest: Manifest
    ) -> tuple[Upload, bool]:
        now, ttl_s = self._now(), self._settings.ttl_s
        record = UploadRecord(
            uploaded_at=now,
            expires_at=None if ttl_s is None else now + ttl_s,
            key_id=principal.key_id,
            digest=manifest.digest,
        )
        created = await self._store.publish(
            name, folder, manifest, records={UPLOAD_FILE: record.to_json()}
        )
        upload = await self._find(name)
        if upload is None:
            raise Conflict(
                f"{name} has expired, and a version's name is not used again: use another version."
            )
        if created:
            logger.info(
                "uploaded %s: %d bytes, digest %s, key %s",
                name.exact,
                manifest.num_bytes,
                manifest.digest,
                principal.key_id,
            )
            self._observer.published(name)
        return upload, created

    # -- telling ----------------------------------------------------------------------------------

    async def find(self, principal: Principal, name: AdapterName) -> Upload:
        """An upload; ``Forbidden`` outside the namespace, ``AdapterNotFound`` inside it."""
        self.check_own(principal, name)
        _check_exact(name)
        upload = await self._find(name)
        if upload is None:
            raise _not_found(name)
        return upload

    async def manifest(self, principal: Principal, name: AdapterName) -> Manifest:
        """What an upload consists of; raises as ``find``."""
        await self.find(principal, name)
        manifest = await self._store.manifest(name)
        if manifest is None:
            raise _not_found(name)
        return manifest

    @asynccontextmanager
    async def open_file(
        self, principal: Principal, name: AdapterName, path: str
    ) -> AsyncIterator[OpenedFile]:
        """Read one of the files that an upload's manifest lists.

        Raises as ``find``, also where it lists none of that path; ``RateLimited`` and
        ``Unavailable`` above the bounds on downloads.
        """
        self.check_own(principal, name)
        _check_exact(name)
        with self._reading(name.tenant):
            manifest = await self.manifest(principal, name)
            file = next((file for file in manifest.files if file.path == path), None)
            if file is None:
                raise AdapterNotFound(f"{name} has no file {quoted(path)}.")
            async with self._store.open(name, file) as pieces:
                yield OpenedFile(file, pieces)

    @contextmanager
    def _reading(self, tenant: str) -> Iterator[None]:
        settings = self._settings
        if self._reads[tenant] >= settings.max_reads_per_tenant:
            raise RateLimited(
                f"{settings.max_reads_per_tenant} downloads of this tenant are under way."
            )
        if self._reads.total() >= settings.max_reads:
            raise Unavailable("Too many downloads are under way on this server.", retry_after_s=5.0)
        self._reads[tenant] += 1
        try:
            yield
        finally:
            self._reads[tenant] -= 1
            if not self._reads[tenant]:
                del self._reads[tenant]

    # -- aliases ----------------------------------------------------------------------------------

    async def aliases(self, principal: Principal, adapter: AdapterName) -> Aliases:
        """The aliases of an adapter, whatever the version of ``adapter``; ``Forbidden``."""
        self.check_own(principal, adapter)
        return await self._store.aliases(adapter.tenant, adapter.adapter)

    async def set_alias(
        self, principal: Principal, alias: AdapterName, targets: Sequence[AliasTarget]
    ) -> Aliases:
        """Point an alias at versions, or remove it where there are none; gives what holds then.

        Raises as the store does, ``Forbidden`` outside the namespace, and ``AdapterNotFound``
        also for a version that has expired.
        """
        self.check_own(principal, alias)
        for target in targets:
            if await self._find(alias.at(target.version)) is None:
                raise _not_found(alias.at(target.version))
        aliases = await self._store.set_alias(alias.tenant, alias.adapter, alias.version, targets)
        logger.info("alias %s is changed, key %s", alias.exact, principal.key_id)
        self._observer.published(alias)
        return aliases

    async def list(self, principal: Principal, tenant: str | None = None) -> tuple[Upload, ...]:
        """The uploads of a tenant, in order of name; an admin's without one are everybody's."""
        if tenant is None and not principal.is_admin:
            tenant = principal.tenant
        if not principal.is_admin and (tenant is None or tenant != principal.tenant):
            raise Forbidden("This key may not see those adapters.")
        tenants = await self._store.tenants() if tenant is None else (tenant,)
        return tuple([upload for one in tenants for upload in await self._all_of(one)])

    async def _find(self, name: AdapterName) -> Upload | None:
        manifest = await self._store.manifest(name)
        if manifest is None:
            self._known.pop(name, None)
            return None
        upload = await self._described(name, manifest)
        return None if self._has_expired(upload) else upload

    async def _all_of(self, tenant: str) -> tuple[Upload, ...]:
        """What of a tenant's has not expired."""
        versions = await self._store.list(tenant)
        found = await asyncio.gather(*(self._of(version) for version in versions))
        return tuple(upload for upload in found if upload and not self._has_expired(upload))

    async def _of(self, version: StoredVersion) -> Upload | None:
        known = self._known.get(version.name)
        if known is not None:
            return known
        async with self._look_ups:
            try:
                manifest = await self._store.manifest(version.name)
                return None if manifest is None else await self._described(version.name, manifest)
            except UnusableAdapter as error:
                logger.warning("%s in the store of uploads: %s", version.name.exact, error)
                return None

    async def _described(self, name: AdapterName, manifest: Manifest) -> Upload:
        known = self._known.get(name)
        if known is not None and known.digest == manifest.digest:
            return known
        data = await self._store.read_record(name, UPLOAD_FILE)
        record = None if data is None else UploadRecord.from_json(data)
        rank, size = manifest.facts.rank, manifest.num_bytes
        upload = Upload(name, manifest.digest, size, rank, record)
        self._known[name] = upload
        while len(self._known) > _MAX_REMEMBERED:
            self._known.popitem(last=False)
        return upload

    def _has_expired(self, upload: Upload) -> bool:
        return upload.record is not None and upload.record.has_expired(self._now())

    async def _quota(self, principal: Principal, tenant: str) -> _Quota:
        """What a tenant has and may have; its own limits come before the server's."""
        own = principal.limits if principal.tenant == tenant else None
        adapters = None if own is None else own.adapters
        num_bytes = None if own is None else own.bytes
        uploads = await self._all_of(tenant)
        return _Quota(
            adapters=len(uploads),
            num_bytes=sum(upload.num_bytes for upload in uploads),
            max_adapters=self._settings.max_adapters if adapters is None else adapters,
            max_bytes=self._settings.max_tenant_bytes if num_bytes is None else num_bytes,
            retry_after_s=self._until_one_expires(uploads),
        )

    def _until_one_expires(self, uploads: Sequence[Upload]) -> float:
        ends = [u.record.expires_at for u in uploads if u.record and u.record.expires_at]
        return min([_LONGEST_RETRY_S, *(max(1.0, end - self._now()) for end in ends)])

    # -- removing ---------------------------------------------------------------------------------

    async def delete(self, principal: Principal, name: AdapterName) -> Upload:
        """Remove a version for good; its name is not used again. Gives what it was.

        Raises as ``find``, and ``Conflict`` while an alias points at it.
        """
        upload = await self.find(principal, name)
        await self._remove(name)
        logger.info("deleted %s, key %s", name.exact, principal.key_id)
        return upload

    async def _remove(self, name: AdapterName) -> None:
        await self._store.delete(name)
        self._known.pop(name, None)
        self.counts.removed += 1
        self._observer.removed(name)

    async def reap(self) -> int:
        """Remove what has expired; give how many there were."""
        reaped = 0
        for tenant in await self._store.tenants():
            for version in await self._store.list(tenant):
                upload = await self._of(version)
                if upload is not None and self._has_expired(upload):
                    reaped += await self._reap(upload.name)
        return reaped

    async def _reap(self, name: AdapterName) -> bool:
        try:
            await self._remove(name)
        except Conflict as error:
            # An alias points at it: it stays hidden until that is changed.
            logger.warning("%s has expired and stays: %s", name.exact, error)
            return False
        logger.info("removed %s, which has expired", name.exact)
        return True

    async def run(self) -> None:
        """Reap now and then, until cancelled."""
        while True:
            await asyncio.sleep(self._settings.reap_interval_s)
            try:
                await self.reap()
            except MuralError as error:
                logger.warning("expired uploads are not removed: %s", error)
            except Exception:
                # It must go on: nobody else would notice that it had ended.
                logger.exception("removing expired uploads failed")

    async def close(self) -> None:
        """Let go of the store and of the threads."""
        self._threads.shutdown(wait=False)
        await self._store.close()

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when idle uploads still hold places or locks."""
        assert not +self._open, self._open
        assert not +self._reads, self._reads
        assert self._locks.idle
        assert len(self._known) <= _MAX_REMEMBERED

    # -- inside -----------------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


@dataclass(frozen=True, slots=True)
class _Quota:
    adapters: int
    num_bytes: int
    max_adapters: int
    max_bytes: int
    retry_after_s: float

    @property
    def bytes_left(self) -> int:
        return max(0, self.max_bytes - self.num_bytes)

    def check_adapters(self) -> None:
        if self.adapters >= self.max_adapters:
            raise self.exceeded("adapters")

    def check_bytes(self, more: int) -> None:
        if more > self.bytes_left:
            raise self.exceeded("bytes")

    def exceeded(self, what: str) -> RateLimited:
        limit = self.max_adapters if what == "adapters" else self.max_bytes
        return RateLimited(
            f"This tenant may have {limit} {what} of uploads: delete some, or wait until some "
            "expire.",
            retry_after_s=self.retry_after_s,
        )


@asynccontextmanager
async def _bounded(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise Unavailable(
            "The upload could not be judged and published in time.", retry_after_s=5.0
        ) from None


def _check_exact(name: AdapterName) -> None:
    if name.version == LATEST:
        raise InvalidInput(
            f"Name the version: {name.tenant}/{name.adapter}:VERSION ({LATEST} is an alias)."
        )


def _not_found(name: AdapterName) -> AdapterNotFound:
    return AdapterNotFound(f"The adapter {name} does not exist.")
