"""A router's own requests and the replicas' reports make one load, each sequence counted once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_router.placement import (
    Fleet,
    LoadLedger,
    PlacementPolicy,
    PlacementRequest,
    Replica,
    Residency,
    choose,
    only_home,
    reported_loads,
)


def one(report: int, running: int = 0, waiting: int = 0, ranks: tuple[int, ...] = ()) -> Fleet:
    """``ranks``: of adapters under each of which one sequence runs."""
    adapters = {f"t:v{i}": Residency("slot", rank=rank, requests=1) for i, rank in enumerate(ranks)}
    return Fleet(
        (Replica("a", report=report, running=running, waiting=waiting, adapters=adapters),)
    )


def test_a_burst_is_seen_before_any_report_of_it() -> None:
    ledger = LoadLedger()
    ledger.observe(one(1))
    for _ in range(5):
        ledger.start("a", 1)
    assert ledger.loads.of("a") == 5
    assert ledger.loads.total_cost == 5


def test_what_a_report_includes_is_not_counted_twice() -> None:
    ledger = LoadLedger()
    ledger.observe(one(1))
    for _ in range(5):
        ledger.start("a", 1)
    ledger.observe(one(2, running=4, waiting=3))
    assert ledger.loads.of("a") == 7


def test_an_end_after_the_report_is_taken_off_it() -> None:
    ledger = LoadLedger()
    ledger.start("a", 2)
    ledger.observe(one(1, running=6))
    ledger.finish("a", 2)
    assert ledger.loads.of("a") == 4


def test_a_report_that_says_the_same_again_starts_a_new_count() -> None:
    ledger = LoadLedger()
    ledger.observe(one(1, running=3))
    ledger.start("a", 1)
    ledger.observe(one(2, running=3))
    assert ledger.loads.of("a") == 3


def test_a_view_without_a_new_report_changes_nothing() -> None:
    ledger = LoadLedger()
    ledger.observe(one(1, running=3))
    ledger.start("a", 1)
    ledger.observe(one(1, running=3))
    assert ledger.loads.of("a") == 4


def test_one_s_own_requests_are_the_least_there_can_be() -> None:
    ledger = LoadLedger()
    ledger.observe(one(1))
    ledger.start("a", 4)
    ledger.observe(one(2, running=0))
    # The report was made before they arrived.
    assert ledger.loads.of("a") == 4


def test_the_total_is_over_the_replicas_that_accept() -> None:
    ledger = LoadLedger()
    ledger.observe(Fleet((Replica("a", running=3), Replica("b", running=9, ready=False))))
    ledger.start("b", 1)
    assert ledger.loads.total_cost == 3


def test_requests_of_a_replica_that_left_are_followed_to_their_end() -> None:
    ledger = LoadLedger()
    ledger.observe(one(1))
    ledger.start("a", 2)
    ledger.observe(Fleet())
    assert ledger.in_flight("a") == 2
    assert ledger.loads.total_cost == 0
    ledger.finish("a", 2)
    assert ledger.in_flight("a") == 0


def test_a_replica_that_comes_back_still_has_what_is_in_flight_there() -> None:
    ledger = LoadLedger()
    ledger.observe(one(5))
    ledger.start("a", 2)
    ledger.observe(Fleet())
    ledger.observe(one(1))
    assert ledger.loads.of("a") == 2


def test_more_ends_than_starts_are_a_fault() -> None:
    ledger = LoadLedger()
    ledger.start("a", 1)
    ledger.finish("a", 1)
    with pytest.raises(ValueError, match="more sequences finished than started on a"):
        ledger.finish("a", 1)


def test_without_a_router_the_reports_are_the_load() -> None:
    loads = reported_loads(
        Fleet((Replica("a", running=2, waiting=1), Replica("b", running=5, ready=False)))
    )
    assert (loads.of("a"), loads.of("b"), loads.total_cost) == (3, 5, 3)


def test_ranks_are_counted_as_sequences_are_each_once() -> None:
    ledger = LoadLedger(PlacementPolicy(rank_cost=1 / 64))
    ledger.observe(one(1, running=1, ranks=(32,)))
    ledger.start("a", 2, 16)
    assert (ledger.loads.cost("a"), ledger.loads.total_cost) == (4.0, 4.0)
    ledger.observe(one(2, running=3, ranks=(32, 16, 16)))
    assert ledger.loads.cost("a") == 4.0
    ledger.finish("a", 2, 16)
    assert (ledger.loads.cost("a"), ledger.loads.of("a")) == (1.5, 1)


def test_a_rank_that_was_unknown_when_its_request_began_leaves_no_cost_behind() -> None:
    ledger = LoadLedger(PlacementPolicy(rank_cost=1.0))
    ledger.observe(one(1))
    ledger.start("a", 1, 0)
    ledger.observe(one(2, running=1, ranks=(64,)))
    ledger.finish("a", 1, 0)
    assert (ledger.loads.of("a"), ledger.loads.cost("a"), ledger.loads.total_cost) == (0, 0, 0)


def test_costs_go_by_the_policy_of_the_moment() -> None:
    ledger = LoadLedger(PlacementPolicy(rank_cost=0.0))
    ledger.observe(one(1, running=1, ranks=(32,)))
    ledger.start("a", 1, 16)
    assert (ledger.loads.cost("a"), ledger.loads.total_cost) == (2, 2)
    ledger.policy = PlacementPolicy(rank_cost=1 / 16)
    ledger.observe(one(1, running=1, ranks=(32,)))
    assert (ledger.loads.cost("a"), ledger.loads.total_cost) == (5, 5)


def test_ranks_of_a_replica_that_left_are_followed_to_their_end() -> None:
    ledger = LoadLedger(PlacementPolicy(rank_cost=1.0))
    ledger.observe(one(1))
    ledger.start("a", 1, 64)
    ledger.observe(Fleet())
    assert ledger.loads.total_cost == ledger.loads.cost("a") == 0
    ledger.observe(one(2))
    assert ledger.loads.total_cost == 65
    ledger.finish("a", 1, 64)
    assert ledger.loads.total_cost == ledger.loads.cost("a") == 0


def test_without_a_router_the_reported_ranks_count() -> None:
    loads = reported_loads(one(1, running=2, ranks=(8, 64)), PlacementPolicy(rank_cost=1 / 8))
    assert (loads.cost("a"), loads.total_cost) == (11, 11)


HUGE = 1 << 50
LIES = {
    "sequences": Replica("d", running=HUGE, waiting=HUGE),
    "ranks": Replica(
        "d", running=1, adapters={"t:v1": Residency("slot", rank=HUGE, requests=HUGE)}
    ),
    "ranks on disk": Replica(
        "d",
        running=1,
        adapters={f"t:v{i}": Residency("disk", rank=HUGE, requests=1) for i in range(9)},
    ),
    "all": Replica(
        "d",
        running=HUGE,
        max_num_seqs=HUGE,
        adapters={"t:v1": Residency("slot", rank=HUGE, requests=HUGE, pinned=True)},
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_one_that_lies_about_its_load_puts_nobody_else_within_the_bound(lie: str) -> None:
    held = {"acme:v1": Residency("slot", rank=8)}
    honest = tuple(Replica(name, running=20, slots=8, adapters=held) for name in "abc")
    fleet = Fleet((*honest, LIES[lie]))
    ledger = LoadLedger()
    ledger.observe(fleet)
    loads, before = ledger.loads, ledger.loads.total_cost
    assert before == reported_loads(fleet).total_cost == 60 + 2 * 20
    home = only_home("acme:v1", fleet)
    assert home is not None
    others = frozenset("abcd") - {home.name}
    taken = 0
    while home.takes_one_more(loads):
        ledger.start(home.name, 1, 8)
        taken += 1
    # 1.25 times a quarter of what there is; without the lie 1.25 times a third of 60, or more.
    assert 8 < taken < 30
    choice = choose(PlacementRequest("acme:v1"), fleet, loads)
    assert choice is not None
    assert choice.replica.name in others
    chosen_from = PlacementRequest("acme:v1", candidates=frozenset("abcd"))
    assert choose(chosen_from, fleet, loads) == choice
    ledger.finish(home.name, taken, 8)
    assert loads.total_cost == before


def test_what_a_router_has_itself_counts_though_others_have_far_less() -> None:
    ledger = LoadLedger()
    for number in (1, 2):
        ledger.observe(Fleet(tuple(Replica(name, report=number) for name in "abc")))
        ledger.start("a", 50)
    assert ledger.loads.total_cost == 100
    ledger.observe(Fleet(tuple(Replica(name, report=3, running=110) for name in "abc")))
    ledger.finish("a", 100)
    assert ledger.loads.total_cost == 230


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from("abc"), st.integers(1, 5)),
        st.tuples(st.just("finish"), st.sampled_from("abc"), st.integers(0, 5)),
        st.tuples(st.just("report"), st.sampled_from("abc"), st.integers(0, 20)),
        st.tuples(st.just("leave"), st.sampled_from("abc"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(steps=STEPS, rank=st.sampled_from([0, 8, 64]))
def test_the_total_is_always_the_sum_and_nothing_stays_behind(
    steps: list[tuple[str, str, int]], rank: int
) -> None:
    # Nobody has as much as would not count.
    ledger = LoadLedger(PlacementPolicy(rank_cost=1.0, light_sequences=1 << 30))
    replicas: dict[str, Replica] = {}
    mine: dict[str, list[tuple[int, int]]] = {name: [] for name in "abc"}
    for number, (what, name, count) in enumerate(steps):
        if what == "start":
            mine[name].append((count, rank + count))
            ledger.start(name, *mine[name][-1])
        elif what == "finish":
            if mine[name]:
                ledger.finish(name, *mine[name].pop(count % len(mine[name])))
        elif what == "report":
            held = {"t:v1": Residency("slot", rank=rank, requests=count)}
            replicas[name] = Replica(name, report=number, running=count, adapters=held)
            ledger.observe(Fleet(tuple(replicas[each] for each in sorted(replicas))))
        else:
            replicas.pop(name, None)
            ledger.observe(Fleet(tuple(replicas[each] for each in sorted(replicas))))
        loads = ledger.loads
        assert loads.total_cost == sum(loads.cost(each) for each in replicas)
        assert all(loads.of(each) >= ledger.in_flight(each) for each in replicas)
        assert all(
            loads.cost(each) >= sum(count * (1 + of) for count, of in mine[each])
            for each in replicas
        )
    for name, started in mine.items():
        for each in started:
            ledger.finish(name, *each)
    ledger.observe(Fleet())
    assert ledger.loads.total_cost == 0
    assert not ledger._accounts
