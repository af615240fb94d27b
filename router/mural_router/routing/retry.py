"""How often a router may ask again: a share of what it is asked, so that it makes no storm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mural_router.fleet.endpoint import Engine

__all__ = ["RetryBudget", "RetrySettings", "may_ask_again"]

WINDOW_S: Final = 10.0
ELSEWHERE: Final = "elsewhere"


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """``attempts`` of one request, the first included; ``ratio`` of retries to requests."""

    attempts: int = 3
    ratio: float = 0.2
    min_per_s: float = 3.0


class RetryBudget:
    """Retries that may be made now: ``min_per_s``, and for each request a ``ratio`` of one.

    Finagle's budget (https://finagle.github.io/blog/2016/02/08/retry-budgets/) as one bucket:
    what is not used is gone after about ten seconds.
    """

    def __init__(self, settings: RetrySettings) -> None:
        self.settings = settings
        self._balance = settings.min_per_s * WINDOW_S
        self._last: float | None = None

    def request(self, now: float) -> None:
        """Count a request."""
        if self._last is None or now > self._last:
            self._refill(now)
        self._balance += self.settings.ratio

    def take(self, now: float) -> bool:
        """Use up one retry, if there is one."""
        self._refill(now)
        if self._balance < 1.0:
            return False
        self._balance -= 1.0
        return True

    def _refill(self, now: float) -> None:
        elapsed = 0.0 if self._last is None else max(0.0, now - self._last)
        self._last = now if self._last is None else max(self._last, now)
        # What requests gave fades; what the clock gives comes back, up to one window's worth.
        floor = self.settings.min_per_s * WINDOW_S
        share = min(1.0, elapsed / WINDOW_S)
        self._balance += (floor - self._balance) * share


def may_ask_again(engine: Engine, status: int, mark: str | None) -> bool:
    """Whether an answer says that no work was done for it, so that another may be asked.

    A Mural server marks such refusals (``x-mural-retry: elsewhere``): its queue is full, or it
    shuts down. Its other 503s are not: a cold load that took too long would take as long
    elsewhere. vLLM marks nothing, and what stands in front of a replica answers 502 for it.
    """
    if mark == ELSEWHERE:
        return status == 503
    if status == 401:
        # It does not know the router, and did nothing: another may.
        return True
    return status == 502 or (engine == "vllm" and status == 503)
