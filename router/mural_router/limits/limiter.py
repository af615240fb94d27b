"""The interface of limits: one implementation counts in this process, one in Redis."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mural_resolvers.tenants import Principal

__all__ = ["Hold", "Limiter"]


class Hold(ABC):
    """One request's hold on its tenant's account, from its admission to its end."""

    @abstractmethod
    def settle(self, tokens: int) -> None:
        """Replace the estimate by what was really used (prompt and generated). Once, at most."""

    @abstractmethod
    def close(self) -> None:
        """Give the sequences back; an estimate that was not settled stays spent. Idempotent."""


class Limiter(ABC):
    """Requests and tokens a minute and sequences at one time, per tenant."""

    @abstractmethod
    async def enter(self, principal: Principal, sequences: int, tokens: int) -> Hold:
        """Admit a request that is expected to use ``tokens``.

        Raises `RateLimited` with the seconds until another try is worth it, `InvalidInput`
        when it asks for more sequences than the tenant may ever have. What is refused is not
        counted.
        """

    @abstractmethod
    async def close(self) -> None:
        """End background work; unused leases are given back."""
