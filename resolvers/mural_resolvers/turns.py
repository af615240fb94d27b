"""Who may begin when: bounded concurrency, one at a time by key, and a rate per tenant."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

__all__ = ["KeyedLocks", "Rate", "Turns"]

_MAX_TENANTS = 16_384


class Turns:
    """Bounded concurrency, in total and per tenant; a tenant's own queue comes first.

    Work waits in the total's queue only once its tenant's bound lets it, so that a tenant with
    much of it does not stand in the others' way.
    """

    def __init__(self, total: int, per_tenant: int) -> None:
        self._total = asyncio.Semaphore(total)
        self._per_tenant = per_tenant
        self._tenants: dict[str, tuple[asyncio.Semaphore, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether nobody holds a turn or waits for one."""
        return not self._tenants and not self._total.locked()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn and hold it."""
        semaphore = self._enter(tenant)
        try:
            async with semaphore, self._total:
                yield
        finally:
            self._leave(tenant)

    def _enter(self, tenant: str) -> asyncio.Semaphore:
        semaphore, users = self._tenants.get(tenant, (asyncio.Semaphore(self._per_tenant), 0))
        self._tenants[tenant] = (semaphore, users + 1)
        return semaphore

    def _leave(self, tenant: str) -> None:
        semaphore, users = self._tenants.pop(tenant)
        if users > 1:
            self._tenants[tenant] = (semaphore, users - 1)


class KeyedLocks:
    """A lock per key, which goes with its last user."""

    def __init__(self) -> None:
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}

    @property
    def idle(self) -> bool:
        """Whether nobody holds a lock or waits for one."""
        return not self._locks

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Wait for a key's lock and hold it."""
        lock, users = self._locks.get(key, (asyncio.Lock(), 0))
        self._locks[key] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks.pop(key)
            if users > 1:
                self._locks[key] = (lock, users - 1)


class Rate:
    """A token bucket per tenant: ``burst`` at once, then ``per_s`` a second.

    Remembers the tenants that took last, at most 16,384; one that is forgotten starts full.
    """

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float]) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, tenant: str) -> float:
        """Take one and give 0, or take none and give the seconds until there is one."""
        now = self._clock()
        left, then = self._left.get(tenant, (self._burst, now))
        left = min(self._burst, left + max(0.0, now - then) * self._per_s)
        taken = left >= 1.0
        self._left[tenant] = (left - 1.0 if taken else left, now)
        self._left.move_to_end(tenant)
        while len(self._left) > _MAX_TENANTS:
            self._left.popitem(last=False)
        return 0.0 if taken else (1.0 - left) / self._per_s
