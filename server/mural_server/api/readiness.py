"""Whether a server may get its first request: once it has what it was told to hold ready."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable

__all__ = ["Readiness"]

logger = logging.getLogger("mural")


class Readiness:
    """The declared names, and whether they were resident once.

    Until then, and for ``await_s`` seconds at most, the server is not ready; an operator declares
    what a new pod is to hold meanwhile. What is declared or lost later takes nothing back, since a
    pod that serves all but one of its adapters is better than none.
    """

    def __init__(self, await_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.declared: frozenset[str] = frozenset()
        self._clock = clock
        self._await_s = await_s
        self._until = clock() + await_s
        self._told = False
        self._open = await_s == 0

    @property
    def awaits_declared(self) -> bool:
        """Whether it waits to be told what it is to hold."""
        return not self._open and not self._told

    def declare(self, names: Iterable[str]) -> None:
        """Say which names are to be resident."""
        self.declared = frozenset(names)
        self._told = True

    def missing(self, resident: Collection[str]) -> list[str]:
        """The declared names that are not resident."""
        return sorted(self.declared.difference(resident))

    def waits_for(self, resident: Callable[[], Collection[str]]) -> str | None:
        """What the first request has to wait for, or None from then on."""
        if self._open:
            return None
        reason = self._reason(resident())
        if reason is not None and self._clock() < self._until:
            return reason
        self._open = True
        if reason is not None:
            logger.warning("ready after %g s all the same: %s", self._await_s, reason)
        return None

    def _reason(self, resident: Collection[str]) -> str | None:
        if not self._told:
            return "It has not been told yet which adapters it is to hold."
        missing = self.missing(resident)
        if not missing:
            return None
        return f"{len(missing)} of {len(self.declared)} declared adapters are not resident yet."
