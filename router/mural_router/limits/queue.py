"""Who is next when the fleet is full: bounded queues per tenant, served by weighted fair share.

Start-time fair queueing (Goyal, Vin and Cheng, 1996) over tokens, the unit of the virtual token
counter (Sheng et al., "Fairness in Serving Large Language Models", 2024): a tenant's counter
grows by what each of its requests that had to wait is expected to use, divided by its weight,
and the tenant with the least counter is next. A tenant that comes anew starts where the queue
stands, so nobody saves up service and nobody is made to pay for having been there before.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, Generic, TypeVar

from mural_resolvers.errors import RateLimited, Unavailable

__all__ = ["FairQueue", "QueueSnapshot", "Turn"]

Seat = TypeVar("Seat")

LOOK_AGAIN_S: Final = 0.05
MIN_RETRY_S: Final = 1.0
MAX_RETRY_S: Final = 30.0
RATE_MEMORY_S: Final = 10.0
MIN_TENANTS: Final = 256


@dataclass(slots=True, eq=False)
class _Waiter(Generic[Seat]):
    tenant: str | None
    tokens: int
    weight: float
    attempt: Callable[[], Seat | None]
    group: Hashable
    future: asyncio.Future[Seat]
    queued: bool = True


@dataclass(slots=True)
class _Tenant(Generic[Seat]):
    """One that waits, or was served beyond where the queue stands."""

    counter: float
    version: int
    """Another one with each change of the counter: what a heap says of older ones is void."""
    waiting: dict[Hashable, deque[_Waiter[Seat]]] = field(default_factory=dict)
    count: int = 0


class Turn(Generic[Seat]):
    """A request's start: what its attempt gave, and the means to tell what it really cost."""

    __slots__ = ("_settle", "seat", "waited_s")

    def __init__(self, seat: Seat, waited_s: float, settle: Callable[[int], None] | None) -> None:
        self.seat = seat
        self.waited_s = waited_s
        self._settle = settle

    def settle(self, tokens: int) -> None:
        """Put the tenant's counter right by what was really used. Once, at most."""
        settle, self._settle = self._settle, None
        if settle is not None:
            settle(tokens)


@dataclass(frozen=True, slots=True)
class QueueSnapshot:
    """How the queue stands, for metrics and the debug page."""

    waiting: int
    tenants: int
    longest: int
    """Most that one tenant has waiting."""
    tokens_per_s: float
    """Of requests that were started out of the queue, lately."""
    full: int
    """Refused since the tenant's own queue was full, so far."""
    late: int
    """Refused since there was no capacity in time or no room to wait for it, so far."""


class FairQueue(Generic[Seat]):
    """Requests that wait for a seat: whatever their ``attempt`` gives once there is capacity.

    For one event loop. The owner calls `pump` when there may be capacity (an answer ended, the
    fleet changed); while somebody waits the queue looks by itself too, every 50 ms, so that a
    call that was forgotten costs time and no request.
    """

    def __init__(
        self,
        *,
        max_waiting: int = 10_000,
        max_waiting_per_tenant: int = 200,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Bounds on all that wait, and on those of a tenant that has none of its own; ``clock``
        gives seconds."""
        self.max_waiting = max_waiting
        self.max_waiting_per_tenant = max_waiting_per_tenant
        self._clock = clock
        self._tenants: dict[str | None, _Tenant[Seat]] = {}
        self._heaps: dict[Hashable, list[tuple[float, int, str | None]]] = {}
        """Per group: ``(counter, version, tenant)`` of those with a waiter in it."""
        self._by_count: dict[int, dict[str | None, None]] = {}
        """How many wait → the tenants that have so many: who has most, in constant time."""
        self._longest = 0
        self._versions = itertools.count()
        self._stands_at = 0.0
        """The counter of the last that was started: where newcomers begin."""
        self.waiting = 0
        """How many do; for reading."""
        self._tokens = 0
        """That all who wait are expected to use."""
        self._in_group: Counter[Hashable] = Counter()
        self._prune_above = MIN_TENANTS
        self._rate = _Rate()
        self._full = self._late = 0
        self._look_again: asyncio.TimerHandle | None = None

    def seat_now(self, attempt: Callable[[], Seat | None]) -> Seat | None:
        """A seat for a request that need not wait; None: there is none, or others wait for it."""
        return None if self.waiting else attempt()

    async def wait(
        self,
        tenant: str | None,
        weight: float,
        tokens: int,
        attempt: Callable[[], Seat | None],
        *,
        timeout_s: float,
        release: Callable[[Seat], None],
        group: Hashable = None,
        max_waiting: int | None = None,
    ) -> Turn[Seat]:
        """Give the request its seat, at once where nobody waits for the same and there is one.

        ``attempt`` takes a seat or returns None when there is none; it is called on the event
        loop, must not wait, and what it raises is raised here. ``group``: requests that want
        the same capacity, so that where one of them finds none, the others are not asked.
        ``release`` gives a seat back that was taken for a request whose caller went away.
        ``max_waiting``: the tenant's own bound, in place of `max_waiting_per_tenant`.

        Raises `RateLimited` when the tenant's own queue is full, and `Unavailable` when there
        is no seat within ``timeout_s`` seconds or no room to wait; both say when to come back.
        """
        if group not in self._heaps:
            # Nobody waits for the same, so however short its queue it need not wait itself; where
            # others want some of the same they go first.
            self.pump()
            seat = attempt()
            if seat is not None:
                return Turn(seat, 0.0, None)
        self._check_room(
            tenant, self.max_waiting_per_tenant if max_waiting is None else max_waiting
        )
        loop, began = asyncio.get_running_loop(), self._clock()
        waiter = _Waiter(tenant, max(tokens, 1), weight, attempt, group, loop.create_future())
        found = self._push(waiter)
        future = waiter.future
        timer = loop.call_later(timeout_s, self._expire, waiter)
        try:
            seat = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                # The seat was given in the very moment in which the caller went away.
                release(future.result())
            raise
        finally:
            timer.cancel()
            if waiter.queued:
                self._take(waiter)
        return Turn(seat, self._clock() - began, lambda used: self._settle(waiter, found, used))

    def pump(self) -> None:
        """Start as many as find a seat, fairest first.

        Costs an attempt for each that is started and one more for each group.
        """
        if not self.waiting:
            return
        full: set[Hashable] = set()
        while (waiter := self._next(full)) is not None:
            if waiter.future.done():
                # Its caller is about to leave.
                self._take(waiter)
                continue
            try:
                seat = waiter.attempt()
            except Exception as error:
                # It is that request's own and is raised where the request waits.
                self._take(waiter)
                waiter.future.set_exception(error)
                continue
            if seat is None:
                full.add(waiter.group)
                continue
            self._start(waiter, seat)

    def snapshot(self) -> QueueSnapshot:
        """Tell how the queue stands."""
        return QueueSnapshot(
            waiting=self.waiting,
            tenants=sum(len(tenants) for tenants in self._by_count.values()),
            longest=self._longest,
            tokens_per_s=self._rate.per_s(self._clock()),
            full=self._full,
            late=self._late,
        )

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` where the counts do not agree with what waits."""
        counts = {
            tenant: sum(len(waiters) for waiters in found.waiting.values())
            for tenant, found in self._tenants.items()
        }
        assert all(found.count == counts[tenant] for tenant, found in self._tenants.items())
        assert self.waiting == sum(counts.values())
        assert self._longest == max(counts.values(), default=0)
        for count, tenants in self._by_count.items():
            assert tenants
            assert all(counts[tenant] == count for tenant in tenants)
        assert self._heaps.keys() == self._in_group.keys()
        for group, heap in self._heaps.items():
            assert len(heap) <= 2 * len(self._tenants) + 64
            alive = {tenant for _, version, tenant in heap if self._is_valid(tenant, version)}
            assert alive >= {t for t, found in self._tenants.items() if group in found.waiting}

    # -- who is next ---------------------------------------------------------------------------

    def _next(self, without: set[Hashable]) -> _Waiter[Seat] | None:
        """The fairest of the groups that may still have capacity; it stays in the queue."""
        best: tuple[float, int, _Waiter[Seat]] | None = None
        for group in self._heaps.keys() - without:
            top = self._top(group)
            if best is None or top[:2] < best[:2]:
                best = top
        return None if best is None else best[2]

    def _top(self, group: Hashable) -> tuple[float, int, _Waiter[Seat]]:
        heap = self._heaps[group]
        while not self._is_in(group, heap[0][2], heap[0][1]):
            heappop(heap)
        counter, version, tenant = heap[0]
        return counter, version, self._tenants[tenant].waiting[group][0]

    def _is_valid(self, tenant: str | None, version: int) -> bool:
        found = self._tenants.get(tenant)
        return found is not None and found.version == version

    def _is_in(self, group: Hashable, tenant: str | None, version: int) -> bool:
        return self._is_valid(tenant, version) and group in self._tenants[tenant].waiting

    def _start(self, waiter: _Waiter[Seat], seat: Seat) -> None:
        found = self._tenants[waiter.tenant]
        self._stands_at = max(self._stands_at, found.counter)
        self._move(waiter.tenant, found, found.counter + waiter.tokens / waiter.weight)
        self._rate.add(waiter.tokens, self._clock())
        self._take(waiter)
        waiter.future.set_result(seat)

    def _settle(self, waiter: _Waiter[Seat], found: _Tenant[Seat], used: int) -> None:
        # Of a tenant that is forgotten, or came anew since, nothing is left to be put right.
        if self._tenants.get(waiter.tenant) is found:
            beyond = (used - waiter.tokens) / waiter.weight
            self._move(waiter.tenant, found, found.counter + beyond)

    def _move(self, tenant: str | None, found: _Tenant[Seat], counter: float) -> None:
        found.counter = counter
        found.version = next(self._versions)
        for group in found.waiting:
            self._enter_heap(group, tenant, found)

    def _enter_heap(self, group: Hashable, tenant: str | None, found: _Tenant[Seat]) -> None:
        heap = self._heaps.setdefault(group, [])
        heappush(heap, (found.counter, found.version, tenant))
        if len(heap) > 2 * len(self._tenants) + 64:
            # Entries that were overtaken while they lay deep in the heap.
            heap[:] = [entry for entry in heap if self._is_in(group, entry[2], entry[1])]
            heapify(heap)

    # -- who waits -----------------------------------------------------------------------------

    def _check_room(self, tenant: str | None, most: int) -> None:
        found = self._tenants.get(tenant)
        own = 0 if found is None else found.count
        if own >= most:
            self._full += 1
            raise RateLimited(
                "There is no capacity, and as many of this tenant's requests wait for it as may: "
                f"{most}.",
                retry_after_s=self._retry_s(),
            )
        if self.waiting < self.max_waiting:
            return
        if own + 1 >= self._longest:
            raise self._unavailable("There is no capacity, and no room to wait for it.")
        # Whoever has most waiting gives way, or a few could keep everybody else out.
        crowded = self._tenants[next(iter(self._by_count[self._longest]))]
        last = next(reversed(crowded.waiting.values()))[-1]
        self._refuse(last, "There is no capacity, and tenants that have less waiting go first.")

    def _push(self, waiter: _Waiter[Seat]) -> _Tenant[Seat]:
        found = self._tenants.get(waiter.tenant)
        if found is None:
            found = self._tenants[waiter.tenant] = _Tenant(self._stands_at, next(self._versions))
        elif not found.count:
            self._move(waiter.tenant, found, max(found.counter, self._stands_at))
        if waiter.group not in found.waiting:
            found.waiting[waiter.group] = deque()
            self._enter_heap(waiter.group, waiter.tenant, found)
        found.waiting[waiter.group].append(waiter)
        self._in_group[waiter.group] += 1
        self._tokens += waiter.tokens
        self._recount(waiter.tenant, found, 1)
        if self._look_again is None:
            loop = asyncio.get_running_loop()
            self._look_again = loop.call_later(LOOK_AGAIN_S, self._tick)
        return found

    def _take(self, waiter: _Waiter[Seat]) -> None:
        found = self._tenants[waiter.tenant]
        waiters = found.waiting[waiter.group]
        if waiters[0] is waiter:
            waiters.popleft()
        else:
            waiters.remove(waiter)
        waiter.queued = False
        if not waiters:
            del found.waiting[waiter.group]
        self._in_group[waiter.group] -= 1
        if not self._in_group[waiter.group]:
            del self._in_group[waiter.group], self._heaps[waiter.group]
        self._tokens -= waiter.tokens
        self._recount(waiter.tenant, found, -1)
        if not self.waiting:
            # Nobody left to be fair to.
            self._tenants.clear()
            self._stands_at = 0.0
        elif len(self._tenants) > self._prune_above:
            self._prune()

    def _recount(self, tenant: str | None, found: _Tenant[Seat], change: int) -> None:
        if found.count:
            del self._by_count[found.count][tenant]
        found.count += change
        self.waiting += change
        if found.count:
            self._by_count.setdefault(found.count, {})[tenant] = None
        # One step at most: a count changes by one.
        self._longest = max(self._longest, found.count)
        for count in (found.count - change, found.count):
            if not self._by_count.get(count, True):
                del self._by_count[count]
        if self._longest and self._longest not in self._by_count:
            self._longest -= 1

    def _prune(self) -> None:
        """Forget who neither waits nor is ahead: coming anew, they would begin there anyway."""
        self._tenants = {
            tenant: found
            for tenant, found in self._tenants.items()
            if found.count or found.counter > self._stands_at
        }
        self._prune_above = 2 * len(self._tenants) + MIN_TENANTS

    # -- time ----------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._look_again = None
        try:
            self.pump()
        finally:
            if self.waiting:
                loop = asyncio.get_running_loop()
                self._look_again = loop.call_later(LOOK_AGAIN_S, self._tick)

    def _expire(self, waiter: _Waiter[Seat]) -> None:
        if not waiter.future.done():
            self._refuse(waiter, "There was no capacity in time.")

    def _refuse(self, waiter: _Waiter[Seat], why: str) -> None:
        error = self._unavailable(why)
        self._take(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _unavailable(self, why: str) -> Unavailable:
        self._late += 1
        return Unavailable(why, retry_after_s=self._retry_s())

    def _retry_s(self) -> float:
        """Seconds in which what waits now should be served, from what was served lately."""
        rate = self._rate.per_s(self._clock())
        wait_s = self._tokens / rate if rate else MAX_RETRY_S
        return min(max(wait_s, MIN_RETRY_S), MAX_RETRY_S)


class _Rate:
    """Something a second, over a time that forgets."""

    def __init__(self) -> None:
        self._sum, self._at = 0.0, -math.inf

    def add(self, amount: float, now: float) -> None:
        self._decay(now)
        self._sum += amount

    def per_s(self, now: float) -> float:
        self._decay(now)
        return self._sum / RATE_MEMORY_S

    def _decay(self, now: float) -> None:
        self._sum *= math.exp((self._at - now) / RATE_MEMORY_S)
        self._at = now
