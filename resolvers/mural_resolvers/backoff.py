"""How long to wait before something is tried again."""

from __future__ import annotations

import random
from collections.abc import Callable

__all__ = ["Backoff"]


class Backoff:
    """Seconds until the next try: twice as long each time, with jitter, within bounds."""

    def __init__(
        self, first_s: float, most_s: float, jitter: Callable[[], float] = random.random
    ) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._jitter = jitter
        self._next_s = first_s

    def reset(self) -> None:
        """What was tried has worked."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Between half of the bound and the bound, so that many do not come back at once."""
        bound = self._next_s
        self._next_s = min(2 * bound, self._most_s)
        return bound * (0.5 + self._jitter() / 2)
