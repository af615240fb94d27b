"""Limits counted in this process: for one router alone."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec

from mural_resolvers.tenants import Principal
from mural_resolvers.tenants.limits import LimitKind
from mural_router.limits.account import UNCOUNTED, Account, busiest, counts
from mural_router.limits.limiter import Hold, LimitsSnapshot

__all__ = ["LocalLimiter"]

MAX_ACCOUNTS: Final = 16_384


class _LocalHold(msgspec.Struct, eq=False):
    account: Account
    clock: Callable[[], float]
    sequences: int
    estimated: int
    second: int
    settled: bool = False

    def settle(self, tokens: int) -> None:
        if not self.settled:
            self.settled = True
            self.account.settle(self.estimated, tokens, self.second, self.clock())

    def close(self) -> None:
        self.account.open_sequences -= self.sequences
        self.sequences = 0


class LocalLimiter:
    """Counts in memory; forgotten when the process ends. For one event loop.

    ``clock`` gives seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._refused: Counter[LimitKind] = Counter()
        self._accounts: OrderedDict[str, Account] = OrderedDict()

    async def enter(self, principal: Principal, sequences: int, tokens: int) -> Hold:
        return self.enter_now(principal, sequences, tokens)

    def enter_now(self, principal: Principal, sequences: int, tokens: int) -> Hold:
        tenant, limits = principal.tenant, principal.limits
        if tenant is None or not counts(limits, sequences):
            return UNCOUNTED
        now = self._clock()
        account = self._accounts.get(tenant)
        if account is None:
            account = self._new_account(tenant, now)
        else:
            self._accounts.move_to_end(tenant)
        refusal = account.refusal(limits, sequences, tokens, now)
        if refusal is not None:
            self._refused[refusal.kind] += 1
            raise refusal.error()
        second = account.admit(sequences, tokens, now)
        return _LocalHold(account, self._clock, sequences, tokens, second)

    def snapshot(self, max_tenants: int = 100) -> LimitsSnapshot:
        return LimitsSnapshot(
            shared=False,
            away_s=None,
            routers=1,
            trips=0,
            refused=dict(self._refused),
            tenants=busiest(self._accounts.items(), self._clock(), max_tenants),
        )

    async def close(self) -> None:
        self._accounts.clear()

    def _new_account(self, tenant: str, now: float) -> Account:
        while len(self._accounts) >= MAX_ACCOUNTS:
            oldest = next(iter(self._accounts))
            if not self._accounts[oldest].is_idle(now):
                # As many tenants at work as that: better one more account than a limit forgotten.
                break
            del self._accounts[oldest]
        account = self._accounts[tenant] = Account()
        return account
