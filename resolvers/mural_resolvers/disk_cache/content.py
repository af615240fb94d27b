"""Blobs and the versions that link to them. Whoever changes anything here holds the mutex."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from mural_resolvers.digest import ENGINE_FILES, FileEntry
from mural_resolvers.disk_cache.layout import (
    Layout,
    StrPath,
    is_digest,
    is_real_folder,
    read_small,
    remove_tree,
    write_file,
)
from mural_resolvers.disk_cache.records import VersionRecord, encode
from mural_resolvers.errors import UnusableAdapter
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import MANIFEST_FILE, Manifest

__all__ = ["Content"]


class Content:
    """The versions and blobs of a cache's folder."""

    def __init__(self, layout: Layout, limits: AdapterLimits) -> None:
        self._layout = layout
        self._limits = limits

    def manifest(self, digest: str) -> Manifest | None:
        """What a version consists of; None where there is no such version, or a broken one."""
        return self._read(self._layout.version(digest), digest) if self.has(digest) else None

    def has(self, digest: str) -> bool:
        """Whether a version's folder is there, whatever is in it."""
        return is_digest(digest) and is_real_folder(self._layout.version(digest))

    def _read(self, folder: StrPath, digest: str) -> Manifest | None:
        data = read_small(f"{os.fspath(folder)}/{MANIFEST_FILE}", self._limits.max_manifest_bytes)
        if data is None:
            return None
        try:
            manifest = Manifest.from_json(data)
        except UnusableAdapter:
            return None
        return manifest if manifest.digest == digest else None

    def whole(self, folder: str, digest: str, sizes: dict[int, int]) -> Manifest | None:
        """The manifest of a version's folder, if all of its files are there at their sizes.

        Their inodes and sizes are added to ``sizes``, by which links of one content count once.
        """
        manifest = self._read(folder, digest)
        if manifest is None:
            return None
        inodes: dict[int, int] = {}
        for file in manifest.files:
            try:
                found = os.lstat(f"{folder}/{file.path}")
            except FileNotFoundError:
                return None
            if not stat.S_ISREG(found.st_mode) or found.st_size != file.size:
                return None
            inodes[found.st_ino] = found.st_size
        sizes.update(inodes)
        return manifest

    def install(self, folder: Path, manifest: Manifest, tenant: str, stamp_ns: int) -> int:
        """Make a staged and synced folder the version; gives the bytes that its blobs added.

        The folder's rename is the instant at which the version is there. What was linked before
        is taken back when a step fails.
        """
        added: dict[Path, int] = {}
        try:
            for file in manifest.files:
                blob = self._layout.blob(file.sha256)
                if num_bytes := self._adopt(folder / file.path, blob, file):
                    added[blob] = num_bytes
            self.note_owner(manifest.digest, VersionRecord(tenant, manifest.num_bytes), stamp_ns)
            os.rename(folder, self._layout.version(manifest.digest))
        except OSError:
            for blob in added:
                with suppress(OSError):  # the first error tells more; a sweep finds the rest
                    blob.unlink()
            raise
        return sum(added.values())

    def _adopt(self, staged: Path, blob: Path, file: FileEntry) -> int:
        """Give one inode to the staged file and the blob; the bytes that the blob is new by."""
        blob.parent.mkdir(exist_ok=True)
        try:
            os.link(staged, blob)
            return file.size
        except FileExistsError:
            pass
        found = blob.lstat()
        if stat.S_ISREG(found.st_mode) and found.st_size == file.size:
            if self._replace(staged, blob):
                return 0
        elif stat.S_ISDIR(found.st_mode):
            remove_tree(blob)
        # A blob that is none, or that has as many links as a file may have: the staged one
        # takes its place. What else links to the old one keeps it, and its bytes count on.
        self._replace(blob, staged)
        return file.size

    def _replace(self, path: Path, by: Path) -> bool:
        """Put a further link to ``by`` in the place of ``path``; False where it has too many."""
        temporary = self._layout.staging / "link.tmp"
        temporary.unlink(missing_ok=True)
        try:
            os.link(by, temporary)
        except OSError as error:
            if error.errno == errno.EMLINK:
                return False
            raise
        try:
            os.replace(temporary, path)
        except OSError:
            temporary.unlink()
            raise
        return True

    def note_owner(self, digest: str, record: VersionRecord, stamp_ns: int) -> None:
        """Write a version's lock file in place: a lease of removed content may still hold it."""
        path = self._layout.lock(digest)
        write_file(path, encode(record), sync=False)
        os.utime(path, ns=(stamp_ns, stamp_ns))

    def remove(self, digest: str) -> int:
        """Remove a version and the blobs that only it had; gives the bytes that this freed."""
        grave = self._layout.staging / f"grave-{digest}"
        remove_tree(grave)
        try:
            os.rename(self._layout.version(digest), grave)
        except FileNotFoundError:
            return 0
        if is_real_folder(grave):
            manifest = self._read(grave, digest)
            hashes = {} if manifest is None else {f.path: f.sha256 for f in manifest.files}
            freed = sum(self._unlink(grave / path, hashes.get(path)) for path in ENGINE_FILES)
        else:
            freed = 0
        remove_tree(grave)
        return freed

    def _unlink(self, path: Path, sha256: str | None) -> int:
        """Remove a version's link, and the blob if that was the last; the bytes that this freed."""
        links = [path] if sha256 is None else [path, self._layout.blob(sha256)]
        freed = 0
        for link in links:
            try:
                found = link.lstat()
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(found.st_mode) or (link != path and found.st_nlink > 1):
                continue
            link.unlink()
            freed += found.st_size if found.st_nlink == 1 else 0
        return freed
