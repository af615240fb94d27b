"""Files that are no longer what was written, and the versions that have them."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Collection
from pathlib import Path

from mural_resolvers.digest import FileEntry
from mural_resolvers.disk_cache.content import Content
from mural_resolvers.disk_cache.layout import Layout
from mural_resolvers.files import leads_nowhere
from mural_resolvers.manifest import Manifest

__all__ = ["drop_rotten", "rotten_files"]

_CHUNK_BYTES = 1 << 20


def rotten_files(folder: Path, manifest: Manifest) -> tuple[FileEntry, ...]:
    """The manifest's files that are not as it says, or that the disk no longer reads."""
    return tuple(file for file in manifest.files if not _is_sound(folder / file.path, file))


def _is_sound(path: Path, file: FileEntry) -> bool:
    sha256 = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as opened:
            if os.fstat(descriptor).st_size != file.size:
                return False
            while chunk := opened.read(_CHUNK_BYTES):
                sha256.update(chunk)
    except OSError as error:
        if leads_nowhere(error) or error.errno in (errno.EIO, errno.EISDIR):
            return False
        raise
    return sha256.hexdigest() == file.sha256


def drop_rotten(
    layout: Layout, content: Content, digest: str, rotten: Collection[FileEntry]
) -> None:
    """Remove a version, and every other one that has one of its rotten files.

    The caller holds the mutex, and counts anew. Blobs go with the last version that has them.
    """
    bad = {file.sha256 for file in rotten}
    content.remove(digest)
    if not any(os.path.lexists(layout.blob(sha256)) for sha256 in bad):
        return
    for other in os.listdir(layout.versions):
        manifest = content.manifest(other)
        if manifest is not None and any(file.sha256 in bad for file in manifest.files):
            content.remove(other)
    for sha256 in bad:
        layout.blob(sha256).unlink(missing_ok=True)
