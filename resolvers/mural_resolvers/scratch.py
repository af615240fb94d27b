"""Folders for work in progress, which a sweep can tell from what a dead process left.

Each has a lock file beside it, held by ``flock`` as long as its process lives and uses it.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path

__all__ = ["ScratchFolder", "sweep_scratch", "try_lock"]

_SUFFIX = ".lock"


class ScratchFolder:
    """A new folder in an existing one. ``close`` removes it, unless it was renamed away."""

    def __init__(self, parent: Path) -> None:
        while True:
            self.path = parent / secrets.token_hex(8)
            self._lock_path = parent / (self.path.name + _SUFFIX)
            self._lock = os.open(
                self._lock_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )
            # A sweep may have come between these two, and have taken the file away.
            if try_lock(self._lock) and self._lock_path.exists():
                break
            os.close(self._lock)
        try:
            self.path.mkdir()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Remove what is left of it. Once only."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)


def sweep_scratch(parent: Path) -> int:
    """Remove the folders of processes that died; give how many there were."""
    swept = 0
    for path in parent.glob(f"*{_SUFFIX}"):
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            if try_lock(lock):
                shutil.rmtree(path.with_suffix(""), ignore_errors=True)
                path.unlink(missing_ok=True)
                swept += 1
        finally:
            os.close(lock)
    return swept


def try_lock(descriptor: int) -> bool:
    """Take an open file's lock for this descriptor alone, or tell that another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
