"""How much may wait: a bound on open sequences that no tenant can fill alone."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from mural_resolvers.errors import InvalidInput
from mural_server.api.errors import NotTaken

__all__ = ["Admission", "may_enter"]


def may_enter(tenant: str, count: int, open_by_tenant: Mapping[str, int], capacity: int) -> bool:
    """Tell whether ``count`` more sequences of a tenant may enter.

    While there is room anyone may. When there is none, a tenant below its equal share still may,
    so that one that fills the queue cannot keep the others out.
    """
    if sum(open_by_tenant.values()) + count <= capacity:
        return True
    tenants = len(open_by_tenant.keys() | {tenant})
    if tenants == 1:
        return False
    return open_by_tenant.get(tenant, 0) + count <= max(1, capacity // tenants)


class Admission:
    """Counts open sequences per tenant. One event loop only."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._open: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()
        self.accepting = True
        self.refusal = "The server is shutting down."

    @property
    def open_sequences(self) -> int:
        return self._open.total()

    def close(self, reason: str) -> None:
        """Refuse everything from now on."""
        self.accepting = False
        self.refusal = reason

    async def wait_idle(self) -> None:
        """Return when nothing is open."""
        await self._idle.wait()

    @contextmanager
    def enter(self, tenant: str, count: int) -> Iterator[None]:
        """Hold ``count`` places; raise `NotTaken` when there are none, `InvalidInput` when there
        never will be.
        """
        if not self.accepting:
            raise NotTaken(self.refusal, retry_after_s=5.0)
        if count > self._capacity:
            raise InvalidInput(
                f"The request asks for {count} sequences at once; this server takes "
                f"{self._capacity} in all."
            )
        if not may_enter(tenant, count, self._open, self._capacity):
            raise NotTaken("Too many requests are waiting on this server.", retry_after_s=2.0)
        self._open[tenant] += count
        self._idle.clear()
        try:
            yield
        finally:
            self._open[tenant] -= count
            if not self._open[tenant]:
                del self._open[tenant]
            if not self._open:
                self._idle.set()
