"""Why a request would go where it would go: one row a replica, for people."""

from __future__ import annotations

from dataclasses import dataclass

from mural_router.placement.choose import Bound, choose, group_of, has_room, placed_homes
from mural_router.placement.fleet import Fleet, PlacementRequest, Replica
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
    load: float
    """What they cost, in sequences of the base: ranks count."""
    limit: float
    """The load at which it is given no more while another has less."""
    group_place: int | None
    """Among the homes, for the requests that share this one's prefix or session."""
    against: tuple[str, ...]
    """What keeps the request from it; empty: nothing."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A choice and everything that led to it."""

    adapter: str | None
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
    k = _k(request, fleet, declared, policy)
    homes = placed_homes(request, fleet, k, declared)
    group_places = _group_places(request, fleet, homes)
    rows = []
    for place, i in enumerate(fleet.members.order(key)):
        replica = fleet.replicas[i]
        sequences = loads.of(replica.name)
        home = i in homes or request.adapter is None
        against = _against(request, fleet, replica, home=home)
        if not bound.within(replica):
            against += ("over the bound",)
        if not has_room(replica, sequences, policy, home=home):
            against += ("full" if home else "no seat is free at once",)
        rows.append(
            Row(
                replica=replica.name,
                place=place,
                score=fleet.members.score(i, key.encode()),
                home=i in homes,
                residency=_residency(replica, request.adapter),
                sequences=sequences,
                load=loads.cost(replica.name),
                limit=bound.limit(replica),
                group_place=group_places.get(i),
                against=against,
            )
        )
    return Explanation(
        adapter=request.adapter,
        k=k,
        choice=None if choice is None else choice.replica.name,
        reason="nobody that may take it has room" if choice is None else choice.reason,
        rows=tuple(rows),
    )


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
    request: PlacementRequest, fleet: Fleet, replica: Replica, *, home: bool
) -> tuple[str, ...]:
    adapter = request.adapter
    facts = None if adapter is None else fleet.facts(adapter)
    grounds = {
        "not ready": not replica.ready,
        "stale": replica.stale,
        "excluded": replica.name in request.excluded,
        "not a candidate": request.candidates is not None
        and replica.name not in request.candidates,
        "cannot hold the adapter": facts is not None and not can_hold(replica, facts),
    }
    if adapter is not None and facts is not None and can_hold(replica, facts):
        grounds["what is pinned there leaves too little memory"] = not fits(replica, adapter, facts)
        crowded = is_crowded(replica, adapter, facts)
        grounds["crowded: it would forget what is wanted there"] = crowded
        grounds["nearly crowded: those near that hold it come first"] = (
            home and not crowded and is_crowded(replica, adapter, facts, SPARE)
        )
    return tuple(ground for ground, holds_true in grounds.items() if holds_true)


def _residency(replica: Replica, adapter: str | None) -> str:
    if adapter is None or not replica.reports:
        return "unknown"
    residency = replica.adapters.get(adapter)
    if residency is None:
        return "absent"
    return "loading" if residency.loading else residency.level
