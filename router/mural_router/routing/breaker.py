"""A circuit breaker per replica: one that keeps failing is left alone, then tried again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Breaker", "BreakerSettings", "BreakerState", "Breakers"]

BreakerState = Literal["closed", "open", "half_open"]

# What a replica answers when it is broken. 503 is its word about its load, not about its health,
# and 4xx speaks of the request; but 401 of the router, which it does not know: who asks has been
# established here, and no key of a client reaches it.
FAILURES: Final = frozenset({401, 500, 502, 504})
MAX_DOUBLINGS: Final = 5


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """``failures`` in a row open it, for ``open_s``; each probe that fails doubles that time,
    up to 32 times. ``open_s`` is spread by a quarter, so that routers do not probe together."""

    failures: int = 5
    open_s: float = 2.0


class Breaker:
    """Closed: all requests; open: none; half-open: one at a time, as a probe."""

    def __init__(self, settings: BreakerSettings, draw: Callable[[], float] = random.random):
        self.settings = settings
        """Others may be put here at any time."""
        self._draw = draw
        self._failures = 0
        self._opened = 0
        """Times in a row that it opened without a success."""
        self._open_until = -math.inf
        self._probe: object | None = None

    def state(self, now: float) -> BreakerState:
        """What it lets through now."""
        if not self._opened:
            return "closed"
        return "open" if now < self._open_until else "half_open"

    def allows(self, now: float) -> bool:
        """Whether the replica may be chosen; asks for nothing yet."""
        return not self._opened or (now >= self._open_until and self._probe is None)

    def begin(self, attempt: object, now: float) -> None:
        """An attempt goes there. The first one while half-open is the probe."""
        if self._opened and now >= self._open_until and self._probe is None:
            self._probe = attempt

    def succeeded(self, attempt: object) -> None:
        """The replica answered as one that works."""
        if self._opened and attempt is not self._probe:
            # An answer to what was asked before it broke says nothing about now.
            return
        self._failures, self._opened, self._probe = 0, 0, None

    def failed(self, attempt: object, now: float) -> None:
        """It did not answer, or with a status that a broken one has."""
        if self._opened:
            if attempt is self._probe:
                self._open(now)
            return
        self._failures += 1
        if self._failures >= self.settings.failures:
            self._open(now)

    def ended(self, attempt: object) -> None:
        """The attempt is over and said nothing: another may be the probe."""
        if attempt is self._probe:
            self._probe = None

    def _open(self, now: float) -> None:
        factor = 1 << min(self._opened, MAX_DOUBLINGS)
        spread = 0.75 + 0.5 * self._draw()
        self._opened += 1
        self._failures = 0
        self._probe = None
        self._open_until = now + self.settings.open_s * factor * spread


class Breakers:
    """One breaker a replica; those of replicas that are gone are forgotten."""

    def __init__(
        self, settings: BreakerSettings, draw: Callable[[], float] = random.random
    ) -> None:
        self._settings = settings
        self._draw = draw
        self._by_name: dict[str, Breaker] = {}
        self.troubled: set[str] = set()
        """Those that have failed since they last answered well; for reading."""

    @property
    def settings(self) -> BreakerSettings:
        """Others may be put here at any time, and hold for what is troubled already."""
        return self._settings

    @settings.setter
    def settings(self, settings: BreakerSettings) -> None:
        self._settings = settings
        for breaker in self._by_name.values():
            breaker.settings = settings

    def of(self, replica: str) -> Breaker:
        """The replica's."""
        breaker = self._by_name.get(replica)
        if breaker is None:
            breaker = self._by_name[replica] = Breaker(self._settings, self._draw)
        return breaker

    def begin(self, replica: str, attempt: object, now: float) -> None:
        """An attempt goes there."""
        if replica in self.troubled:
            self.of(replica).begin(attempt, now)

    def ended(self, replica: str, attempt: object) -> None:
        """The attempt is over."""
        if replica in self.troubled:
            self.of(replica).ended(attempt)

    def failed(self, replica: str, attempt: object, now: float) -> None:
        """Count a failure."""
        self.of(replica).failed(attempt, now)
        self.troubled.add(replica)

    def succeeded(self, replica: str, attempt: object, now: float) -> None:
        """Count a success."""
        if replica in self.troubled:
            breaker = self.of(replica)
            breaker.succeeded(attempt)
            if breaker.state(now) == "closed":
                self.troubled.discard(replica)

    def excluded(self, now: float) -> frozenset[str]:
        """The replicas that may not be chosen now."""
        if not self.troubled:
            return frozenset()
        return frozenset(name for name in self.troubled if not self.of(name).allows(now))

    def keep(self, replicas: frozenset[str]) -> None:
        """Forget all others."""
        self.troubled &= replicas
        for name in self._by_name.keys() - replicas:
            del self._by_name[name]

    def states(self, now: float) -> dict[str, BreakerState]:
        """By replica; those never heard of are closed."""
        return {name: breaker.state(now) for name, breaker in sorted(self._by_name.items())}
