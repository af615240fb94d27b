"""Where things lie in the cache's folder, and the few ways in which they are written.

::

    CACHEDIR.TAG            says that the folder is a cache, and whose
    usage.json              what is in it; absent while that changes, or when nobody knows
    blobs/ab/SHA256         content
    versions/DIGEST/        hard links to blobs, and manifest.json
    locks/DIGEST            whose version it is; locked by its leases; its mtime is the last one
    locks/mutex             held by whoever changes anything
    names/tenant/adapter/version
    staging/…/              what living processes bring; locked by them
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mural_resolvers.errors import InvalidInput, Unavailable
from mural_resolvers.files import leads_nowhere
from mural_resolvers.names import AdapterName

__all__ = [
    "Layout",
    "StrPath",
    "disk_faults",
    "is_digest",
    "is_real_folder",
    "read_small",
    "remove_tree",
    "sync_folder",
    "write_atomically",
    "write_file",
]

StrPath = str | os.PathLike[str]

_TAG = "CACHEDIR.TAG"
# https://bford.info/cachedir/: back-ups leave such a folder out.
_TAG_TEXT = b"Signature: 8a477f597d28d172789f06886806bc55\n# A cache of adapters (Mural), form 1.\n"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_WRITABLE = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_digest(text: str) -> bool:
    """Whether the text is a sha256 in hex, and so no path that leads anywhere else."""
    return _DIGEST.fullmatch(text) is not None


class Layout:
    """The paths of a cache's folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.abspath(root))
        self.blobs = self.root / "blobs"
        self.versions = self.root / "versions"
        self.locks = self.root / "locks"
        self.names = self.root / "names"
        self.staging = self.root / "staging"
        self.mutex = self.locks / "mutex"
        self.usage = self.root / "usage.json"
        # One name each: whoever writes holds the mutex.
        self.temporary = self.staging / "record.tmp"

    @property
    def folders(self) -> tuple[Path, ...]:
        """The folders that are always there."""
        return (self.blobs, self.versions, self.locks, self.names, self.staging)

    def blob(self, sha256: str) -> Path:
        """The content with this hash."""
        return self.blobs / sha256[:2] / sha256

    def version(self, digest: str) -> Path:
        """A version's folder."""
        return self.versions / digest

    def lock(self, digest: str) -> Path:
        """A version's lock, record and stamp."""
        return self.locks / digest

    def name(self, name: AdapterName) -> Path:
        """A name's record."""
        return self.names / name.tenant / name.adapter / name.version

    def create(self) -> bool:
        """Make what is missing; False where the disk is read-only and everything is there.

        Raises ``InvalidInput`` where the folder cannot be a cache.
        """
        try:
            self._create()
        except OSError as error:
            if error.errno in _NOT_WRITABLE and self._is_whole():
                return False
            raise InvalidInput(
                f"The cache's folder cannot be used: {error.strerror or 'refused'}."
            ) from error
        return True

    def restore(self) -> None:
        """Make again what somebody removed of a cache in use, all of it at the worst.

        Raises ``OSError``, and ``Unavailable`` where something else has taken its place.
        """
        if all(is_real_folder(folder) for folder in self.folders):
            return
        try:
            self._create()
        except InvalidInput as error:
            raise Unavailable(error.message, retry_after_s=10.0) from error
        # Of what is noted, who knows what is left.
        self.usage.unlink(missing_ok=True)

    def _create(self) -> None:
        # What tenants brought is no other user's to read.
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Looked at before the tag is, which another process that starts writes first of all.
        filled = any(os.path.lexists(folder) for folder in self.folders)
        tag = self.root / _TAG
        if not os.path.lexists(tag):
            # What is removed at a start must be the cache's own, whatever folder was named.
            if filled:
                raise InvalidInput("The cache's folder holds other things: give it one of its own.")
            write_atomically(tag, _TAG_TEXT, self.root / f".{_TAG}-{os.getpid()}")
        self._check_tag()
        for folder in self.folders:
            folder.mkdir(exist_ok=True)
            if not is_real_folder(folder):
                raise InvalidInput("The cache's folder has a link in place of one of its folders.")
        # The folders may all be there: this one tells whether the disk can be written to.
        os.close(os.open(self.mutex, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644))

    def _is_whole(self) -> bool:
        if not all(is_real_folder(folder) for folder in self.folders):
            return False
        self._check_tag()
        return True

    def _check_tag(self) -> None:
        if read_small(self.root / _TAG, 4096) != _TAG_TEXT:
            raise InvalidInput("The cache's folder is another program's, or another version's.")


@contextmanager
def disk_faults() -> Iterator[None]:
    """Turn what the disk refuses into ``Unavailable``, whose message says why and holds no path."""
    try:
        yield
    except OSError as error:
        raise _unavailable(error) from error


def _unavailable(error: OSError) -> Unavailable:
    if error.errno in _FULL:
        return Unavailable("The disk of the cache of adapters is full.", retry_after_s=10.0)
    if error.errno == errno.EROFS:
        return Unavailable("The cache of adapters is read-only.", retry_after_s=60.0)
    return Unavailable(
        f"The cache of adapters cannot be used: {error.strerror or 'it failed'}.",
        retry_after_s=10.0,
    )


def is_real_folder(path: StrPath) -> bool:
    """Whether a folder is there, and no link to one."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError as error:
        if leads_nowhere(error):
            return False
        raise


def read_small(path: StrPath, max_bytes: int) -> bytes | None:
    """A small regular file's bytes; None where there is none, or something else, or more."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if leads_nowhere(error):
            return None
        raise
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > max_bytes:
            return None
        return os.read(descriptor, found.st_size)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file, and have it on the disk where ``sync``."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    try:
        while data:
            data = data[os.write(descriptor, data) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes, temporary: Path, *, sync: bool = True) -> None:
    """Put a file in its place whole; the temporary goes if that fails."""
    try:
        write_file(temporary, data, sync=sync)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: StrPath) -> None:
    """Remove whatever is there; follows no link, and what another removes meanwhile is gone."""
    try:
        is_folder = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    with suppress(FileNotFoundError):
        if not is_folder:
            os.unlink(path)
            return
        with os.scandir(path) as entries:
            paths = [entry.path for entry in entries]
        for inner in paths:
            remove_tree(inner)
        os.rmdir(path)
