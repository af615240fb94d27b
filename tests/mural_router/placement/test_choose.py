"""The rules of a choice, one row each. Homes are named by their place in the adapter's order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from mural_router.placement import (
    Fleet,
    Loads,
    PlacementPolicy,
    PlacementRequest,
    Replica,
    Residency,
    choose,
    explain,
    order,
    reported_loads,
)
from tests.mural_router.placement.four_replicas import (
    ADAPTER,
    CAN,
    FIRST,
    HELD,
    LAST,
    LOADING,
    ON_DISK,
    SECOND,
    THIRD,
    Case,
    busy,
    chosen,
    fleet,
)

CASES = [
    Case("an adapter nobody has goes to its first home", FIRST, "home"),
    Case(
        "it stays home though others are idle, as long as home is within the bound",
        FIRST,
        "resident",
        fleet=fleet(first=busy(7, adapters=HELD)),
    ),
    Case(
        "a copy elsewhere does not draw it away from home",
        FIRST,
        "home",
        fleet=fleet(last=busy(0, adapters=HELD)),
    ),
    Case(
        "with home over the bound the next in the order takes it",
        SECOND,
        "spilled",
        fleet=fleet(first=busy(20, adapters=HELD)),
    ),
    Case(
        "with the next over the bound too, the one after it",
        THIRD,
        "spilled",
        fleet=fleet(first=busy(20, adapters=HELD), second=busy(20)),
    ),
    Case(
        "of two homes that hold it the less loaded takes it",
        SECOND,
        "resident",
        k=2,
        fleet=fleet(first=busy(6, adapters=HELD), second=busy(5, adapters=HELD)),
    ),
    Case(
        "of two homes equally loaded the first takes it",
        FIRST,
        "resident",
        k=2,
        fleet=fleet(first=busy(5, adapters=HELD), second=busy(5, adapters=HELD)),
    ),
    Case(
        "the home that holds it comes before an idle home that does not",
        SECOND,
        "resident",
        k=2,
        fleet=fleet(second=busy(6, adapters=HELD)),
    ),
    Case(
        "a home that is loading it counts as holding it",
        SECOND,
        "resident",
        k=2,
        fleet=fleet(second=busy(6, adapters=LOADING)),
    ),
    Case(
        "a copy on disk is not in memory",
        SECOND,
        "resident",
        k=2,
        fleet=fleet(first=busy(0, adapters=ON_DISK), second=busy(6, adapters=HELD)),
    ),
    Case(
        "when those that hold it are over the bound another home loads it",
        SECOND,
        "home",
        k=2,
        fleet=fleet(first=busy(20, adapters=HELD)),
    ),
    Case(
        "a home that cannot say what it holds is taken to hold it",
        FIRST,
        "resident",
        fleet=fleet(first=Replica("", reports=False)),
    ),
    Case(
        "a home that is not ready is none",
        SECOND,
        "home",
        fleet=fleet(first=replace(CAN, ready=False, adapters=HELD)),
    ),
    Case(
        "nor is one that is stale while others are fresh",
        SECOND,
        "home",
        fleet=fleet(first=replace(CAN, stale=True, adapters=HELD)),
    ),
    Case(
        "a stale one serves when no fresh one will",
        FIRST,
        "spilled",
        fleet=fleet(
            first=replace(CAN, stale=True),
            second=replace(CAN, slots=0),
            third=replace(CAN, slots=0),
            last=replace(CAN, slots=0),
        ),
    ),
    Case(
        "a replica without slots for adapters is no home",
        SECOND,
        "home",
        fleet=fleet(first=replace(CAN, slots=0)),
    ),
    Case(
        "nor is one whose ranks are too small for it",
        SECOND,
        "resident",
        fleet=fleet(first=replace(CAN, max_lora_rank=8), second=busy(1, adapters=HELD)),
    ),
    Case(
        "nor one whose memory is",
        SECOND,
        "resident",
        fleet=fleet(first=replace(CAN, host_bytes=1000), second=busy(1, adapters=HELD)),
    ),
    Case(
        "one that was tried in vain is left out",
        SECOND,
        "home",
        request=PlacementRequest(ADAPTER, excluded=frozenset({FIRST})),
    ),
    Case(
        "only candidates are chosen from",
        LAST,
        "home",
        request=PlacementRequest(ADAPTER, candidates=frozenset({LAST})),
    ),
    Case(
        "a lone candidate takes it though others are idle",
        LAST,
        "resident",
        fleet=fleet(last=busy(40, adapters=HELD)),
        request=PlacementRequest(ADAPTER, candidates=frozenset({LAST})),
    ),
    Case(
        "no candidate in the fleet: it waits",
        None,
        request=PlacementRequest(ADAPTER, candidates=frozenset({"elsewhere"})),
    ),
    Case(
        "a full home spills though it is within the bound",
        SECOND,
        "spilled",
        fleet=fleet(first=busy(12, max_num_seqs=8), second=busy(30), third=busy(30), last=busy(30)),
    ),
    Case(
        "it may wait in line at home",
        FIRST,
        "resident",
        fleet=fleet(first=busy(40, adapters=HELD), second=busy(40), third=busy(40), last=busy(40)),
    ),
    Case(
        "away from home it is sent only where a seat is free, else it waits in the router",
        None,
        fleet=fleet(first=busy(48), second=busy(33), third=busy(32), last=busy(40)),
    ),
    Case(
        "a home whose KV is used up while sequences wait is full",
        SECOND,
        "spilled",
        fleet=fleet(first=busy(2, waiting=1, kv_usage=0.97)),
    ),
    Case(
        "beyond the bound, when those within it are full",
        FIRST,
        "over_bound",
        fleet=fleet(
            first=busy(20),
            second=replace(CAN, waiting=1, kv_usage=1.0),
            third=replace(CAN, waiting=1, kv_usage=1.0),
            last=replace(CAN, ready=False),
        ),
    ),
    Case(
        "with all full it waits",
        None,
        fleet=fleet(first=busy(48), second=busy(48), third=busy(48), last=busy(48)),
    ),
    Case(
        "a replica that cannot say how much it computes is full when many wait there",
        SECOND,
        "spilled",
        fleet=fleet(
            first=Replica("", reports=False, running=8, waiting=32),
            second=busy(31),
            third=busy(31),
            last=busy(31),
        ),
    ),
    Case(
        "nobody ready: it waits",
        None,
        fleet=fleet(
            **{place: replace(CAN, ready=False) for place in ("first", "second", "third", "last")}
        ),
    ),
    Case("more replicas declared than there are: all are homes", FIRST, "home", k=9),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says.replace(" ", "_"))
def test_an_adapter_s_request_goes_where_the_rules_say(case: Case) -> None:
    choice = chosen(case.fleet, case.request, declared=case.k)
    if case.to is None:
        assert choice is None
    else:
        assert choice is not None
        assert (choice.replica.name, choice.reason) == (case.to, case.reason)


def test_the_choice_names_the_homes_in_their_order() -> None:
    choice = chosen(fleet(), declared=3)
    assert choice is not None
    assert (choice.k, choice.homes) == (3, (FIRST, SECOND, THIRD))


def everywhere() -> Fleet:
    return fleet(
        **{place: busy(4, adapters=HELD) for place in ("first", "second", "third", "last")}
    )


def test_requests_that_share_a_prefix_meet_on_one_home_and_prefixes_spread_over_the_homes() -> None:
    view = everywhere()
    to = {}
    for prefix in range(300):
        choice = chosen(view, PlacementRequest(ADAPTER, prefix=prefix), declared=3)
        again = chosen(view, PlacementRequest(ADAPTER, prefix=prefix), declared=3)
        assert choice is not None
        assert choice == again
        to[prefix] = choice.replica.name
    counts = [list(to.values()).count(name) for name in (FIRST, SECOND, THIRD)]
    assert sum(counts) == 300
    assert min(counts) > 70


def test_a_session_keeps_together_what_has_different_prefixes() -> None:
    view = everywhere()
    to = set()
    for prefix in range(20):
        choice = chosen(view, PlacementRequest(ADAPTER, prefix=prefix, session="ada"), declared=3)
        assert choice is not None
        to.add(choice.replica.name)
    assert len(to) == 1


def test_a_group_leaves_its_home_while_that_is_over_the_bound() -> None:
    request = PlacementRequest(ADAPTER, prefix=7)
    usual = chosen(everywhere(), request, declared=2)
    assert usual is not None
    other = SECOND if usual.replica.name == FIRST else FIRST
    place = "first" if usual.replica.name == FIRST else "second"
    view = fleet(
        **{
            "first": busy(4, adapters=HELD),
            "second": busy(4, adapters=HELD),
            place: busy(25, adapters=HELD),
        }
    )
    moved = chosen(view, request, declared=2)
    assert moved is not None
    assert (moved.replica.name, moved.reason) == (other, "resident")


def test_base_requests_go_to_the_least_loaded() -> None:
    view = fleet(first=busy(5), second=busy(3), third=busy(4), last=busy(9))
    choice = chosen(view, PlacementRequest(None))
    assert choice is not None
    assert (choice.replica.name, choice.reason) == (SECOND, "least_loaded")


def test_base_requests_that_share_a_prefix_meet_within_the_bound() -> None:
    request = PlacementRequest(None, prefix=12345)
    home = chosen(fleet(), request)
    assert home is not None
    assert home.reason == "prefix"
    crowded = Fleet(
        tuple(
            replace(each, running=30 if each.name == home.replica.name else 5)
            for each in fleet().replicas
        )
    )
    away = chosen(crowded, request)
    assert away is not None
    assert away.replica.name != home.replica.name


def test_a_base_request_needs_no_slots() -> None:
    view = fleet(**{place: replace(CAN, slots=0) for place in ("first", "second", "third", "last")})
    assert chosen(view, PlacementRequest(None)) is not None


def test_load_is_weighed_against_capacity() -> None:
    view = fleet(
        first=busy(12, weight=4.0, adapters=HELD), second=busy(10, weight=1.0, adapters=HELD)
    )
    # The weight changes the order too, so all four are homes here.
    choice = chosen(view, declared=4)
    assert choice is not None
    assert choice.replica.weight == 4.0


def test_an_idle_fleet_does_not_spread_an_adapter_over_it() -> None:
    view = fleet(first=busy(7, adapters=HELD))
    loads = Loads({FIRST: 7}, {FIRST: 7.0}, 7.0)
    choice = choose(PlacementRequest(ADAPTER), view, loads, policy=PlacementPolicy(light=0.25))
    assert choice is not None
    assert choice.replica.name == FIRST
    strict = choose(
        PlacementRequest(ADAPTER), view, loads, policy=PlacementPolicy(light=0.0, light_sequences=0)
    )
    assert strict is not None
    assert strict.reason == "spilled"


@pytest.mark.parametrize(
    "wrong",
    [
        {"load_bound": 0.9},
        {"fill": 0.4},
        {"fill": 1.1},
        {"empty": 0.0},
        {"overcommit": 0.5},
        {"kv_full": 0.0},
        {"light": 1.5},
        {"max_waiting": -1},
        {"light_sequences": -1},
        {"rank_cost": -0.1},
        {"rank_cost": 1.5},
        {"rank_cost": float("nan")},
    ],
    ids=str,
)
def test_a_policy_under_which_requests_have_no_place_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        PlacementPolicy(**wrong)  # type: ignore[arg-type]  # of either number type


def test_what_is_remembered_of_homes_is_of_one_policy_and_one_number_of_replicas() -> None:
    held = replace(CAN, adapters=HELD)
    view = fleet(first=held, second=held)
    loads = reported_loads(view)
    request = PlacementRequest(ADAPTER)
    for declared in (1, 3, None, 2):
        kept = choose(request, view, loads, declared=declared)
        anew = choose(request, Fleet(view.replicas), loads, declared=declared)
        assert kept == anew
    for policy in (PlacementPolicy(), PlacementPolicy(light_sequences=1)):
        assert choose(request, view, loads, policy=policy) == choose(
            request, Fleet(view.replicas), loads, policy=policy
        )
    # One that may not go everywhere has homes of its own, which nobody else is given.
    first = order(ADAPTER, view)[0].name
    elsewhere = choose(PlacementRequest(ADAPTER, excluded=frozenset({first})), view, loads)
    assert elsewhere is not None
    assert elsewhere.replica.name != first
    again = choose(request, view, loads)
    assert again is not None
    assert again.replica.name == first


PINNED = {ADAPTER: Residency("host", pinned=True, rank=16, bytes=1 << 20)}


@dataclass(frozen=True)
class Declared:
    says: str
    to: str
    reason: str
    homes: tuple[str, ...]
    k: int = 1
    fleet: Fleet = field(default_factory=fleet)


DECLARED = [
    Declared("before the operator has put it anywhere it is at home", FIRST, "home", (FIRST,)),
    Declared(
        "a replica that the operator passed over is no home",
        *(SECOND, "resident", (SECOND,)),
        fleet=fleet(second=replace(CAN, adapters=PINNED)),
    ),
    Declared(
        "a selector may leave out several",
        *(THIRD, "resident", (THIRD, LAST)),
        k=2,
        fleet=fleet(
            third=replace(CAN, adapters=PINNED), last=replace(CAN, adapters=PINNED, running=8)
        ),
    ),
    Declared(
        "a new first home is one as soon as it holds the adapter, too",
        *(FIRST, "resident", (FIRST,)),
        fleet=fleet(first=replace(CAN, adapters=PINNED), third=replace(CAN, adapters=PINNED)),
    ),
    Declared(
        "one that is still being loaded is there already",
        *(FIRST, "resident", (FIRST,)),
        fleet=fleet(
            first=replace(CAN, adapters={ADAPTER: Residency("disk", loading=True, pinned=True)})
        ),
    ),
    Declared(
        "where too few hold it the order says where else",
        *(THIRD, "resident", (FIRST, THIRD)),
        k=2,
        fleet=fleet(third=replace(CAN, adapters=PINNED)),
    ),
    Declared(
        "a copy that nobody pinned has come by itself",
        *(FIRST, "home", (FIRST,)),
        fleet=fleet(third=replace(CAN, adapters=HELD)),
    ),
    Declared(
        "over the bound it spills in its order, also to where it was not put",
        *(FIRST, "spilled", (THIRD,)),
        fleet=fleet(third=busy(200, adapters=PINNED)),
    ),
]


@pytest.mark.parametrize("case", DECLARED, ids=[case.says for case in DECLARED])
def test_a_declared_adapter_is_looked_for_where_the_operator_has_put_it(case: Declared) -> None:
    choice = chosen(case.fleet, declared=case.k)
    assert choice is not None
    assert (choice.replica.name, choice.reason, choice.homes) == (case.to, case.reason, case.homes)
    request, loads = PlacementRequest(ADAPTER), reported_loads(case.fleet)
    explained = explain(request, case.fleet, loads, declared=case.k)
    assert {row.replica for row in explained.rows if row.home} == set(case.homes)
