"""Whether a file system has what the cache stands on."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress

from mural_resolvers.disk_cache.layout import Layout
from mural_resolvers.disk_cache.locks import FileLock
from mural_resolvers.errors import InvalidInput

__all__ = ["probe"]

# A full disk is no reason against a start: what is cached is served, and eviction makes room.
_TELLS_NOTHING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMLINK})


def probe(layout: Layout) -> None:
    """Raise ``InvalidInput`` where there are no hard links or no locks.

    Copies in place of links are no way out: the links of a blob are how it is known which
    versions have it, through any crash.
    """
    link = layout.staging / f"probe-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        os.link(layout.mutex, link)
    except OSError as error:
        if error.errno not in _TELLS_NOTHING:
            raise InvalidInput(
                "The cache's folder is on a file system without hard links, which it needs."
            ) from error
    else:
        with suppress(FileNotFoundError):  # another process, which starts too, swept it
            link.unlink()
    try:
        lock = FileLock.try_acquire(layout.mutex, shared=True)
    except OSError as error:
        raise InvalidInput(
            f"The cache's folder is on a file system without locks: {error.strerror}."
        ) from error
    if lock is not None:
        lock.release()
