"""Why a request would go where it would go: one row a replica, for people."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mural_router.placement.choose import Bound, choose, group_of, has_room, placed_homes
from mural_router.placement.fleet import AdapterFacts, Fleet, PlacementRequest, Replica
from mural_router.placement.ledger import Loads
from mural_router.placement.policy import DEFAULT_POLICY, PlacementPolicy
from mural_router.placement.replicas import SPARE, can_hold, fits, is_crowded, replicas_for

__all__ = ["Explanation", "Row", "explain"]


@dataclass(frozen=True, slots=True)
class Row:
    """One replica as the choice saw it."""

    replica: str
    place: int
    """In the adapter's order over all replicas, from 0."""
    score: float
    """Of the rendezvous hash: the order is by it, descending."""
    home: bool
    residency: str
    """``slot``, ``host``, ``disk``, ``loading``, ``absent`` or ``unknown``."""
    sequences: int
    """Those there, as estimated now."""
    cost: float
    """Theirs, in sequences of the base: ranks count."""
    cost_limit: float
    """The cost at which it is given no more while another has less."""
    host_bytes: int | None
    """Host memory for adapters; None: unknown."""
    pinned_bytes: int
    """Of it, which no other adapter can have."""
    wanted_bytes: int
    """Of the adapters that would be loaded again soon, pinned ones included."""
    wanted: int
    """How many those are."""
    max_cpu_loras: int | None
    """Adapters in host memory at a time; None: unknown."""
    group_place: int | None
    """Among the homes, for the requests that share this one's prefix or session."""
    against: tuple[str, ...]
    """What keeps the request from it; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A choice and everything that led to it."""

    adapter: str | None
    known: bool
    """False: no replica tells of the adapter now; what follows is for one of unknown rank."""
    rank: int | None
    """As the replicas tell it; None: unknown, and for the base."""
    bytes: int | None
    """The same."""
    cost: float
    """Of one sequence, in sequences of the base; one of unknown rank counts as the base."""
    rank_cost: float
    """What each rank adds to it: the policy's."""
    k: int
    choice: str | None
    """The replica's name; None: the request waits."""
    reason: str
    rows: tuple[Row, ...]


def explain(
    request: PlacementRequest,
    fleet: Fleet,
    loads: Loads,
    *,
    declared: int | None = None,
    policy: PlacementPolicy = DEFAULT_POLICY,
) -> Explanation:
    """The same decision as `choose`, with its grounds."""
    choice = choose(request, fleet, loads, declared=declared, policy=policy)
    bound = Bound(request, fleet, loads, policy)
    key = request.adapter or ""
    facts = None if request.adapter is None else fleet.facts(request.adapter)
    rank = 0 if facts is None else facts.rank
    k = _k(request, fleet, declared, policy)
    homes = placed_homes(request, fleet, k, declared)
    group_places = _group_places(request, fleet, homes)
    rows = []
    for place, i in enumerate(fleet.members.order(key)):
        replica = fleet.replicas[i]
        home = i in homes or request.adapter is None
        rows.append(
            Row(
                replica=replica.name,
                place=place,
                score=round(fleet.members.score(i, key.encode()), 3),
                home=i in homes,
                residency=_residency(replica, request.adapter),
                sequences=loads.of(replica.name),
                cost=round(loads.cost(replica.name), 3),
                cost_limit=round(bound.limit(replica), 3),
                host_bytes=replica.host_bytes or None,
                pinned_bytes=replica.use.pinned_bytes,
                wanted_bytes=replica.use.wanted_bytes,
                wanted=replica.use.wanted,
                max_cpu_loras=replica.max_cpu_loras or None,
                group_place=group_places.get(i),
                against=tuple(_against(request, facts, replica, bound, loads, policy, home=home)),
            )
        )
    return Explanation(
        adapter=request.adapter,
        known=request.adapter is None
        or any(request.adapter in replica.adapters for replica in fleet.replicas),
        rank=rank or None,
        bytes=None if facts is None else facts.bytes or None,
        cost=round(1 + policy.rank_cost * rank, 3),
        rank_cost=policy.rank_cost,
        k=k,
        choice=None if choice is None else choice.replica.name,
        reason=_nobody(fleet) if choice is None else choice.reason,
        rows=tuple(rows),
    )


def _nobody(fleet: Fleet) -> str:
    return "nobody that may take it has room" if fleet.accepting else "none is ready"


def _k(
    request: PlacementRequest, fleet: Fleet, declared: int | None, policy: PlacementPolicy
) -> int:
    if request.adapter is None:
        return len(fleet.accepting)
    return replicas_for(request.adapter, fleet, declared, policy)


def _group_places(request: PlacementRequest, fleet: Fleet, homes: list[int]) -> dict[int, int]:
    group = group_of(request)
    if group is None or len(homes) < 2:
        return {}
    return {i: place for place, i in enumerate(fleet.members.ranked(homes, group))}


def _against(
    request: PlacementRequest,
    facts: AdapterFacts | None,
    replica: Replica,
    bound: Bound,
    loads: Loads,
    policy: PlacementPolicy,
    *,
    home: bool,
) -> Iterator[str]:
    if not replica.ready:
        yield "not ready"
    if replica.stale:
        yield "stale"
    if _unheard(replica):
        return  # All else would be said of the zeros that stand for what is unknown.
    if replica.name in request.excluded:
        yield "excluded"
    if request.candidates is not None and replica.name not in request.candidates:
        yield "not a candidate"
    if request.adapter is not None and facts is not None:
        yield from _against_holding(request.adapter, facts, replica, home=home)
    if not bound.within(replica):
        yield "over the bound"
    if not has_room(replica, loads.of(replica.name), policy, home=home):
        yield "full" if home else "no seat is free at once"


def _against_holding(
    adapter: str, facts: AdapterFacts, replica: Replica, *, home: bool
) -> Iterator[str]:
    if not can_hold(replica, facts):
        yield f"cannot hold it: {_too_much(facts, replica)}"
        return
    if not fits(replica, adapter, facts):
        yield (
            f"pinned: {_mb(replica.use.pinned_bytes)} of {_mb(replica.host_bytes)} are pinned, "
            f"{_mb(facts.bytes)} do not fit beside"
        )
    if is_crowded(replica, adapter, facts):
        yield f"crowded: {_wanted(replica)}"
    elif home and is_crowded(replica, adapter, facts, SPARE):
        yield f"nearly crowded: {_wanted(replica, SPARE)}"


def _too_much(facts: AdapterFacts, replica: Replica) -> str:
    """Why `can_hold` says no."""
    if replica.slots == 0:
        return "no slots"
    if 0 < replica.max_lora_rank < facts.rank:
        return f"rank {facts.rank} above {replica.max_lora_rank}"
    return f"{_mb(facts.bytes)} above its {_mb(replica.host_bytes)}"


def _wanted(replica: Replica, spare: float = 0.0) -> str:
    """Why `is_crowded` says yes: by number, else by size."""
    use = replica.use
    if 0 < replica.max_cpu_loras * (1 - spare) < use.wanted + 1:
        return f"{use.wanted} of {replica.max_cpu_loras} adapters are wanted there"
    return f"{_mb(use.wanted_bytes)} of {_mb(replica.host_bytes)} are wanted there"


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


def _unheard(replica: Replica) -> bool:
    """Whether nothing has ever been heard of it."""
    return replica.report == 0 and replica.stale and not replica.ready


def _residency(replica: Replica, adapter: str | None) -> str:
    if adapter is None or not replica.reports or _unheard(replica):
        return "unknown"
    residency = replica.adapters.get(adapter)
    if residency is None:
        return "absent"
    return "loading" if residency.loading else residency.level
