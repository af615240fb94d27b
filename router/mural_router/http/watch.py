"""Deadlines of many connections by one timer: setting one costs an assignment."""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod

__all__ = ["NEVER", "Watch", "Watched"]

NEVER = math.inf


class Watched(ABC):
    """Something with a deadline on its `Watch`'s clock."""

    deadline: float
    """Set from the start on."""

    @abstractmethod
    def expired(self) -> None:
        """The deadline has passed; set another one, or end. Must not raise."""


class Watch:
    """Looks at all deadlines every ``interval_s``: they are kept to within two of those."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float = 0.25) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._watched: set[Watched] = set()
        self.now = loop.time()
        """Coarse, at most ``interval_s`` old: costs nothing to read."""
        self._timer = loop.call_later(interval_s, self._look)

    def add(self, watched: Watched) -> None:
        self._watched.add(watched)

    def discard(self, watched: Watched) -> None:
        self._watched.discard(watched)

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._look)
        now = self.now = self._loop.time()
        for watched in [each for each in self._watched if each.deadline < now]:
            watched.expired()
