"""The interface of limits: one implementation counts in this process, one in Redis."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from mural_resolvers.tenants import Principal
from mural_resolvers.tenants.limits import LimitKind

__all__ = ["Hold", "Limiter", "LimitsSnapshot", "TenantUsage"]


class Hold(Protocol):
    """One request's hold on its tenant's account, from its admission to its end."""

    @abstractmethod
    def settle(self, tokens: int) -> None:
        """Replace the estimate by what was really used (prompt and generated). Once, at most."""

    @abstractmethod
    def close(self) -> None:
        """Give the sequences back; an estimate that was not settled stays spent. Idempotent."""


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant used through this router: in the last minute, and sequences right now."""

    tenant: str
    requests: int
    tokens: int
    sequences: int


@dataclass(frozen=True, slots=True)
class LimitsSnapshot:
    """How the counting goes, for metrics and the debug page."""

    shared: bool
    """Counted together with other routers."""
    away_s: float | None
    """For how long the shared count has been out of reach; None: it is not."""
    routers: int
    """How many share the limits: what a tenant has here while the shared count is away is
    its limit divided by this."""
    trips: int
    """Round trips to the shared count so far."""
    refused: Mapping[LimitKind, int]
    tenants: tuple[TenantUsage, ...]
    """Those with most tokens first, cut."""


class Limiter(Protocol):
    """Requests and tokens a minute and sequences at one time, per tenant."""

    @abstractmethod
    def enter_now(self, principal: Principal, sequences: int, tokens: int) -> Hold | None:
        """`enter` where nothing has to be waited for; None: it has, and nothing was counted."""

    @abstractmethod
    async def enter(self, principal: Principal, sequences: int, tokens: int) -> Hold:
        """Admit a request that is expected to use ``tokens``.

        Raises `RateLimited` with the seconds until another try is worth it, `InvalidInput`
        when it asks for more sequences than the tenant may ever have. What is refused is not
        counted. A request whose estimate alone is above the limit is admitted when the
        tenant has used nothing for a minute: an estimate must not shut anybody out for good.
        """

    @abstractmethod
    def snapshot(self, max_tenants: int = 100) -> LimitsSnapshot:
        """Tell what is counted, of the busiest tenants."""

    @abstractmethod
    async def close(self) -> None:
        """End background work; unused leases are given back."""
