"""Opening files that may not be what they should be, and those of a folder that somebody else may
have filled."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mural_resolvers.errors import TooLarge, UnusableAdapter, quoted

__all__ = [
    "contained",
    "is_folder",
    "leads_nowhere",
    "open_regular",
    "read_bounded",
    "read_settings",
    "start_writeback",
]

_SYNC_FILE_RANGE_WRITE = 2

# What a link, or a name, of somebody's own making can cause; a disk that fails gives others.
_LEADS_NOWHERE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
)


def leads_nowhere(error: OSError) -> bool:
    """Whether the path itself is at fault, rather than the disk that it is on."""
    return error.errno in _LEADS_NOWHERE


def is_folder(path: Path) -> bool:
    """Tell whether a folder is there; raise ``OSError`` only where the disk cannot tell."""
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError as error:
        if leads_nowhere(error):
            return False
        raise


def contained(path: Path, within: Path) -> Path:
    """Give the real path of ``path``; raise ``UnusableAdapter`` if it leads out of ``within``.

    Symbolic links are followed on both sides, so that a link is judged by where it ends.
    """
    real, real_within = Path(os.path.realpath(path)), Path(os.path.realpath(within))
    if not real.is_relative_to(real_within):
        raise UnusableAdapter(f"{quoted(path.name)} leads out of its folder.")
    return real


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raise ``UnusableAdapter`` for anything else.

    Never waits (a FIFO without a writer) and does not follow a link in the last place, so the
    caller passes a path that ``contained`` has resolved.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnusableAdapter(
            f"{quoted(path.name)} cannot be read: {error.strerror or 'refused'}."
        ) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnusableAdapter(f"{quoted(path.name)} is not a regular file.")
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file; raise ``TooLarge`` above ``max_bytes``, ``UnusableAdapter``."""
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise TooLarge(f"{quoted(path.name)} is larger than {max_bytes} bytes.")
    return data


def read_settings(path: Path, max_bytes: int) -> bytes:
    """Read the beginning of a file that was named by whoever started this process.

    Links are followed: so mounted ConfigMaps and Secrets are swapped. Never waits: what lies there
    now may be a FIFO. Raises ``OSError`` for whatever is no regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    with os.fdopen(descriptor, "rb") as file:
        return file.read(max_bytes)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    try:
        found = ctypes.CDLL(None).sync_file_range
    except (AttributeError, OSError):  # not Linux
        return None
    found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_sync_file_range = _find_sync_file_range()


def start_writeback(descriptor: int, offset: int = 0, length: int = 0) -> None:
    """Have the kernel begin to write (0: to the end), so that an fsync has less to wait for.

    A hint alone: what it cannot do, the fsync does, and tells.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, offset, length, _SYNC_FILE_RANGE_WRITE)
