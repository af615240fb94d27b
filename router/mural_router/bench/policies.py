"""Ways to choose a replica, Mural's beside others'; each router has its own instance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import replace

from mural_router.bench.traces import Arrival
from mural_router.placement import (
    DEFAULT_POLICY,
    Fleet,
    LoadLedger,
    PlacementPolicy,
    PlacementRequest,
    choose,
)
from mural_router.placement.hashing import stable_hash

__all__ = [
    "POLICIES",
    "BoundedLoadRing",
    "LeastLoaded",
    "Mural",
    "Policy",
    "RoundRobin",
    "SizeBlind",
]


class Policy(ABC):
    """One router's way."""

    name: str

    @abstractmethod
    def observe(self, fleet: Fleet) -> None:
        """The fleet reported."""

    @abstractmethod
    def choose(self, arrival: Arrival) -> str | None:
        """The replica's name, or None: the request waits in the router."""

    @abstractmethod
    def started(self, replica: str, arrival: Arrival) -> None:
        """The request was sent there."""

    @abstractmethod
    def finished(self, replica: str, arrival: Arrival) -> None:
        """It ended."""


class _Counting(Policy):
    """Knows its own requests in flight and who is ready."""

    def __init__(self) -> None:
        self._in_flight: dict[str, int] = {}
        self._ready: list[str] = []

    def observe(self, fleet: Fleet) -> None:
        self._ready = [each.name for each in fleet.replicas if each.ready]

    def started(self, replica: str, arrival: Arrival) -> None:
        self._in_flight[replica] = self._in_flight.get(replica, 0) + 1

    def finished(self, replica: str, arrival: Arrival) -> None:
        self._in_flight[replica] -= 1


class RoundRobin(_Counting):
    """One after the other: what a Kubernetes service comes to."""

    name = "round-robin"

    def __init__(self) -> None:
        super().__init__()
        self._next = 0

    def choose(self, arrival: Arrival) -> str | None:
        self._next += 1
        return self._ready[self._next % len(self._ready)] if self._ready else None


class LeastLoaded(Policy):
    """The fewest sequences, by the same estimate that Mural's placement goes by."""

    name = "least loaded"

    def __init__(self) -> None:
        self._ledger = LoadLedger()
        self._ready: list[str] = []

    def observe(self, fleet: Fleet) -> None:
        self._ledger.observe(fleet)
        self._ready = [each.name for each in fleet.replicas if each.ready]

    def choose(self, arrival: Arrival) -> str | None:
        return min(self._ready, key=self._ledger.loads.of) if self._ready else None

    def started(self, replica: str, arrival: Arrival) -> None:
        self._ledger.start(replica, 1)

    def finished(self, replica: str, arrival: Arrival) -> None:
        self._ledger.finish(replica, 1)


class BoundedLoadRing(_Counting):
    """Consistent hashing with bounded loads, as KubeAI's strategy `PrefixHash` does it.

    The key is the adapter and the prompt's prefix; 256 points a replica on a ring; the first
    replica on the way whose own in-flight requests with this one stay within 1.25 times the mean
    (of this router's requests alone), else the first. KubeAI loads a model's adapters on all of
    its replicas beforehand; here they are loaded where requests arrive.
    """

    name = "bounded-load ring"
    POINTS = 256
    FACTOR = 1.25

    def __init__(self) -> None:
        super().__init__()
        self._ring: list[tuple[int, str]] = []

    def observe(self, fleet: Fleet) -> None:
        before = set(self._ready)
        super().observe(fleet)
        for name in before - set(self._ready):
            self._ring = [point for point in self._ring if point[1] != name]
        for name in set(self._ready) - before:
            for i in range(self.POINTS):
                insort(self._ring, (stable_hash(f"{name}{i}"), name))

    def choose(self, arrival: Arrival) -> str | None:
        if not self._ring:
            return None
        total = sum(self._in_flight.get(name, 0) for name in self._ready)
        most = self.FACTOR * (total + 1) / len(self._ready)
        begin = bisect_left(self._ring, (stable_hash(f"{arrival.adapter}{arrival.prefix}"), ""))
        for step in range(len(self._ring)):
            name = self._ring[(begin + step) % len(self._ring)][1]
            if total == 0 or self._in_flight.get(name, 0) + 1 <= most:
                return name
        return self._ring[begin % len(self._ring)][1]


class Mural(Policy):
    """`mural_router.placement`, with its defaults."""

    name = "Mural"
    policy = DEFAULT_POLICY

    def __init__(self) -> None:
        self._ledger = LoadLedger(self.policy)
        self._fleet = Fleet()

    def observe(self, fleet: Fleet) -> None:
        self._ledger.observe(fleet)
        self._fleet = fleet

    def choose(self, arrival: Arrival) -> str | None:
        request = PlacementRequest(arrival.adapter, prefix=arrival.prefix)
        choice = choose(request, self._fleet, self._ledger.loads, policy=self.policy)
        return None if choice is None else choice.replica.name

    def started(self, replica: str, arrival: Arrival) -> None:
        self._ledger.start(replica, 1, arrival.rank)

    def finished(self, replica: str, arrival: Arrival) -> None:
        self._ledger.finish(replica, 1, arrival.rank)


class SizeBlind(Mural):
    """The same, but every adapter counts alike: what ranks and bytes are good for is the
    difference."""

    name = "Mural, sizes unknown"
    policy = PlacementPolicy(rank_cost=0.0)

    def observe(self, fleet: Fleet) -> None:
        super().observe(Fleet(tuple(replace(each, host_bytes=0) for each in fleet.replicas)))


POLICIES: tuple[type[Policy], ...] = (RoundRobin, LeastLoaded, BoundedLoadRing, Mural)
