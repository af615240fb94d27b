"""Sends requests to replicas by placement's choice, and keeps account of every attempt."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, Protocol

import msgspec

from mural_router.fleet.endpoint import Endpoint, plain_authority
from mural_router.placement import (
    Base,
    Explanation,
    Fleet,
    LoadLedger,
    PlacementPolicy,
    PlacementRequest,
    Replica,
    choose,
    explain,
)
from mural_router.routing.breaker import FAILURES, Breakers
from mural_router.routing.metrics import RouterMetrics

__all__ = ["BY_GATEWAY", "Attempt", "Dispatch", "FleetSource", "undeclared"]


class FleetSource(Protocol):
    """What dispatch asks of a `FleetView`."""

    @property
    def fleet(self) -> Fleet: ...

    @property
    def base(self) -> Base: ...

    def endpoint(self, name: str) -> Endpoint | None: ...

    def suspect(self, name: str) -> None: ...

    def subscribe(self, callback: Callable[[Fleet], None]) -> Callable[[], None]: ...


BY_GATEWAY: Final = "gateway"
"""The reason of an attempt that a gateway, and not placement, chose the replica of."""


def undeclared(adapter: str) -> None:
    """Without objects no adapter has a k of its own."""


class Attempt(msgspec.Struct, eq=False):
    """One request at one replica, until `Dispatch.end`."""

    endpoint: Endpoint
    sequences: int
    rank: int
    """Of the adapter, as far as it was known when it was sent; 0: none, or unknown."""
    reason: str
    """Of the choice, as placement names it."""
    digest: str | None
    """Of what the replica holds under the adapter's name; None: it holds none, or cannot say."""
    cold: bool
    """It may have to load the adapter first."""
    answered: bool = False
    ended: bool = False


class Dispatch:
    """For one event loop."""

    def __init__(
        self,
        source: FleetSource,
        breakers: Breakers,
        metrics: RouterMetrics,
        *,
        policy: PlacementPolicy,
        clock: Callable[[], float],
        freed: Callable[[], None],
        declared: Callable[[str], int | None] = undeclared,
    ) -> None:
        """``freed`` is told whenever there may be capacity that was not there before.

        ``declared`` gives the k that an object declares for an exact name, asked for each choice.
        """
        self.source = source
        self.breakers = breakers
        self.ledger = LoadLedger(policy)
        self._metrics = metrics
        self._clock = clock
        self._freed = freed
        self.fell_silent: Callable[[Endpoint], None] = lambda endpoint: None
        """Told of each replica that answers nothing any more, for as long as that is so."""
        self.declared_for = declared
        """The k that an object declares for an exact name."""
        self._by_authority: dict[str, str] = {}
        self._least_rank = 0
        self._least_bytes = 0
        self._unsubscribe = source.subscribe(self._observe)
        self._observe(source.fleet)

    @property
    def policy(self) -> PlacementPolicy:
        """Another one may be set at any time."""
        return self.ledger.policy

    @policy.setter
    def policy(self, policy: PlacementPolicy) -> None:
        self.ledger.policy = policy
        self.ledger.observe(self.source.fleet)

    def close(self) -> None:
        """Look at the fleet no more."""
        self._unsubscribe()

    @property
    def now(self) -> float:
        """On the clock that breakers go by."""
        return self._clock()

    # -- choosing -----------------------------------------------------------------------------

    def take(self, request: PlacementRequest) -> Attempt | None:
        """A place for a request, which `end` gives back; None: nobody that may has room."""
        now = self._clock()
        request = self._without_broken(request, now)
        choice = choose(
            request,
            self.source.fleet,
            self.ledger.loads,
            declared=self.declared(request),
            policy=self.policy,
        )
        if choice is None:
            return None
        endpoint = self.source.endpoint(choice.replica.name)
        if endpoint is None:
            return None
        rank, digest, cold = 0, None, False
        if request.adapter is not None:
            rank = self.source.fleet.facts(request.adapter).rank
            digest, cold = self.residency(request.adapter, choice.replica)
        attempt = Attempt(
            endpoint=endpoint,
            sequences=request.sequences,
            rank=rank,
            reason=choice.reason,
            digest=digest,
            cold=cold,
        )
        self.ledger.start(endpoint.name, request.sequences, rank)
        self.breakers.begin(endpoint.name, attempt, now)
        return attempt

    def explain(self, request: PlacementRequest) -> Explanation:
        """Why a request would go where it would go."""
        return explain(
            self._without_broken(request, self._clock()),
            self.source.fleet,
            self.ledger.loads,
            declared=self.declared(request),
            policy=self.policy,
        )

    def declared(self, request: PlacementRequest) -> int | None:
        """The k that is declared for what is asked for; None: it follows from the load."""
        return None if request.adapter is None else self.declared_for(request.adapter)

    @staticmethod
    def residency(adapter: str, replica: Replica) -> tuple[str | None, bool]:
        """The digest of what a replica holds under a name, and whether it may have to load it."""
        held = replica.adapters.get(adapter)
        if held is None:
            return None, True
        return held.digest or None, held.loading or held.level == "disk"

    def group(self, request: PlacementRequest) -> Hashable:
        """Requests that want the same capacity: where one finds none, no other of them will."""
        if request.candidates is not None:
            return request.candidates
        if request.adapter is None:
            return None
        facts = self.source.fleet.facts(request.adapter)
        if facts.rank <= self._least_rank and facts.bytes <= self._least_bytes:
            return None
        # Not every replica can hold it: others may find room where this one cannot.
        return request.adapter

    def names_of(self, authorities: frozenset[str]) -> frozenset[str]:
        """The replicas at some ``host:port``; unknown ones are left out."""
        found = (self._by_authority.get(plain_authority(each)) for each in authorities)
        return frozenset(name for name in found if name is not None)

    # -- what became of it --------------------------------------------------------------------

    def answered(self, attempt: Attempt, status: int) -> None:
        """The replica answered with a status."""
        attempt.answered = True
        if status in FAILURES:
            self._count_failure(attempt)
        else:
            self.breakers.succeeded(attempt.endpoint.name, attempt, self._clock())

    def moved(self, attempt: Attempt, authority: str) -> Attempt | None:
        """A gateway sent it elsewhere than it was told. Ends the attempt, and gives the one that
        is really under way, for its `end`; None: nobody of the fleet has it."""
        self.end(attempt)
        self._metrics.choices[BY_GATEWAY] += 1
        name = self._by_authority.get(plain_authority(authority))
        endpoint = None if name is None else self.source.endpoint(name)
        if endpoint is None:
            return None
        sequences, rank = attempt.sequences, attempt.rank
        moved = Attempt(endpoint, sequences, rank, BY_GATEWAY, digest=None, cold=True)
        self.ledger.start(endpoint.name, sequences, rank)
        self.breakers.begin(endpoint.name, moved, self._clock())
        self._metrics.replica(endpoint.name).attempts += 1
        return moved

    def unreachable(self, attempt: Attempt) -> None:
        """No connection, or one that broke before the answer."""
        self._count_failure(attempt)
        self.source.suspect(attempt.endpoint.name)

    def failed(self, attempt: Attempt) -> None:
        """It did not answer in time, or broke off. A cold load that takes long is no failure."""
        if attempt.answered or not attempt.cold:
            self._count_failure(attempt)

    def end(self, attempt: Attempt) -> None:
        """The attempt is over, however it went. Idempotent."""
        if attempt.ended:
            return
        attempt.ended = True
        self.ledger.finish(attempt.endpoint.name, attempt.sequences, attempt.rank)
        self.breakers.ended(attempt.endpoint.name, attempt)
        self._freed()

    def left(self, name: str, rank: int, attempt: object) -> None:
        """One sequence that `ledger` was told of has ended at a replica, answered well.

        ``attempt``: anything that stands for it, and for no other.
        """
        self.ledger.add(name, -1, -rank)
        if self.breakers.troubled:
            self.breakers.succeeded(name, attempt, self._clock())
        self._freed()

    def dropped(self, name: str, rank: int) -> None:
        """One such sequence has ended by a fault of the router's: it says nothing of a replica."""
        self.ledger.add(name, -1, -rank)
        self._freed()

    # -- inside -------------------------------------------------------------------------------

    def _without_broken(self, request: PlacementRequest, now: float) -> PlacementRequest:
        broken = self.breakers.excluded(now)
        if not broken:
            return request
        return PlacementRequest(
            adapter=request.adapter,
            prefix=request.prefix,
            session=request.session,
            sequences=request.sequences,
            candidates=request.candidates,
            excluded=request.excluded | broken,
        )

    def _count_failure(self, attempt: Attempt) -> None:
        self.breakers.failed(attempt.endpoint.name, attempt, self._clock())
        self._metrics.replica(attempt.endpoint.name).failures += 1

    def _observe(self, fleet: Fleet) -> None:
        self.ledger.observe(fleet)
        names = frozenset(replica.name for replica in fleet.replicas)
        self.breakers.keep(names)
        self._metrics.keep(names)
        self._by_authority = {}
        for name in names:
            endpoint = self.source.endpoint(name)
            if endpoint is not None:
                self._by_authority[plain_authority(endpoint.authority)] = name
        accepting = [fleet.replicas[i] for i in fleet.accepting]
        # 0 stands for unknown, which everything fits.
        self._least_rank = min((each.max_lora_rank or 1 << 30 for each in accepting), default=0)
        self._least_bytes = min(
            ((each.host_bytes or 1 << 60) - each.use.pinned_bytes for each in accepting), default=0
        )
        self._freed()
        for replica in fleet.replicas:
            if replica.silent and (endpoint := self.source.endpoint(replica.name)) is not None:
                self.fell_silent(endpoint)
