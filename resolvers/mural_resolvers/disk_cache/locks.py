"""Locks that the kernel releases when their process dies, however it dies."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mural_resolvers.disk_cache.layout import StrPath
from mural_resolvers.errors import Unavailable

__all__ = ["FileLock", "Mutex"]

_HELD = frozenset({errno.EAGAIN, errno.EACCES})
_FIRST_WAIT_S = 0.0005
_LONGEST_WAIT_S = 0.02


class FileLock:
    """A lock on a file, held until ``release`` or until nobody refers to it any more.

    Each one has a descriptor of its own, so that it counts between the threads of one process
    as it does between processes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def try_acquire(
        cls, path: StrPath, *, shared: bool = False, create: bool = False
    ) -> FileLock | None:
        """Take the lock, or give None where another holds it; raises ``OSError``."""
        # A file that is only locked is opened for reading: a read-only disk has leases too.
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(path, flags, 0o644)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _HELD:
                return None
            raise
        return cls(descriptor)

    @property
    def descriptor(self) -> int:
        """The locked file; raises ``ValueError`` once released."""
        if self._descriptor is None:
            raise ValueError("the lock has been released")
        return self._descriptor

    def is_at(self, path: Path) -> bool:
        """Whether the locked file still has this path: a lock on a removed file locks nothing."""
        try:
            there = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        mine = os.fstat(self.descriptor)
        return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)

    def release(self) -> None:
        """Let go; idempotent."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            try:
                # Not only closed: a forked child that inherited it must not hold it on.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            finally:
                os.close(descriptor)

    def __del__(self) -> None:
        self.release()


class Mutex:
    """One holder among all threads of all processes; waits a bounded time."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._threads = threading.Lock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold it; raises ``Unavailable`` at the timeout and ``OSError``."""
        deadline = time.monotonic() + self._timeout_s
        if not self._threads.acquire(timeout=self._timeout_s):
            raise self._busy()
        try:
            lock = self._wait(deadline)
            try:
                yield
            finally:
                lock.release()
        finally:
            self._threads.release()

    def _wait(self, deadline: float) -> FileLock:
        # flock has no timeout, so it is tried; a signal would reach the main thread only.
        wait_s = _FIRST_WAIT_S
        while True:
            lock = FileLock.try_acquire(self._path, create=True)
            if lock is not None and lock.is_at(self._path):
                return lock
            if time.monotonic() >= deadline:
                raise self._busy()
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    @staticmethod
    def _busy() -> Unavailable:
        return Unavailable("The cache of adapters is busy.")
