"""Content on its way into the cache: a folder, the bytes reserved for it, and who brings it."""

from __future__ import annotations

import logging
import os
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mural_resolvers.digest import FileEntry
from mural_resolvers.disk_cache.interface import CachedVersion
from mural_resolvers.disk_cache.layout import (
    Layout,
    disk_faults,
    is_real_folder,
    remove_tree,
    sync_folder,
    write_file,
)
from mural_resolvers.disk_cache.locks import FileLock
from mural_resolvers.disk_cache.records import Reservation, encode, read_record
from mural_resolvers.errors import ManifestMismatch, TooLarge, Unavailable
from mural_resolvers.files import leads_nowhere, open_regular, start_writeback
from mural_resolvers.manifest import MANIFEST_FILE, Manifest
from mural_resolvers.names import AdapterName

__all__ = ["LiveReservation", "Staged", "Staging", "reservations", "reserve"]

logger = logging.getLogger("mural.cache")

_RESERVATION = "reservation.json"
_CONTENT = "content"


@dataclass(frozen=True, slots=True)
class Staged:
    """What is to become a version under a name; the reservation's file goes when it is one."""

    folder: Path
    reservation: Path
    manifest: Manifest
    name: AdapterName
    source: str
    revision: str
    tenant: str


class Staging:
    """A folder to write an adapter's files into, and to commit or to discard.

    Its bytes are reserved, for all processes to see, until then. Thread-safe: what discards while
    another commits waits for it.
    """

    def __init__(
        self,
        path: Path,
        reservation: Reservation,
        lock: FileLock,
        install: Callable[[Staged], CachedVersion],
    ) -> None:
        self.folder = path / _CONTENT
        self._path = path
        self._reservation = reservation
        self._lock = lock
        self._install = install
        self._turn = threading.Lock()
        self._open = True

    @property
    def staged(self) -> bool:
        """Whether anything is left to be committed or discarded."""
        return self._open

    def commit(
        self, manifest: Manifest, name: AdapterName, source: str, revision: str
    ) -> CachedVersion:
        """Make the folder's files the version that the manifest states, whole or not at all.

        The files' hashes are the caller's to have checked; their sizes are held to the manifest.
        Whatever the outcome, nothing is staged afterwards. Raises ``Conflict`` when the name has
        had other content, ``ManifestMismatch``, ``UnusableAdapter``, ``TooLarge`` when there is
        more than was reserved, ``Unavailable``.
        """
        with self._turn:
            if not self._open:
                raise Unavailable("The adapter's files are no longer staged.")
            try:
                if manifest.num_bytes > self._reservation.num_bytes:
                    raise TooLarge("The adapter's files are larger than their source said.")
                with disk_faults():
                    self._sync(manifest)
                return self._install(self._staged(manifest, name, source, revision))
            finally:
                self._close()

    def discard(self) -> None:
        """Remove what was staged and give its bytes back; idempotent."""
        with self._turn:
            self._close()

    def _staged(self, manifest: Manifest, name: AdapterName, source: str, revision: str) -> Staged:
        return Staged(
            folder=self.folder,
            reservation=self._path / _RESERVATION,
            manifest=manifest,
            name=name,
            source=source,
            revision=revision,
            tenant=self._reservation.tenant,
        )

    def _sync(self, manifest: Manifest) -> None:
        """Have the files on the disk, of the right sizes, and nothing beside them."""
        expected = {file.path for file in manifest.files}
        with os.scandir(self.folder) as entries:
            strangers = [entry.name for entry in entries if entry.name not in expected]
        for stranger in strangers:
            remove_tree(self.folder / stranger)
        write_file(self.folder / MANIFEST_FILE, manifest.to_json(), sync=False)
        with ExitStack() as held:
            files = [
                held.enter_context(_checked(self.folder / file.path, file))
                for file in manifest.files
            ]
            files.append(held.enter_context(open_regular(self.folder / MANIFEST_FILE)))
            # All of them before the first fsync: a journal that it commits has the others, too.
            for opened in files:
                start_writeback(opened.fileno())
            for opened in files:
                os.fsync(opened.fileno())
        sync_folder(self.folder)

    def _close(self) -> None:
        if not self._open:
            return
        self._open = False
        try:
            remove_tree(self._path)
        except OSError as error:
            # Unlocked, it is anybody's to sweep: the next who stages, or starts.
            logger.warning("what was staged could not be removed: %s", error.strerror)
        finally:
            self._lock.release()


@contextmanager
def _checked(path: Path, file: FileEntry) -> Iterator[BinaryIO]:
    """Open a staged file, of the right size and from now on read-only."""
    with open_regular(path) as opened:
        found = os.fstat(opened.fileno())
        # A second link would let whoever has it change the cache's content.
        if found.st_size != file.size or found.st_nlink != 1:
            raise ManifestMismatch(f"{file.path} is not the file that {MANIFEST_FILE} states.")
        os.fchmod(opened.fileno(), stat.S_IRUSR | stat.S_IRGRP | stat.S_IROTH)
        yield opened


@dataclass(frozen=True, slots=True)
class LiveReservation:
    """What a living process may still add; ``unwritten`` bytes of it are not on the disk yet."""

    tenant: str
    num_bytes: int
    unwritten: int


def reserve(
    layout: Layout, reservation: Reservation, install: Callable[[Staged], CachedVersion]
) -> Staging:
    """Make a staging folder; the caller holds the mutex. Raises ``OSError``, and leaves nothing."""
    path = layout.staging / f"{os.getpid()}-{secrets.token_hex(8)}"
    lock = None
    try:
        path.mkdir()
        lock = FileLock.try_acquire(path / _RESERVATION, create=True)
        assert lock is not None  # nobody else knows its name
        os.write(lock.descriptor, encode(reservation))
        (path / _CONTENT).mkdir()
    except BaseException:
        remove_tree(path)
        if lock is not None:
            lock.release()
        raise
    return Staging(path, reservation, lock, install)


def reservations(layout: Layout, dead: list[Path]) -> Iterator[LiveReservation]:
    """Reservations of living processes; what lies there of dead ones is appended to ``dead``.

    The caller holds the mutex: without it a process may be between making its folder and
    locking it.
    """
    with os.scandir(layout.staging) as entries:
        paths = [Path(entry.path) for entry in entries]
    for path in paths:
        if not _is_alive(path):
            dead.append(path)
            continue
        reservation = read_record(path / _RESERVATION, Reservation)
        if reservation is not None:
            written = _size(path / _CONTENT)
            unwritten = max(0, reservation.num_bytes - written)
            yield LiveReservation(reservation.tenant, reservation.num_bytes, unwritten)


def _is_alive(path: Path) -> bool:
    if not is_real_folder(path):
        return False
    try:
        lock = FileLock.try_acquire(path / _RESERVATION, shared=True)
    except OSError as error:
        if leads_nowhere(error):
            return False
        raise
    if lock is None:
        return True
    lock.release()
    return False


def _size(folder: Path) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except FileNotFoundError:
        return 0
