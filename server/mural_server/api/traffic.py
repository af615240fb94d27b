"""How much each adapter is asked for, over a window that forgets: bounded, and cheap to add to."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["OTHER", "LabelledTokens", "Traffic"]

OTHER = "other"
WINDOW_S = 60.0
MAX_NAMES = 4096


class Traffic:
    """Tokens per second by name, decaying by 1/e in ``window_s``."""

    def __init__(
        self,
        *,
        window_s: float = WINDOW_S,
        max_names: int = MAX_NAMES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._window_s = window_s
        self._max_names = max_names
        self._clock = clock
        self._levels: dict[str, tuple[float, float]] = {}
        """By name: the decayed sum of tokens, and when it was brought up to date."""

    def add(self, name: str, tokens: int) -> None:
        """Count tokens now."""
        now = self._clock()
        self._levels[name] = (self._decayed(name, now) + tokens, now)
        if len(self._levels) > self._max_names:
            # The quietest of all is the one that says the least.
            del self._levels[min(self._levels, key=lambda other: self._decayed(other, now))]

    def rate(self, name: str) -> float:
        """Tokens per second of late."""
        return self._decayed(name, self._clock()) / self._window_s

    def _decayed(self, name: str, now: float) -> float:
        level, since = self._levels.get(name, (0.0, now))
        if level == 0.0:
            return 0.0
        return float(level * 2.718281828459045 ** ((since - now) / self._window_s))


class LabelledTokens:
    """Counters for the busiest ``max_labels`` names; everything else is counted as ``other``.

    When a name without a label has become clearly busier than the quietest with one, they change
    places: the old series ends and its total goes to ``other``, so that no series ever falls.
    """

    def __init__(self, traffic: Traffic, max_labels: int) -> None:
        self._traffic = traffic
        self._max_labels = max_labels
        self._prompt: dict[str, int] = {}
        self._generation: dict[str, int] = {}
        self._other = (0, 0)

    def add(self, name: str, prompt: int, generation: int) -> None:
        """Count a request's tokens."""
        if name not in self._prompt and not self._take_label(name):
            self._other = (self._other[0] + prompt, self._other[1] + generation)
            return
        self._prompt[name] += prompt
        self._generation[name] += generation

    def totals(self) -> list[tuple[str, int, int]]:
        """Label, prompt tokens, generated tokens; ``other`` last, once it counts anything."""
        rows = [(name, self._prompt[name], self._generation[name]) for name in self._prompt]
        return [*rows, (OTHER, *self._other)] if any(self._other) else rows

    def _take_label(self, name: str) -> bool:
        if len(self._prompt) >= self._max_labels:
            if not self._prompt:
                return False
            quietest = min(self._prompt, key=self._traffic.rate)
            if self._traffic.rate(name) <= 2 * self._traffic.rate(quietest):
                return False
            self._other = (
                self._other[0] + self._prompt.pop(quietest),
                self._other[1] + self._generation.pop(quietest),
            )
        self._prompt[name] = self._generation[name] = 0
        return True
