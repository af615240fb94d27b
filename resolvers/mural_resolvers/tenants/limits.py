"""What tenants have used of their limits: pure accounting, told the time by whoever asks.

A limit per minute holds for any 60 seconds, to within one second: usage is kept by the second,
and leaves the sum when it is a minute old.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
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
        self._cells: deque[list[int]] = deque()
        """``[second, amount]``, the oldest first."""
        self._total = 0

    def add(self, amount: int, now: float) -> None:
        """Count an amount at a time (seconds; a time before the last counts as the last)."""
        self._forget(now)
        second = math.floor(now)
        if self._cells and self._cells[-1][0] >= second:
            self._cells[-1][1] += amount
        else:
            self._cells.append([second, amount])
        self._total += amount

    def total(self, now: float) -> int:
        """The sum of what is not yet a minute old."""
        self._forget(now)
        return self._total

    def wait_s(self, limit: int, now: float) -> float:
        """Seconds until the sum is below a limit, if nothing is added; 0 when it is."""
        left = self.total(now)
        for second, amount in self._cells:
            if left < limit:
                break
            left -= amount
            if left < limit:
                return second + WINDOW_S + 1 - now
        return 0.0

    def _forget(self, now: float) -> None:
        # A cell holds what came during one second, so it is whole only a second later.
        while self._cells and self._cells[0][0] + WINDOW_S + 1 <= now:
            self._total -= self._cells.popleft()[1]


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
