"""What one tenant used, and whether one more request fits: told the time, without I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import nlargest
from typing import Final, NamedTuple

from mural_resolvers.errors import InvalidInput, RateLimited
from mural_resolvers.tenants import TenantLimits
from mural_resolvers.tenants.limits import LimitKind, MinuteWindow
from mural_router.limits.limiter import Hold, TenantUsage

__all__ = ["RETRY_S", "UNCOUNTED", "Account", "Refusal", "busiest", "counts"]

RETRY_S: Final = 1.0
"""Where no time is known at which something gets free."""


class Refusal(NamedTuple):
    """Which limit is met, and the seconds until another try is worth it."""

    kind: LimitKind
    limit: int
    wait_s: float

    def error(self) -> RateLimited:
        """What the user is told."""
        what = "sequences at one time" if self.kind == "concurrency" else f"{self.kind} a minute"
        return RateLimited(
            f"This tenant's limit of {self.limit} {what} is met.", retry_after_s=self.wait_s
        )


def counts(limits: TenantLimits, sequences: int) -> bool:
    """Whether there is anything to count.

    Raises ``InvalidInput`` for more sequences than the tenant may ever have.
    """
    if limits.concurrency is None:
        return limits.requests_per_minute is not None or limits.tokens_per_minute is not None
    if sequences > limits.concurrency:
        raise InvalidInput(
            f"The request asks for {sequences} sequences at once; this tenant may have "
            f"{limits.concurrency}."
        )
    return True


@dataclass(slots=True)
class Account:
    """A tenant's requests and tokens of the last minute, and its sequences that are open.

    A request's tokens are counted when it is admitted, as estimated. Where it used less, that
    cell of the window is put right; what it used more counts from when it is known.
    """

    requests: MinuteWindow = field(default_factory=MinuteWindow)
    tokens: MinuteWindow = field(default_factory=MinuteWindow)
    open_sequences: int = 0

    def refusal(
        self, limits: TenantLimits, sequences: int, tokens: int, now: float, routers: int = 1
    ) -> Refusal | None:
        """Say why a request does not fit into this account's share of the limits, if so."""
        most = limits.concurrency
        # Any share has room for one request.
        if most is not None and self.open_sequences:
            part = most if routers == 1 else math.ceil(most / routers)
            if self.open_sequences + sequences > part:
                return Refusal("concurrency", most, RETRY_S)
        most = limits.requests_per_minute
        if most is not None:
            part = most if routers == 1 else math.ceil(most / routers)
            wait_s = self.requests.wait_s(part, now)
            if wait_s > 0:
                return Refusal("requests", most, wait_s)
        most = limits.tokens_per_minute
        if most is not None:
            part = most if routers == 1 else math.ceil(most / routers)
            wait_s = self.tokens.wait_s(part, now, tokens)
            if wait_s > 0:
                return Refusal("tokens", most, wait_s)
        return None

    def admit(self, sequences: int, tokens: int, now: float) -> int:
        """Count a request; returns the second that it is counted under."""
        self.open_sequences += sequences
        self.requests.add(1, now)
        return self.tokens.add(tokens, now)

    def settle(self, estimated: int, used: int, second: int, now: float) -> None:
        """Replace an estimate by what was used."""
        if used < estimated:
            self.tokens.take_back(estimated - used, second, now)
        elif used > estimated:
            self.tokens.add(used - estimated, now)

    def is_idle(self, now: float) -> bool:
        """Whether forgetting it would change nothing."""
        return not (self.open_sequences or self.requests.total(now) or self.tokens.total(now))

    def usage(self, tenant: str, now: float) -> TenantUsage:
        """What is counted at a time."""
        return TenantUsage(
            tenant, self.requests.total(now), self.tokens.total(now), self.open_sequences
        )


def busiest(
    accounts: Iterable[tuple[str, Account]], now: float, count: int
) -> tuple[TenantUsage, ...]:
    """The usage of those with most tokens."""
    usages = (account.usage(tenant, now) for tenant, account in accounts)
    return tuple(nlargest(count, usages, key=lambda usage: (usage.tokens, usage.requests)))


class _Uncounted:
    def settle(self, tokens: int) -> None:
        """Nothing is counted."""

    def close(self) -> None:
        """Nothing is held."""


UNCOUNTED: Final[Hold] = _Uncounted()
"""The hold of whoever has no limits."""
