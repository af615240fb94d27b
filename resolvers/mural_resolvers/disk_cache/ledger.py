"""What is used of the cache, known to all processes, and the one way to change it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mural_resolvers.disk_cache.content import Content
from mural_resolvers.disk_cache.layout import Layout, disk_faults, write_atomically
from mural_resolvers.disk_cache.locks import Mutex
from mural_resolvers.disk_cache.records import Usage, encode, read_record
from mural_resolvers.disk_cache.sweep import Findings, sweep
from mural_resolvers.errors import MuralError

__all__ = ["Ledger", "Stamps"]

logger = logging.getLogger("mural.cache")


class Stamps:
    """Times of leases in ns, each later than the one before, whatever the clock does."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        self._now_ns = now_ns
        self._last_ns = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        """The time now, or just after the last one."""
        with self._lock:
            self._last_ns = max(self._now_ns(), self._last_ns + 1)
            return self._last_ns

    def follow(self, stamp_ns: int) -> None:
        """Go on after a stamp of another process, or of an earlier start."""
        with self._lock:
            self._last_ns = max(self._last_ns, stamp_ns)


class Ledger:
    """The usage, in a file that is absent while it changes.

    A process that dies, or a disk that fails, in the midst of a change leaves no file behind, and
    so makes the next one sweep and count anew.
    """

    def __init__(self, layout: Layout, content: Content, mutex: Mutex, stamps: Stamps) -> None:
        self._layout = layout
        self._content = content
        self._mutex = mutex
        self._stamps = stamps

    @contextmanager
    def changing(self) -> Iterator[Usage]:
        """Hold the mutex, and the usage to be changed along with the folder.

        A ``MuralError`` ends a change in good order, any other error leaves it to be counted
        anew. Raises ``Unavailable`` for what the disk refuses.
        """
        with disk_faults(), self._held():
            usage = self.read() or self.sweep().usage
            self._layout.usage.unlink(missing_ok=True)
            try:
                yield usage
            except MuralError:
                self._write(usage)
                raise
            self._write(usage)

    @contextmanager
    def opening(self) -> Iterator[Findings]:
        """``changing``, with a sweep whatever is noted: after a power cut that may be old."""
        with disk_faults(), self._held():
            self._layout.usage.unlink(missing_ok=True)
            findings = self.sweep()
            yield findings
            self._write(findings.usage)

    def read(self) -> Usage | None:
        """What is noted; None while it changes, or where nobody knows."""
        return read_record(self._layout.usage, Usage)

    def sweep(self) -> Findings:
        """Repair the folder and count anew; the caller holds the mutex."""
        findings = sweep(self._layout, self._content, repair=True)
        self._stamps.follow(findings.newest_ns)
        return findings

    @contextmanager
    def _held(self) -> Iterator[None]:
        self._layout.restore()
        with self._mutex.held():
            yield

    def _write(self, usage: Usage) -> None:
        try:
            write_atomically(self._layout.usage, encode(usage), self._layout.temporary, sync=False)
        except OSError as error:
            # What was done stays done; that nobody knows the usage is what its absence says.
            logger.warning("the cache's usage could not be noted: %s", error.strerror)
