"""An S3 store as the store that replicas share (``layout`` says how it lies).

There are no locks: what is decided is decided by conditional writes. Each file of a version is
created only where there is none, so the first content under a key stays, and two publishers of
different content cannot mix; the manifest is created last, likewise, and publishes. What was
checked before a write (an alias's name, a tombstone) is checked again after it, by both sides, and
the later one takes its write back.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from mural_resolvers.digest import BIN_WEIGHTS_FILE, WEIGHTS_FILE, FileEntry
from mural_resolvers.download import Downloader
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    InvalidInput,
    ManifestMismatch,
    MuralError,
    Unavailable,
    UnusableAdapter,
    quoted,
)
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.manifest import MANIFEST_FILE, Manifest, manifest_of
from mural_resolvers.names import LATEST, AdapterName
from mural_resolvers.s3.answers import ObjectChanged
from mural_resolvers.s3.client import Condition, ObjectStat, S3Client
from mural_resolvers.s3.layout import UPLOAD_ORDER, Found, S3Layout
from mural_resolvers.s3.resolver import S3Resolver
from mural_resolvers.s3.settings import S3Settings
from mural_resolvers.s3.upload import FileUpload
from mural_resolvers.store import (
    ALIASES_FILE,
    MAX_RECORD_BYTES,
    TOMBSTONE_FILE,
    AdapterStore,
    Aliases,
    Progress,
    StoredVersion,
)
from mural_resolvers.versions import AliasTarget, change_aliases, encode_aliases

__all__ = ["S3Store"]

_ATTEMPTS = 10
_MAX_WAIT_S = 1.0
_FIRST_WAIT_S = 0.02
_LISTED_AT_ONCE = 16
_MAX_REMEMBERED = 16_384


class S3Store(AdapterStore):
    """One bucket and prefix. For one event loop.

    Raises ``CredentialsRefused`` (a ``Forbidden``) where the store does not accept the
    credentials, ``Forbidden`` where it does not allow them what is wanted.

    A downloader that is given is not closed. ``sleep`` waits between attempts at a record that
    others change too, for a part of a growing time that ``random`` (giving from [0, 1)) draws.
    """

    def __init__(
        self,
        settings: S3Settings,
        limits: AdapterLimits = DEFAULT_LIMITS,
        *,
        downloader: Downloader | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._client = S3Client(settings)
        self._layout = S3Layout(self._client, settings, limits)
        self._source = S3Resolver(settings, limits, client=self._client)
        self._downloader = downloader or Downloader(limits=limits)
        self._owns_downloader = downloader is None
        self._sleep = sleep
        self._random = random
        # A version's manifest never changes: a listing that shows the same ETag needs no reading.
        self._manifests: OrderedDict[tuple[AdapterName, str], Manifest] = OrderedDict()

    @property
    def location(self) -> str:
        """The bucket, the prefix and the endpoint."""
        return self._settings.location

    async def publish(
        self,
        name: AdapterName,
        folder: Path,
        manifest: Manifest,
        progress: Progress | None = None,
        *,
        records: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Create the files, each held to the manifest, then the manifest.

        What a broken upload left is gone over again by one of the same content; without its
        weights it is replaced by other content once its publisher must have given up.
        """
        records = dict(records or {})
        for record, data in records.items():
            _check_record(record, data)
        try:
            async with asyncio.timeout(self._settings.transfer_timeout_s):
                if await self._holds(name, manifest):
                    return False
                await self._put_files(name, folder, manifest, progress or _silent)
                for record, data in records.items():
                    await self._client.put(self._layout.key(name, record), data)
                return await self._put_manifest(name, manifest)
        except TimeoutError:
            raise Unavailable("The upload was not done in time.", retry_after_s=10.0) from None

    async def manifest(self, name: AdapterName) -> Manifest | None:
        """What ``manifest.json`` states; None for a folder without one, whatever is accepted."""
        return await self._layout.manifest(name)

    async def read_record(self, name: AdapterName, record: str) -> bytes | None:
        """A small file beside an exact version; None where it is not."""
        _check_record(record, b"")
        found, deleted = await asyncio.gather(
            self._client.read(self._layout.key(name, record), MAX_RECORD_BYTES),
            self._layout.is_deleted(name),
        )
        return None if found is None or deleted else found.data

    async def fetch(
        self, name: AdapterName, folder: Path, progress: Progress | None = None
    ) -> Manifest:
        """Download an exact version's files into an empty local folder."""
        if not await asyncio.to_thread(_is_empty_folder, folder):
            raise InvalidInput("An adapter is fetched into an empty folder.")
        described = await self._layout.describe(name)
        if described is None:
            raise _not_found(name)
        try:
            async with asyncio.timeout(self._settings.transfer_timeout_s):
                entries = await self._downloader.download(
                    self._source, described, folder, progress or _silent
                )
            manifest = await asyncio.to_thread(manifest_of, folder, entries, self._limits)
            if described.manifest is not None and described.manifest.digest != manifest.digest:
                raise ManifestMismatch(f"{name} is not what its manifest states.")
        except BaseException as error:
            for file in described.files:
                (folder / file.path).unlink(missing_ok=True)
            if isinstance(error, TimeoutError):
                raise Unavailable("The download was not done in time.") from None
            raise
        return manifest

    @asynccontextmanager
    async def open(self, name: AdapterName, file: FileEntry) -> AsyncIterator[AsyncIterator[bytes]]:
        """Read an object as it comes; one that breaks off is not resumed."""
        described = await self._layout.describe(name)
        files = () if described is None else described.files
        found = next((entry for entry in files if entry.path == file.path), None)
        if described is None or found is None:
            raise _not_found(name)
        if found.size != file.size:
            raise ManifestMismatch(f"{quoted(file.path)} is not what the manifest states.")
        if not file.size:
            # There is no range of no bytes.
            yield _nothing()
            return
        async with self._source.open(described, found, 0, file.size) as pieces:
            yield pieces

    async def delete(self, name: AdapterName) -> bool:
        """Leave a tombstone, then remove all else in the folder, the manifest first."""
        found = await self._layout.keys(name)
        if not found:
            return False
        if TOMBSTONE_FILE not in found:
            record = await self._layout.aliases(name.tenant, name.adapter)
            for alias, targets in record.aliases.items():
                if any(target.version == name.version for target in targets):
                    raise Conflict(
                        f"The alias {quoted(alias)} points at {name}: point it elsewhere."
                    )
            await self._client.put(self._layout.key(name, TOMBSTONE_FILE), b"{}")
        await self._remove_all(name)
        return True

    async def tenants(self) -> tuple[str, ...]:
        """The tenants that have a key here, in order."""
        return await self._layout.tenants()

    async def list(self, tenant: str) -> tuple[StoredVersion, ...]:
        """A tenant's versions, in order; the digest is None where no manifest states one."""
        AdapterName(tenant, "default", LATEST)
        turns = asyncio.Semaphore(_LISTED_AT_ONCE)

        async def stored(found: Found) -> StoredVersion | None:
            async with turns:
                return await self._stored(found)

        listed = await self._layout.listed(tenant)
        versions = await asyncio.gather(*(stored(found) for found in listed))
        return tuple(version for version in versions if version is not None)

    async def versions(self, tenant: str, adapter: str) -> tuple[str, ...]:
        """Read off the names of the objects: no manifest is read."""
        name = AdapterName(tenant, adapter, LATEST)
        found = await self._layout.versions(name.tenant, name.adapter)
        return tuple(version.name.version for version in found)

    async def aliases(self, tenant: str, adapter: str) -> Aliases:
        """What the adapter's ``_aliases.json`` holds now."""
        name = AdapterName(tenant, adapter, LATEST)
        return (await self._layout.aliases(name.tenant, name.adapter)).aliases

    async def set_alias(
        self, tenant: str, adapter: str, alias: str, targets: Sequence[AliasTarget]
    ) -> Aliases:
        """Change the adapter's ``_aliases.json``, anew each time another writer was first."""
        name, wanted = AdapterName(tenant, adapter, LATEST), tuple(targets)
        change_aliases({}, alias, wanted)
        await self._check_targets(name, alias, wanted)
        before, after = await self._change_aliases(name, alias, wanted)
        try:
            await self._check_targets(name, alias, wanted)
        except MuralError:
            # A version was published, or deleted, in between.
            await self._take_back(name, alias, wanted, before.get(alias, ()))
            raise
        return after

    async def close(self) -> None:
        """Close the connections and stop the threads."""
        if self._owns_downloader:
            await self._downloader.close()
        await self._client.close()

    # -- publishing -------------------------------------------------------------------------------

    async def _holds(self, name: AdapterName, manifest: Manifest) -> bool:
        """Whether the name has this very content; raise ``Conflict`` where it is taken else."""
        record, stated, deleted = await asyncio.gather(
            self._layout.aliases(name.tenant, name.adapter),
            self._layout.stated(name),
            self._layout.is_deleted(name),
        )
        if name.version == LATEST or name.version in record.aliases:
            raise _is_alias(name)
        if deleted:
            raise _was_deleted(name)
        if stated is not None and stated.digest != manifest.digest:
            raise _taken(name)
        return stated is not None

    async def _put_files(
        self, name: AdapterName, folder: Path, manifest: Manifest, progress: Progress
    ) -> None:
        for entry in sorted(manifest.files, key=lambda file: UPLOAD_ORDER.index(file.path)):
            upload = FileUpload(self._client, self._settings, folder / entry.path, entry, progress)
            await self._put_file(name, upload, entry, progress)

    async def _put_file(
        self, name: AdapterName, upload: FileUpload, entry: FileEntry, progress: Progress
    ) -> None:
        """Create the object, unless these very bytes are there already."""
        key, condition = self._layout.key(name, entry.path), Condition()
        for attempt in range(_ATTEMPTS):
            stat = await self._client.stat(key)
            if stat is None:
                condition = Condition()
            elif await self._is_same(stat, entry):
                progress(entry.size)
                return
            elif await self._is_given_up(name, stat):
                condition = Condition(stat.etag)
            else:
                raise _taken(name)
            with suppress(ObjectChanged):
                await upload.run(key, condition)
                return
            await self._wait(attempt)
        raise Conflict(f"Others are publishing {name} at the same time: try again.")

    async def _is_same(self, stat: ObjectStat, entry: FileEntry) -> bool:
        if stat.size != entry.size:
            return False
        sha256 = hashlib.sha256()
        if entry.size:
            async with self._client.stream(stat.key, 0, stat.size, stat.size, stat.etag) as pieces:
                async for piece in pieces:
                    sha256.update(piece)
        return sha256.hexdigest() == entry.sha256

    async def _is_given_up(self, name: AdapterName, stat: ObjectStat) -> bool:
        """Whether other content under a key was left by a publisher that cannot be at work.

        With weights, a folder is whole, and may be served by who accepts it without a manifest.
        """
        if stat.age_s is None or stat.age_s < 2 * self._settings.transfer_timeout_s:
            return False
        return not {WEIGHTS_FILE, BIN_WEIGHTS_FILE} & set(await self._layout.keys(name))

    async def _put_manifest(self, name: AdapterName, manifest: Manifest) -> bool:
        key = self._layout.key(name, MANIFEST_FILE)
        try:
            await self._client.put(key, manifest.to_json(), Condition())
        except ObjectChanged:
            if await self._holds(name, manifest):
                return False
            raise Conflict(f"Others are publishing {name} at the same time: try again.") from None
        record, deleted = await asyncio.gather(
            self._layout.aliases(name.tenant, name.adapter), self._layout.is_deleted(name)
        )
        if deleted:
            await self._remove_all(name)
            raise _was_deleted(name)
        if name.version in record.aliases:
            await self._client.delete(key)
            raise _is_alias(name)
        return True

    # -- aliases, listing, removing ---------------------------------------------------------------

    async def _change_aliases(
        self, name: AdapterName, alias: str, targets: tuple[AliasTarget, ...]
    ) -> tuple[Aliases, Aliases]:
        """Write the record until no other writer was in between; what held before, and after."""
        key = self._layout.adapter(name.tenant, name.adapter) + ALIASES_FILE
        for attempt in range(_ATTEMPTS):
            record = await self._layout.aliases(name.tenant, name.adapter)
            changed = change_aliases(record.aliases, alias, targets)
            if changed == record.aliases:
                return record.aliases, changed
            with suppress(ObjectChanged):
                await self._client.put(key, encode_aliases(changed), Condition(record.etag))
                return record.aliases, changed
            await self._wait(attempt)
        raise Conflict("Others are changing this adapter's aliases at the same time: try again.")

    async def _take_back(
        self,
        name: AdapterName,
        alias: str,
        mine: tuple[AliasTarget, ...],
        before: tuple[AliasTarget, ...],
    ) -> None:
        record = await self._layout.aliases(name.tenant, name.adapter)
        if record.aliases.get(alias, ()) == mine:
            await self._change_aliases(name, alias, before)

    async def _check_targets(
        self, name: AdapterName, alias: str, targets: Sequence[AliasTarget]
    ) -> None:
        if targets and await self._layout.keys(name.at(alias)):
            raise Conflict(f"{quoted(alias)} is the name of a version, not of an alias.")
        for target in targets:
            if await self._layout.describe(name.at(target.version)) is None:
                raise _not_found(name.at(target.version))

    async def _stored(self, found: Found) -> StoredVersion | None:
        if not found.published:
            return StoredVersion(found.name, None, found.num_bytes)
        key = (found.name, found.objects[MANIFEST_FILE].etag)
        manifest = self._manifests.get(key)
        if manifest is None:
            try:
                manifest = await self._layout.stated(found.name)
            except UnusableAdapter:
                # It is none: that hides none of the others.
                return None
            if manifest is None:
                return None
            self._manifests[key] = manifest
            while len(self._manifests) > _MAX_REMEMBERED:
                self._manifests.popitem(last=False)
        return StoredVersion(found.name, manifest.digest, manifest.num_bytes)

    async def _remove_all(self, name: AdapterName) -> None:
        found = await self._layout.keys(name)
        for file in sorted(found, key=lambda file: file != MANIFEST_FILE):
            if file != TOMBSTONE_FILE:
                await self._client.delete(self._layout.key(name, file))

    async def _wait(self, attempt: int) -> None:
        await self._sleep(self._random() * min(_MAX_WAIT_S, _FIRST_WAIT_S * 2.0**attempt))


async def _nothing() -> AsyncIterator[bytes]:
    pieces: tuple[bytes, ...] = ()
    for piece in pieces:
        yield piece


def _silent(num_bytes: int) -> None:
    return


def _is_empty_folder(folder: Path) -> bool:
    return folder.is_dir() and not os.listdir(folder)


def _check_record(record: str, data: bytes) -> None:
    if not record.startswith("_") or "/" in record or record == TOMBSTONE_FILE:
        raise InvalidInput(f"{quoted(record)} is not the name of a record.")
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidInput(f"A record has at most {MAX_RECORD_BYTES} bytes.")


def _taken(name: AdapterName) -> Conflict:
    return Conflict(f"{name} has other content; a version is immutable: use another version.")


def _was_deleted(name: AdapterName) -> Conflict:
    return Conflict(
        f"{name} was deleted, and a version's name is not used again: use another version."
    )


def _is_alias(name: AdapterName) -> Conflict:
    return Conflict(f"{quoted(name.version)} is the name of an alias, not of a version.")


def _not_found(name: AdapterName) -> AdapterNotFound:
    return AdapterNotFound(f"The adapter {name} does not exist.")
