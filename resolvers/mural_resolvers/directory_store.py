"""A directory as the store that replicas share (``directory_layout`` says how it lies).

A version is prepared in ``ROOT/_staging`` and renamed into place with its manifest inside. What
decides by what lies in an adapter's folder (a name taken, an alias pointed) does so under the
``flock`` of ``tenant/adapter/_lock``, which the kernel gives up for a writer that dies. The root is
one file system, and one that has locks (NFS does).
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeVar

from mural_resolvers.digest import FileEntry, engine_files
from mural_resolvers.directory_layout import (
    DirectoryLayout,
    ListedAdapter,
    is_deleted,
    read_aliases,
    reading,
    version_names,
)
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
from mural_resolvers.files import contained, is_folder, open_regular, read_bounded
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.manifest import MANIFEST_FILE, Manifest, build_manifest, read_manifest
from mural_resolvers.names import LATEST, AdapterName
from mural_resolvers.scratch import ScratchFolder, sweep_scratch, try_lock
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

__all__ = ["DirectoryStore"]

_STAGING = "_staging"
_LOCK_FILE = "_lock"
_THREADS = 4
_CHUNK_BYTES = 1 << 20
_LOCK_POLL_S = 0.01
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_TAKEN = frozenset({errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR})

T = TypeVar("T")


class DirectoryStore(AdapterStore):
    """A directory that exists. Reads, hashes and writes in threads of its own.

    A folder that others put there without a manifest is a version too, as for the resolver.
    ``lock_timeout_s`` bounds the wait for another writer of the same adapter.
    """

    def __init__(
        self,
        root: Path,
        limits: AdapterLimits = DEFAULT_LIMITS,
        *,
        lock_timeout_s: float = 10.0,
    ) -> None:
        self._layout = DirectoryLayout(root)
        self._limits = limits
        self._lock_timeout_s = lock_timeout_s
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="adapter-store")

    @property
    def location(self) -> str:
        """The directory's path."""
        return str(self._layout.root)

    async def publish(
        self,
        name: AdapterName,
        folder: Path,
        manifest: Manifest,
        progress: Progress | None = None,
        *,
        records: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Copy the files while they are held to the manifest, then rename them into place."""
        records = dict(records or {})
        for record in records:
            _check_record(record)
        return await self._run(
            lambda job: self._publish(job, name, folder, manifest, records), progress
        )

    async def manifest(self, name: AdapterName) -> Manifest | None:
        """What ``manifest.json`` states; of a folder without one, what its bytes hash to."""
        return await self._run(lambda _: self._manifest(name))

    async def read_record(self, name: AdapterName, record: str) -> bytes | None:
        """A small file beside an exact version; None where it is not."""
        _check_record(record)
        return await self._run(lambda _: self._read_record(name, record))

    async def fetch(
        self, name: AdapterName, folder: Path, progress: Progress | None = None
    ) -> Manifest:
        """Copy an exact version's files into an empty local folder."""
        return await self._run(lambda job: self._fetch(job, name, folder), progress)

    @asynccontextmanager
    async def open(self, name: AdapterName, file: FileEntry) -> AsyncIterator[AsyncIterator[bytes]]:
        """Read a file in threads, a piece at a time."""
        path = await self._run(lambda _: self._path(name, file))
        yield self._pieces(path, file)

    async def delete(self, name: AdapterName) -> bool:
        """Leave a tombstone, then remove all else in the folder."""
        return await self._run(lambda _: self._delete(name))

    async def tenants(self) -> tuple[str, ...]:
        """The tenants that have a folder here, in order."""
        return await self._run(lambda _: self._tenants())

    async def list(self, tenant: str) -> tuple[StoredVersion, ...]:
        """A tenant's versions, in order; the digest is None where no manifest states one."""
        return await self._run(lambda _: self._list(tenant))

    async def aliases(self, tenant: str, adapter: str) -> Aliases:
        """What the adapter's ``_aliases.json`` holds."""
        name = AdapterName(tenant, adapter, LATEST)
        return await self._run(lambda _: self._aliases(name))

    async def set_alias(
        self, tenant: str, adapter: str, alias: str, targets: Sequence[AliasTarget]
    ) -> Aliases:
        """Change the adapter's ``_aliases.json`` under its lock."""
        name = AdapterName(tenant, adapter, LATEST)
        return await self._run(lambda _: self._set_alias(name, alias, tuple(targets)))

    async def close(self) -> None:
        """Stop the threads; a copy under way ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[_Job], T], progress: Progress | None = None) -> T:
        """Work in a thread, which a cancelled caller stops at its next piece."""
        loop = asyncio.get_running_loop()

        def advance(num_bytes: int) -> None:
            if progress is not None:
                loop.call_soon_threadsafe(progress, num_bytes)

        job = _Job(advance)
        try:
            return await loop.run_in_executor(self._threads, work, job)
        except asyncio.CancelledError:
            job.stop()
            raise

    # -- publishing -------------------------------------------------------------------------------

    def _publish(
        self,
        job: _Job,
        name: AdapterName,
        folder: Path,
        manifest: Manifest,
        records: Mapping[str, bytes],
    ) -> bool:
        with _writing():
            self._layout.check()
            if self._holds(name, manifest):
                return False
            with self._staged() as staged:
                for file in manifest.files:
                    _copy(job, folder / file.path, staged / file.path, file)
                for record, data in records.items():
                    _write(staged / record, data)
                _write(staged / MANIFEST_FILE, manifest.to_json())
                _sync_folder(staged)
                return self._put_in_place(name, manifest, staged)

    def _put_in_place(self, name: AdapterName, manifest: Manifest, staged: Path) -> bool:
        adapter = self._make_adapter_folder(name)
        with self._locked(adapter):
            if self._holds(name, manifest):
                return False
            try:
                os.rename(staged, adapter / name.version)
            except OSError as error:
                if error.errno in _TAKEN:
                    raise _taken(name) from None
                raise
            _sync_folder(adapter)
        return True

    def _holds(self, name: AdapterName, manifest: Manifest) -> bool:
        """Whether the name has this very content; raise ``Conflict`` where it is taken else."""
        adapter = self._layout.adapter_folder(name)
        aliases = {} if adapter is None else read_aliases(adapter)
        if name.version == LATEST or name.version in aliases:
            raise Conflict(f"{quoted(name.version)} is the name of an alias, not of a version.")
        if adapter is None or not os.path.lexists(adapter / name.version):
            return False
        path = contained(adapter / name.version, self._layout.tenant_folder(name.tenant))
        if is_deleted(path):
            raise Conflict(
                f"{name} was deleted, and a version's name is not used again: use another version."
            )
        if is_folder(path) and not os.listdir(path):
            return False
        try:
            found = self._manifest_in(path)
        except MuralError:
            raise _taken(name) from None
        if found.digest != manifest.digest:
            raise _taken(name)
        return True

    def _make_adapter_folder(self, name: AdapterName) -> Path:
        tenant = self._layout.tenant_folder(name.tenant)
        for folder in (tenant, tenant / name.adapter):
            with suppress(FileExistsError):
                folder.mkdir()
                _sync_folder(folder.parent)
        adapter = self._layout.adapter_folder(name)
        if adapter is None:
            raise Unavailable("The store's folder of this adapter is none.")
        return adapter

    # -- looking ----------------------------------------------------------------------------------

    def _folder(self, name: AdapterName) -> Path | None:
        """The real folder of an exact version that is published."""
        self._layout.check()
        adapter = self._layout.adapter_folder(name)
        if adapter is None or name.version not in version_names(adapter):
            return None
        path = contained(adapter / name.version, self._layout.tenant_folder(name.tenant))
        return None if is_deleted(path) else path

    def _manifest_in(self, path: Path) -> Manifest:
        return read_manifest(path, self._limits) or build_manifest(path, self._limits)

    def _manifest(self, name: AdapterName) -> Manifest | None:
        with reading():
            path = self._folder(name)
            return None if path is None else self._manifest_in(path)

    def _read_record(self, name: AdapterName, record: str) -> bytes | None:
        with reading():
            path = self._folder(name)
            if path is None or not os.path.lexists(path / record):
                return None
            return read_bounded(contained(path / record, path), MAX_RECORD_BYTES)

    def _tenants(self) -> tuple[str, ...]:
        self._layout.check()
        return self._layout.tenants()

    def _list(self, tenant: str) -> tuple[StoredVersion, ...]:
        self._layout.check()
        found = (self._stored(listed) for listed in self._layout.find_all(tenant))
        return tuple(version for version in found if version is not None)

    def _stored(self, listed: ListedAdapter) -> StoredVersion | None:
        with reading():
            path = contained(listed.path, self._layout.tenant_folder(listed.name.tenant))
            try:
                manifest = read_manifest(path, self._limits)
                if manifest is not None:
                    return StoredVersion(listed.name, manifest.digest, manifest.num_bytes)
                names = engine_files(path, self._limits)
                return StoredVersion(listed.name, None, sum(_size(path / file) for file in names))
            except (FileNotFoundError, MuralError):
                # It is none, or is being deleted: that hides none of the others.
                return None

    def _fetch(self, job: _Job, name: AdapterName, folder: Path) -> Manifest:
        with reading():
            if not folder.is_dir() or os.listdir(folder):
                raise InvalidInput("An adapter is fetched into an empty folder.")
            path = self._folder(name)
            if path is None:
                raise _not_found(name)
            try:
                manifest = self._manifest_in(path)
                self._fetch_files(job, path, manifest, folder)
            except UnusableAdapter:
                if is_deleted(path):
                    raise _not_found(name) from None
                raise
        return manifest

    def _fetch_files(self, job: _Job, path: Path, manifest: Manifest, folder: Path) -> None:
        targets = [folder / file.path for file in manifest.files]
        with _writing(), _removed_on_failure(targets):
            for file, target in zip(manifest.files, targets, strict=True):
                _copy(job, contained(path / file.path, path), target, file)
            _sync_folder(folder)

    def _path(self, name: AdapterName, file: FileEntry) -> Path:
        with reading():
            folder = self._folder(name)
            if folder is None or not os.path.lexists(folder / file.path):
                raise _not_found(name)
            path = contained(folder / file.path, folder)
            if path.stat().st_size != file.size:
                raise _mismatch(file)
            return path

    async def _pieces(self, path: Path, file: FileEntry) -> AsyncIterator[bytes]:
        # Opened anew for each piece: a reader that goes away leaves no descriptor behind.
        for start in range(0, file.size, _CHUNK_BYTES):
            size = min(_CHUNK_BYTES, file.size - start)
            piece = await self._run(partial(_read_at, path, start, size))
            if len(piece) != size:
                raise _mismatch(file)
            yield piece

    # -- deleting, and aliases --------------------------------------------------------------------

    def _delete(self, name: AdapterName) -> bool:
        with _writing():
            self._layout.check()
            adapter = self._layout.adapter_folder(name)
            if adapter is None:
                return False
            with self._locked(adapter):
                path = adapter / name.version
                if name.version not in version_names(adapter):
                    return False
                if path.is_symlink():
                    # What it leads to may have other names.
                    raise Conflict(f"The folder of {name} is a link: remove it by hand.")
                self._bury(name, adapter, path)
            for entry in os.scandir(path):
                if entry.name != TOMBSTONE_FILE:
                    _remove(Path(entry.path))
            return True

    def _bury(self, name: AdapterName, adapter: Path, path: Path) -> None:
        if is_deleted(path):
            return
        for alias, targets in read_aliases(adapter).items():
            if any(target.version == name.version for target in targets):
                raise Conflict(f"The alias {quoted(alias)} points at {name}: point it elsewhere.")
        _replace(path / TOMBSTONE_FILE, b"{}")
        # Hidden by the tombstone already, and then no whole version for a copy that looks anew.
        with suppress(FileNotFoundError):
            (path / MANIFEST_FILE).unlink()

    def _aliases(self, name: AdapterName) -> Aliases:
        with reading():
            self._layout.check()
            adapter = self._layout.adapter_folder(name)
            return {} if adapter is None else read_aliases(adapter)

    def _set_alias(
        self, name: AdapterName, alias: str, targets: tuple[AliasTarget, ...]
    ) -> Aliases:
        with _writing():
            self._layout.check()
            adapter = self._layout.adapter_folder(name)
            if adapter is None:
                change_aliases({}, alias, targets)
                if targets:
                    raise AdapterNotFound(
                        f"The adapter {name.at(targets[0].version)} does not exist."
                    )
                return {}
            with self._locked(adapter):
                changed = change_aliases(read_aliases(adapter), alias, targets)
                self._check_targets(name, adapter, alias, targets)
                _replace(adapter / ALIASES_FILE, encode_aliases(changed))
            return changed

    def _check_targets(
        self, name: AdapterName, adapter: Path, alias: str, targets: Sequence[AliasTarget]
    ) -> None:
        versions = version_names(adapter)
        if targets and alias in versions:
            raise Conflict(f"{quoted(alias)} is the name of a version, not of an alias.")
        for target in targets:
            if target.version not in versions or is_deleted(adapter / target.version):
                raise _not_found(name.at(target.version))

    # -- locks and places -------------------------------------------------------------------------

    @contextmanager
    def _locked(self, adapter: Path) -> Iterator[None]:
        """Be the only writer of an adapter's folder."""
        lock = os.open(adapter / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            deadline = time.monotonic() + self._lock_timeout_s
            while not try_lock(lock):
                if time.monotonic() >= deadline:
                    raise Unavailable("Another writer is busy with this adapter.")
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(lock)

    @contextmanager
    def _staged(self) -> Iterator[Path]:
        """A folder of our own, gone in the end unless it was renamed."""
        staging = self._layout.root / _STAGING
        staging.mkdir(exist_ok=True)
        sweep_scratch(staging)
        scratch = ScratchFolder(staging)
        try:
            yield scratch.path
        finally:
            scratch.close()


class _Job:
    """Work that can be told to stop, and tells how far it is."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self._advance = advance
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()

    def advance(self, num_bytes: int) -> None:
        """Tell of further bytes; raise where nobody wants any more."""
        if self._stopped.is_set():
            raise Unavailable("The copy was given up.")
        self._advance(num_bytes)


@contextmanager
def _writing() -> Iterator[None]:
    """Turn what the file system refuses into a store that is down."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable("The store is full.", retry_after_s=60.0) from error
        # strerror alone: the path is not the user's to know.
        raise Unavailable(f"The store cannot be written: {error.strerror}.") from error


@contextmanager
def _removed_on_failure(paths: Sequence[Path]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for path in paths:
            path.unlink(missing_ok=True)
        raise


def _copy(job: _Job, source: Path, target: Path, entry: FileEntry) -> None:
    """Copy a file that is what its entry says; raise ``ManifestMismatch`` where it is not."""
    # What is proven by its sha256 may be linked from anywhere (a hub's cache is).
    with open_regular(Path(os.path.realpath(source))) as reader, target.open("xb") as writer:
        sha256 = hashlib.sha256()
        size = 0
        while chunk := _next_chunk(reader, entry.size - size):
            sha256.update(chunk)
            size += len(chunk)
            writer.write(chunk)
            job.advance(len(chunk))
        if size != entry.size or sha256.hexdigest() != entry.sha256:
            raise _mismatch(entry)
        writer.flush()
        os.fsync(writer.fileno())


def _read_at(path: Path, start: int, size: int, _: _Job) -> bytes:
    with reading(), open_regular(path) as reader:
        reader.seek(start)
        return reader.read(size)


def _mismatch(entry: FileEntry) -> ManifestMismatch:
    return ManifestMismatch(f"{quoted(entry.path)} is not what the manifest states.")


def _next_chunk(reader: BinaryIO, left: int) -> bytes:
    # One byte more than there should be is enough to tell.
    return reader.read(min(_CHUNK_BYTES, left + 1))


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; the caller holds the lock."""
    new = path.with_name(f"_new-{secrets.token_hex(8)}")
    try:
        _write(new, data)
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove what a version's folder holds, without following links."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _size(path: Path) -> int:
    return path.stat().st_size


def _check_record(record: str) -> None:
    if not record.startswith("_") or "/" in record or record == TOMBSTONE_FILE:
        raise InvalidInput(f"{quoted(record)} is not the name of a record.")


def _taken(name: AdapterName) -> Conflict:
    return Conflict(f"{name} has other content; a version is immutable: use another version.")


def _not_found(name: AdapterName) -> AdapterNotFound:
    return AdapterNotFound(f"The adapter {name} does not exist.")
