"""What tenants have used of their limits: pure accounting, told the time by whoever asks.

A limit per minute holds for any 60 seconds, to within one second: usage is kept by the second,
and leaves the sum when it is a minute old.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Final, Literal

from mural_resolvers.errors import InvalidInput, RateLimited
from mural_resolvers.tenants.principal import Principal, TenantLimits

__all__ = ["LimitKind", "MinuteWindow", "TenantAccounts", "Ticket"]

WINDOW_S: Final = 60
MAX_ACCOUNTS: Final = 16_384
RETRY_CONCURRENCY_S: Final = 1.0

LimitKind = Literal["requests", "tokens", "concurrency"]


class MinuteWindow:
    """A sum over the last 60 seconds."""

    def __init__(self) -> None:
        self._cells: dict[int, int] = {}
        """Second → amount, the oldest first."""
        self._newest = 0
        self._total = 0
        self._leaves_at = math.inf
        """When the oldest cell leaves the sum."""

    def add(self, amount: int, now: float) -> int:
        """Count an amount at a time (seconds; a time before the last counts as the last).

        Returns the second that it was counted under.
        """
        if now >= self._leaves_at:
            self._forget(now)
        second = math.floor(now)
        cells = self._cells
        self._total += amount
        if self._newest >= second and cells:
            second = self._newest
            cells[second] += amount
            return second
        self._newest = second
        if not cells:
            self._leaves_at = float(second + WINDOW_S + 1)
        cells[second] = amount
        return second

    def take_back(self, amount: int, second: int, now: float) -> bool:
        """Uncount what was counted under a second too much; False: it left the sum already."""
        if now >= self._leaves_at:
            self._forget(now)
        if second not in self._cells:
            return False
        self._cells[second] -= amount
        self._total -= amount
        return True

    def total(self, now: float) -> int:
        """The sum of what is not yet a minute old."""
        if now >= self._leaves_at:
            self._forget(now)
        return self._total

    def cells(self, now: float) -> dict[int, int]:
        """What is not yet a minute old, by the second."""
        if now >= self._leaves_at:
            self._forget(now)
        return dict(self._cells)

    def wait_s(self, limit: int, now: float, amount: int = 1) -> float:
        """Seconds until an amount fits below a limit, if nothing else is added; 0 when it does.

        An amount above the limit waits until the sum is 0.
        """
        if now >= self._leaves_at:
            self._forget(now)
        left, bound = self._total, limit - amount
        if left <= bound:
            return 0.0
        bound = max(0, bound)
        if left <= bound:
            return 0.0
        for second, counted in self._cells.items():
            left -= counted
            if left <= bound:
                return second + WINDOW_S + 1 - now
        return 0.0

    def shift(self, seconds: int) -> None:
        """Move all that is counted to so many seconds later: the clock was wrong by that."""
        self._cells = {second + seconds: counted for second, counted in self._cells.items()}
        self._newest += seconds
        self._leaves_at += seconds

    def _forget(self, now: float) -> None:
        while self._cells:
            oldest = next(iter(self._cells))
            # A cell holds what came during one second, so it is whole only a second later.
            self._leaves_at = float(oldest + WINDOW_S + 1)
            if now < self._leaves_at:
                return
            self._total -= self._cells.pop(oldest)
        self._leaves_at = math.inf


@dataclass(slots=True)
class _Account:
    requests: MinuteWindow = field(default_factory=MinuteWindow)
    tokens: MinuteWindow = field(default_factory=MinuteWindow)
    open_sequences: int = 0

    def is_idle(self, now: float) -> bool:
        return not (self.open_sequences or self.requests.total(now) or self.tokens.total(now))


class Ticket:
    """One request's hold on its tenant's account; without limits it holds and counts nothing."""

    def __init__(self, account: _Account | None, sequences: int) -> None:
        self._account = account
        self._sequences = sequences

    def spend(self, tokens: int, now: float) -> None:
        """Count tokens that were really used, as they are: the sum may end above the limit."""
        if self._account is not None and tokens:
            self._account.tokens.add(tokens, now)

    def close(self) -> None:
        """Give the sequences back. Idempotent."""
        if self._account is not None:
            self._account.open_sequences -= self._sequences
            self._sequences = 0


class TenantAccounts:
    """The accounts of the tenants that have limits. For one thread; times are of one clock."""

    def __init__(self) -> None:
        self.refused: Counter[LimitKind] = Counter()
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    def enter(self, principal: Principal, sequences: int, now: float) -> Ticket:
        """Open a request's sequences, which closing the ticket ends.

        Raises ``RateLimited`` with the seconds until it is worth another try, and
        ``InvalidInput`` when there are more sequences than the tenant may ever have. What is
        refused is not counted, so that knocking does not lock a tenant out.
        """
        if principal.tenant is None or not _has_rates(principal.limits):
            return Ticket(None, sequences)
        limits, account = principal.limits, self._account(principal.tenant, now)
        if limits.concurrency is not None and sequences > limits.concurrency:
            raise InvalidInput(
                f"The request asks for {sequences} sequences at once; this tenant may have "
                f"{limits.concurrency}."
            )
        self._check(limits, account, sequences, now)
        account.open_sequences += sequences
        account.requests.add(1, now)
        return Ticket(account, sequences)

    def _check(self, limits: TenantLimits, account: _Account, sequences: int, now: float) -> None:
        if limits.concurrency is not None:
            over = account.open_sequences + sequences > limits.concurrency
            self._refuse_if(over, "concurrency", limits.concurrency, RETRY_CONCURRENCY_S)
        rates: tuple[tuple[LimitKind, MinuteWindow, int | None], ...] = (
            ("requests", account.requests, limits.requests_per_minute),
            ("tokens", account.tokens, limits.tokens_per_minute),
        )
        for kind, window, limit in rates:
            if limit is not None:
                wait_s = window.wait_s(limit, now)
                self._refuse_if(wait_s > 0, kind, limit, wait_s)

    def _refuse_if(self, over: bool, kind: LimitKind, limit: int, wait_s: float) -> None:
        if not over:
            return
        self.refused[kind] += 1
        what = "sequences at one time" if kind == "concurrency" else f"{kind} a minute"
        raise RateLimited(f"This tenant's limit of {limit} {what} is met.", retry_after_s=wait_s)

    def _account(self, tenant: str, now: float) -> _Account:
        account = self._accounts.setdefault(tenant, _Account())
        self._accounts.move_to_end(tenant)
        while len(self._accounts) > MAX_ACCOUNTS:
            oldest = next(iter(self._accounts))
            if not self._accounts[oldest].is_idle(now):
                # As many tenants at work as that: better one more account than a limit forgotten.
                break
            del self._accounts[oldest]
        return account


def _has_rates(limits: TenantLimits) -> bool:
    return (
        limits.requests_per_minute is not None
        or limits.tokens_per_minute is not None
        or limits.concurrency is not None
    )
