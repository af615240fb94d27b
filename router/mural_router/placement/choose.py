"""Which replica takes a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from math import ceil, inf
from typing import Literal, NamedTuple

from mural_router.placement.fleet import (
    PLACES_LOOKED_ON,
    AdapterFacts,
    Fleet,
    Homes,
    PlacementRequest,
    Replica,
)
from mural_router.placement.hashing import stable_hash
from mural_router.placement.ledger import Loads, cost_of
from mural_router.placement.policy import DEFAULT_POLICY, PlacementPolicy
from mural_router.placement.replicas import (
    SPARE,
    can_hold,
    fits,
    holds,
    is_crowded,
    replicas_for,
)

__all__ = [
    "Bound",
    "Choice",
    "OnlyHome",
    "Reason",
    "choose",
    "group_of",
    "has_room",
    "homes_of",
    "only_home",
    "placed_homes",
]

BASE_GROUPS = 1024
"""Groups of base requests fall into so many orders, which are kept; a few share one unharmed."""

Reason = Literal["resident", "home", "spilled", "prefix", "least_loaded", "over_bound"]
"""``resident``: one of the adapter's k homes, which holds it. ``home``: one of them, which must
load it. ``spilled``: all homes were over the bound, full or crowded; the next in the order.
``prefix`` and ``least_loaded``: a base request with and without something to share.
``over_bound``: those within the bound were full, so one beyond it took it."""


_Able = Callable[[Replica, str, AdapterFacts], bool]


class Choice(NamedTuple):
    """The replica that takes a request, and why."""

    replica: Replica
    reason: Reason
    k: int
    """Homes of the adapter; for the base the number of replicas to choose from."""
    homes: tuple[str, ...]
    """Their names, in the adapter's order; empty for the base."""


class Bound:
    """How much a replica may have before it is given more, for one request.

    ``c`` times its share, by weight, of the cost of all sequences with the new ones, rounded up:
    some replica is always below it. Over the replicas that the request may go to, no one counted
    with far more than most of them have (`cost_of`). No lower than what fills it lightly.
    """

    __slots__ = ("_costs", "_fleet", "_loads", "_per_weight", "_policy", "_request")

    def __init__(
        self, request: PlacementRequest, fleet: Fleet, loads: Loads, policy: PlacementPolicy
    ) -> None:
        self._request, self._fleet, self._loads, self._policy = request, fleet, loads, policy
        self._costs = loads.costs
        self._per_weight = -1.0

    def limit(self, replica: Replica) -> float:
        """The cost below which the replica is within the bound."""
        return max(self._share(replica), _light(replica, self._policy))

    def within(self, replica: Replica) -> bool:
        """Whether the replica may be given more."""
        cost = self._costs.get(replica.name, 0.0)
        return cost < _light(replica, self._policy) or cost < self._share(replica)

    def _share(self, replica: Replica) -> int:
        if self._per_weight < 0:
            self._per_weight = self._for_weight()
        return ceil(self._per_weight * replica.weight)

    def _for_weight(self) -> float:
        request, fleet = self._request, self._fleet
        total, weight = self._loads.total_cost, fleet.accepting_weight
        if request.candidates is not None:
            replicas = [fleet.replicas[i] for i in fleet.accepting]
            allowed = [each for each in replicas if each.name in request.candidates]
            total = cost_of(allowed, self._costs, self._policy)
            weight = sum(each.weight for each in allowed)
        rank = 0 if request.adapter is None else fleet.facts(request.adapter).rank
        added = request.sequences * (1 + self._policy.rank_cost * rank)
        return _per_weight(self._policy.load_bound, total + added, weight)


def has_room(
    replica: Replica, load: float, policy: PlacementPolicy = DEFAULT_POLICY, *, home: bool = True
) -> bool:
    """Whether a replica with this load takes another sequence soon enough to send it there.

    It may wait in line at home. Away from home it would wait to be loaded there besides, and take
    another's place in memory: it is sent there only to begin at once.
    """
    return load < room_of(replica, policy, home=home)


def room_of(
    replica: Replica, policy: PlacementPolicy = DEFAULT_POLICY, *, home: bool = True
) -> float:
    """Sequences below which a replica `has_room`."""
    if replica.kv_usage >= policy.kv_full and replica.waiting > 0:
        return 0.0
    if replica.max_num_seqs > 0:
        return (policy.overcommit if home else 1.0) * replica.max_num_seqs
    if replica.waiting <= 0:
        return inf if policy.max_waiting or not home else 0.0
    # Those that run do so already: what exceeds them would wait.
    return replica.running + (policy.max_waiting if home else 1)


def group_of(request: PlacementRequest) -> str | None:
    """What a request should meet with: its session, which shares most, else its prompt's prefix."""
    if request.session is not None:
        return f"session\0{request.session}"
    return None if request.prefix is None else f"prefix\0{request.prefix:x}"


def _eligible(
    request: PlacementRequest, fleet: Fleet, places: Iterable[int], able: _Able
) -> Iterator[int]:
    """Those of some positions that the request may go to, in their order."""
    adapter = request.adapter
    facts = None if adapter is None else fleet.facts(adapter)
    replicas, candidates, excluded = fleet.replicas, request.candidates, request.excluded
    for i in places:
        replica = replicas[i]
        if (
            replica.ready
            and replica.name not in excluded
            and (candidates is None or replica.name in candidates)
            and (adapter is None or facts is None or able(replica, adapter, facts))
        ):
            yield i


def homes_of(request: PlacementRequest, fleet: Fleet, k: int) -> list[int]:
    """The positions of the first k that could hold an adapter, whatever is pinned there.

    So the operator asks, which decides what is pinned. The base has no homes.
    """
    if request.adapter is None:
        return []
    order = fleet.members.order(request.adapter)
    return list(islice(_places(request, fleet, order, _can_hold), k))


def placed_homes(
    request: PlacementRequest, fleet: Fleet, k: int, declared: int | None
) -> list[int]:
    """The positions of the first k that can hold an adapter beside what is pinned there.

    Of a declared adapter where the operator has put it: it passes over a replica that is full, and
    those that the adapter's selector leaves out; and it puts an adapter onto a new replica before
    it takes it from an old one. So of a declared adapter's order those come first that hold it
    pinned.
    """
    adapter = request.adapter
    if adapter is None:
        return []
    if declared is None and _is_free(request):
        return _first_homes(adapter, fleet, k)
    found = _places(request, fleet, fleet.members.order(adapter))
    if declared is None:
        return list(islice(found, k))
    able = list(found)
    put = [i for i in able if _is_pinned(fleet.replicas[i], adapter)][:k]
    chosen = {*put, *[i for i in able if i not in put][: k - len(put)]}
    return [i for i in able if i in chosen]


def _first_homes(adapter: str, fleet: Fleet, k: int) -> list[int]:
    """Of a request that may go anywhere: what `_places` gives, in a third of its time."""
    facts, accepting, replicas = fleet.facts(adapter), fleet.accepting_set, fleet.replicas
    homes: list[int] = []
    for i in fleet.members.order(adapter):
        if i in accepting and fits(replicas[i], adapter, facts):
            homes.append(i)
            if len(homes) == k:
                break
    return homes


def _is_pinned(replica: Replica, adapter: str) -> bool:
    residency = replica.adapters.get(adapter)
    return residency is not None and residency.pinned and holds(replica, adapter)


def _can_hold(replica: Replica, adapter: str, facts: AdapterFacts) -> bool:
    return can_hold(replica, facts)


def _places(
    request: PlacementRequest, fleet: Fleet, ordered: Iterable[int], able: _Able = fits
) -> Iterator[int]:
    """The eligible ones among those accepting."""
    accepting = fleet.accepting_set
    if ordered is fleet.accepting and request.adapter is None and _is_free(request):
        return iter(ordered)  # All of them: looking at each takes a third of such a choice.
    return _eligible(request, fleet, (i for i in ordered if i in accepting), able)


def _is_free(request: PlacementRequest) -> bool:
    """Whether it may go to any replica that can take it."""
    return request.candidates is None and not request.excluded


def choose(
    request: PlacementRequest,
    fleet: Fleet,
    loads: Loads,
    *,
    declared: int | None = None,
    policy: PlacementPolicy = DEFAULT_POLICY,
) -> Choice | None:
    """The replica for a request, or None: its homes are full and no seat is free elsewhere.

    Among the adapter's k homes (`placed_homes`) the least loaded that holds it and is within the
    bound; else one of them that is within the bound; else the next in the order that is. Loads are
    of cost, where a rank counts (``loads`` are by the same policy, and its `rank_cost`). A home
    that does not hold it and is crowded (`is_crowded`) comes after the next few in the order that
    are not, and one that is nearly so after those of them that hold it. With k above 1 the requests
    of one group meet: a second rendezvous hash among the homes comes before their load. Away from
    home a request is sent only where it begins at once. Stale replicas are asked when no fresh one
    will do. ``declared`` is the adapter's k where an object or the operator says it.
    """
    if request.adapter is None:
        return _Chooser(request, fleet, loads, policy).for_base()
    homes = _homes(request, request.adapter, fleet, declared, policy)
    if len(homes.resident) == 1:
        # So it is nearly always: the rest would say the same of a home that has little to do.
        replica = fleet.replicas[homes.resident[0]]
        if loads.cost(replica.name) < _light(replica, policy) and has_room(
            replica, loads.of(replica.name), policy
        ):
            return Choice(replica, "resident", homes.k, homes.names)
    return _Chooser(request, fleet, loads, policy).for_adapter(request.adapter, homes)


class OnlyHome(NamedTuple):
    """The one replica that is an adapter's home and holds it, where any may be chosen.

    For as long as the fleet, the policy and what is declared are the same. It holds no part of the
    fleet, which would stay in memory with it.
    """

    place: int
    """Its position among the fleet's replicas."""
    name: str
    weight: float
    room: float
    """As `room_of`."""
    light: float
    """The cost below which a replica is within the bound, whatever the others have."""
    load_bound: float
    fleet_weight: float
    rank: int
    """The adapter's; 0: unknown."""
    cost: float
    """Of one sequence under it."""

    def takes_one_more(self, loads: Loads) -> bool:
        """Whether `choose` gives it a request of one sequence."""
        if loads.of(self.name) >= self.room:
            return False
        there = loads.cost(self.name)
        if there < self.light:
            return True
        total = loads.total_cost + self.cost
        return there < ceil(_per_weight(self.load_bound, total, self.fleet_weight) * self.weight)


def only_home(
    adapter: str,
    fleet: Fleet,
    *,
    declared: int | None = None,
    policy: PlacementPolicy = DEFAULT_POLICY,
) -> OnlyHome | None:
    """An adapter's, where it has one: so it is with nearly all."""
    homes = _homes(PlacementRequest(adapter), adapter, fleet, declared, policy)
    if len(homes.resident) != 1:
        return None
    place = homes.resident[0]
    replica, rank = fleet.replicas[place], fleet.facts(adapter).rank
    return OnlyHome(
        place,
        replica.name,
        replica.weight,
        room_of(replica, policy),
        _light(replica, policy),
        policy.load_bound,
        fleet.accepting_weight,
        rank,
        1 + policy.rank_cost * rank,
    )


def _per_weight(load_bound: float, cost: float, weight: float) -> float:
    # An error in the last bits of a sum must not add a whole sequence.
    return max(0.0, load_bound * cost / (weight or 1) - 1e-9)


def _light(replica: Replica, policy: PlacementPolicy) -> float:
    """The cost below which a replica is within the bound, whatever the others have."""
    return policy.light * replica.max_num_seqs or policy.light_sequences


def _homes(
    request: PlacementRequest,
    adapter: str,
    fleet: Fleet,
    declared: int | None,
    policy: PlacementPolicy,
) -> Homes:
    """The adapter's homes for a request, which are the same for all that may go anywhere."""
    anywhere = _is_free(request)
    homes = fleet.kept_homes(adapter, declared, policy) if anywhere else None
    if homes is None:
        k = replicas_for(adapter, fleet, declared, policy)
        places = placed_homes(request, fleet, k, declared)
        resident = tuple([i for i in places if holds(fleet.replicas[i], adapter)])
        homes = Homes(
            policy,
            declared,
            k,
            tuple(places),
            tuple([fleet.replicas[i].name for i in places]),
            resident,
            # Nearly always all of them hold it.
            () if len(resident) == len(places) else tuple([i for i in places if i not in resident]),
        )
        if anywhere:
            fleet.keep_homes(adapter, homes)
    return homes


class _Chooser:
    """One choice; it holds what all steps need."""

    __slots__ = ("_bound", "_fleet", "_loads", "_policy", "_request")

    def __init__(
        self, request: PlacementRequest, fleet: Fleet, loads: Loads, policy: PlacementPolicy
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._loads = loads
        self._policy = policy
        self._bound = Bound(request, fleet, loads, policy)

    def for_adapter(self, adapter: str, homes: Homes) -> Choice | None:
        replicas, k, names = self._fleet.replicas, homes.k, homes.names
        if (found := self._pick(homes.resident)) is not None:
            return Choice(replicas[found], "resident", k, names)
        if (found := self._first(self._roomy(adapter, homes.others, SPARE))) is not None:
            return Choice(replicas[found], "home", k, names)
        near = self._near(adapter, homes.places)
        if (found := self._first(self._holding(adapter, near), home=False)) is not None:
            return Choice(replicas[found], "spilled", k, names)
        if (found := self._first(self._roomy(adapter, homes.others))) is not None:
            return Choice(replicas[found], "home", k, names)
        if (found := self._first(self._roomy(adapter, near), home=False)) is not None:
            return Choice(replicas[found], "spilled", k, names)
        # What is wanted where it is has to be forgotten somewhere.
        if (found := self._first(homes.others)) is not None:
            return Choice(replicas[found], "home", k, names)
        if (found := self._first(self._away(adapter, homes.places), home=False)) is not None:
            return Choice(replicas[found], "spilled", k, names)
        return self._over_bound(adapter, k, names, homes.places)

    def _near(self, adapter: str, homes: tuple[int, ...]) -> tuple[int, ...]:
        """The next few in the order: one adapter's choice looks at no more than so many."""
        places = self._places(self._fleet.members.order(adapter))
        return tuple(islice((i for i in places if i not in homes), PLACES_LOOKED_ON))

    def _holding(self, adapter: str, places: Iterable[int]) -> Iterator[int]:
        return (i for i in places if holds(self._fleet.replicas[i], adapter))

    def _roomy(self, adapter: str, places: Iterable[int], spare: float = 0.0) -> Iterator[int]:
        """Those that hold the adapter, or have room for it beside what is wanted there."""
        fleet = self._fleet
        facts = fleet.facts(adapter)
        return (i for i in places if not is_crowded(fleet.replicas[i], adapter, facts, spare))

    def for_base(self) -> Choice | None:
        fleet, group = self._fleet, group_of(self._request)
        k = len(fleet.accepting)
        if group is not None:
            key = f"\0base\0{stable_hash(group) % BASE_GROUPS}"
            places = self._places(fleet.members.order(key))
            if (found := self._first(places)) is not None:
                return Choice(fleet.replicas[found], "prefix", k, ())
        if (found := self._least_loaded(self._places(fleet.accepting), bounded=True)) is not None:
            return Choice(fleet.replicas[found], "least_loaded", k, ())
        return self._over_bound("", k, (), tuple(self._places(fleet.members.order(""))))

    def _over_bound(
        self, key: str, k: int, names: tuple[str, ...], homes: tuple[int, ...]
    ) -> Choice | None:
        found = self._least_loaded(homes, bounded=False)
        if found is None:
            home = self._request.adapter is None  # The base is at home everywhere.
            found = self._least_loaded(self._away(key, homes), bounded=False, home=home)
        if found is None:
            return None
        return Choice(self._fleet.replicas[found], "over_bound", k, names)

    def _away(self, key: str, homes: tuple[int, ...]) -> Iterator[int]:
        """The rest of the order, then those that have not been heard of."""
        places = self._places(self._fleet.members.order(key))
        return chain((i for i in places if i not in homes), self._stale_places(key))

    def _places(self, ordered: Iterable[int]) -> Iterator[int]:
        return _places(self._request, self._fleet, ordered)

    def _stale_places(self, key: str) -> Iterator[int]:
        """The eligible ones that have not been heard of, where others have."""
        accepting, ordered = self._fleet.accepting_set, self._fleet.members.order(key)
        places = (i for i in ordered if i not in accepting)
        return _eligible(self._request, self._fleet, places, fits)

    def _pick(self, homes: Sequence[int]) -> int | None:
        """One of the homes that hold the adapter: by group, else by load."""
        if len(homes) == 1:
            return self._first(homes)
        group = group_of(self._request)
        if group is None:
            return self._least_loaded(homes, bounded=True)
        return self._first(self._fleet.members.ranked(homes, group))

    def _first(self, places: Iterable[int], *, home: bool = True) -> int | None:
        replicas, bound = self._fleet.replicas, self._bound
        for i in places:
            if bound.within(replicas[i]) and self._has_room(replicas[i], home):
                return i
        return None

    def _least_loaded(
        self, places: Iterable[int], *, bounded: bool, home: bool = True
    ) -> int | None:
        """By cost for its weight; the first of those that tie."""
        replicas, costs = self._fleet.replicas, self._loads.costs
        best, least = None, float("inf")
        for i in places:
            replica = replicas[i]
            cost = costs.get(replica.name, 0.0) / replica.weight
            if (
                cost < least
                and (not bounded or self._bound.within(replica))
                and self._has_room(replica, home)
            ):
                best, least = i, cost
        return best

    def _has_room(self, replica: Replica, home: bool) -> bool:
        return has_room(replica, self._loads.of(replica.name), self._policy, home=home)
