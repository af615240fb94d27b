"""One walk through the whole folder: count what is there, remove what should not be."""

from __future__ import annotations

import os
import stat
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from mural_resolvers.disk_cache.content import Content
from mural_resolvers.disk_cache.layout import Layout, StrPath, is_digest, remove_tree
from mural_resolvers.disk_cache.locks import FileLock
from mural_resolvers.disk_cache.name_records import NameRecords
from mural_resolvers.disk_cache.records import Usage, VersionRecord, read_record
from mural_resolvers.disk_cache.staging import reservations
from mural_resolvers.manifest import Manifest

__all__ = ["Findings", "sweep"]


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
        sizes: dict[str, int] = {}
        for entry in _entries(self._layout.versions):
            if not is_digest(entry.name):
                self._fault("stray", entry.path)
                continue
            manifest = self._whole(entry)
            if manifest is not None:
                sizes[entry.name] = manifest.num_bytes
        for entry in _entries(self._layout.locks):
            if entry.name in sizes:
                self._owned(entry, sizes.pop(entry.name))
            elif entry.path != str(self._layout.mutex):
                self._lock_without_version(entry)
        for digest, num_bytes in sizes.items():
            self._version_without_lock(digest, VersionRecord("", num_bytes))

    def _whole(self, entry: os.DirEntry[str]) -> Manifest | None:
        manifest = None
        if entry.is_dir(follow_symlinks=False):
            manifest = self._content.whole(entry.path, entry.name, self._inodes)
        if manifest is None:
            self.findings.faults["broken version"] += 1
            if self._repair:
                self._content.remove(entry.name)
        return manifest

    def _owned(self, entry: os.DirEntry[str], num_bytes: int) -> None:
        record = read_record(entry.path, VersionRecord)
        if record is None or record.num_bytes != num_bytes:
            self._version_without_lock(entry.name, VersionRecord("", num_bytes))
            return
        self.findings.usage.add(record)
        stamp_ns = entry.stat(follow_symlinks=False).st_mtime_ns
        self.findings.newest_ns = max(self.findings.newest_ns, stamp_ns)

    def _version_without_lock(self, digest: str, record: VersionRecord) -> None:
        """It is nobody's then, and was leased before all others."""
        path = self._layout.lock(digest)
        self._fault("stray", path, gone=not (path.is_file() and not path.is_symlink()))
        if self._repair:
            self._content.note_owner(digest, record, 0)
        self.findings.usage.add(record)

    def _lock_without_version(self, entry: os.DirEntry[str]) -> None:
        """Left by an eviction that did not end, or by a version that rotted under its lease."""
        if not (is_digest(entry.name) and entry.is_file(follow_symlinks=False)):
            self._fault("stray", entry.path)
        elif (lock := FileLock.try_acquire(entry.path)) is not None:
            self._fault("unfinished", entry.path)
            lock.release()

    def blobs(self) -> None:
        for folder in _entries(self._layout.blobs):
            if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                self._fault("stray", folder.path)
                continue
            for entry in _entries(folder.path):
                self._blob(entry, folder.name)
        self.findings.usage.bytes = sum(self._inodes.values())

    def _blob(self, entry: os.DirEntry[str], prefix: str) -> None:
        found = entry.stat(follow_symlinks=False)
        ours = is_digest(entry.name) and entry.name.startswith(prefix)
        if not ours or not stat.S_ISREG(found.st_mode):
            self._fault("stray", entry.path)
        elif found.st_nlink == 1:
            self._fault("orphaned blob", entry.path)
        else:
            self._inodes[found.st_ino] = found.st_size

    def names(self) -> None:
        for found in NameRecords(self._layout).walk():
            if found.stray:
                self._fault("stray", found.path)
            else:
                self.findings.usage.names += 1

    def _fault(self, kind: str, path: StrPath, *, gone: bool = True) -> None:
        self.findings.faults[kind] += 1
        if self._repair and gone:
            remove_tree(path)


def _entries(folder: StrPath) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
