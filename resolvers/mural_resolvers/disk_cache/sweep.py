"""One walk through the whole folder: count what is there, remove what should not be."""

from __future__ import annotations

import logging
import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mural_resolvers.disk_cache.content import Content
from mural_resolvers.disk_cache.layout import Layout, is_digest, remove_tree
from mural_resolvers.disk_cache.locks import FileLock
from mural_resolvers.disk_cache.name_records import NameRecords
from mural_resolvers.disk_cache.records import Usage, VersionRecord, read_record
from mural_resolvers.disk_cache.staging import reservations

__all__ = ["Findings", "sweep"]

logger = logging.getLogger("mural.cache")


@dataclass(slots=True)
class Findings:
    """What is there, the newest stamp among it, and how much of which kind should not be."""

    usage: Usage = field(default_factory=Usage)
    newest_ns: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def sweep(layout: Layout, content: Content, *, repair: bool) -> Findings:
    """Walk through the folder; where ``repair``, what should not be there is removed.

    Kinds of fault: ``unfinished``, ``broken version``, ``orphaned blob``, ``stray``. The caller
    holds the mutex if it repairs.
    """
    walk = _Walk(layout, content, repair)
    walk.staging()
    walk.versions()
    walk.blobs()
    walk.names()
    return walk.findings


class _Walk:
    def __init__(self, layout: Layout, content: Content, repair: bool) -> None:
        self._layout = layout
        self._content = content
        self._repair = repair
        self._inodes: dict[int, int] = {}
        self.findings = Findings()

    def staging(self) -> None:
        dead: list[Path] = []
        for _ in reservations(self._layout, dead):
            pass
        for path in dead:
            self._fault("unfinished", path)

    def versions(self) -> None:
        """Versions and their lock files, each of which goes where the other is missing."""
        whole: set[str] = set()
        for entry in _entries(self._layout.versions):
            if not is_digest(entry.name):
                self._fault("stray", Path(entry.path))
            elif (size := self._version(entry.name)) is None:
                self._broken(entry.name)
            else:
                whole.add(entry.name)
                self._owned(entry.name, size)
        for entry in _entries(self._layout.locks):
            if entry.name not in whole and entry.name != self._layout.mutex.name:
                self._lock_without_version(entry)

    def _version(self, digest: str) -> int | None:
        manifest = self._content.whole(digest, self._inodes)
        return None if manifest is None else manifest.num_bytes

    def _broken(self, digest: str) -> None:
        self.findings.faults["broken version"] += 1
        if self._repair:
            self._content.remove(digest)

    def _owned(self, digest: str, num_bytes: int) -> None:
        path = self._layout.lock(digest)
        record = read_record(path, VersionRecord)
        if record is None or record.num_bytes != num_bytes:
            record = VersionRecord("" if record is None else record.tenant, num_bytes)
            self.findings.faults["stray"] += 1
            if self._repair:
                if not path.is_file() or path.is_symlink():
                    remove_tree(path)
                self._content.note_owner(digest, record, 0)
        else:
            stamp_ns = path.stat().st_mtime_ns
            self.findings.newest_ns = max(self.findings.newest_ns, stamp_ns)
        self.findings.usage.add(record)

    def _lock_without_version(self, entry: os.DirEntry[str]) -> None:
        """Left by an eviction that did not end, or by a version that rotted under its lease."""
        path = Path(entry.path)
        if not (is_digest(entry.name) and entry.is_file(follow_symlinks=False)):
            self._fault("stray", path)
        elif (lock := FileLock.try_acquire(path)) is not None:
            self._fault("unfinished", path)
            lock.release()

    def blobs(self) -> None:
        for folder in _entries(self._layout.blobs):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                self._fault("stray", Path(folder.path))
                continue
            for entry in _entries(Path(folder.path)):
                self._blob(entry, folder.name)
        self.findings.usage.bytes = sum(self._inodes.values())

    def _blob(self, entry: os.DirEntry[str], prefix: str) -> None:
        found = entry.stat(follow_symlinks=False)
        ours = is_digest(entry.name) and entry.name.startswith(prefix)
        if not ours or not stat.S_ISREG(found.st_mode):
            self._fault("stray", Path(entry.path))
        elif found.st_nlink == 1:
            self._fault("orphaned blob", Path(entry.path))
        else:
            self._inodes[found.st_ino] = found.st_size

    def names(self) -> None:
        for found in NameRecords(self._layout).walk():
            if found.stray:
                self._fault("stray", found.path)
            else:
                self.findings.usage.names += 1

    def _fault(self, kind: str, path: Path) -> None:
        self.findings.faults[kind] += 1
        if self._repair:
            remove_tree(path)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
