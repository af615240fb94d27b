"""How many homes: what is declared, else what the reported load asks for, without to and fro."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_router.placement import Fleet, PlacementPolicy, Replica, Residency, order, replicas_for

ADAPTER = "acme/support:v3"
GB = 1 << 30


def fleet(
    work: float, *, part: float = 1.0, held: Iterable[int] = (), replicas: int = 8, bytes_: int = 0
) -> Fleet:
    """A fleet that does ``work`` replicas' worth, ``part`` of it for the adapter.

    ``held``: the places of its order where the adapter is in memory, and runs; what others do is
    spread evenly. A replica computes 100 sequences at a time, and ten tokens a second of each.
    """
    bare = Fleet(tuple(Replica(f"mural-{i}") for i in range(replicas)))
    names = [each.name for each in order(ADAPTER, bare)]
    holders = {names[place] for place in held}
    mine = part * work * 100 / max(1, len(holders))
    made = []
    for replica in bare.replicas:
        runs = (1 - part) * work * 100 / replicas
        adapters = {}
        tokens = 10 * min(100.0, runs)
        if replica.name in holders:
            tokens = 10 * min(100.0, runs + mine)
            load = tokens * mine / (runs + mine) if mine else 0.0
            adapters = {ADAPTER: Residency("host", load=load, bytes=bytes_)}
            runs += mine
        made.append(
            Replica(
                replica.name,
                slots=8,
                host_bytes=GB,
                max_num_seqs=100,
                running=min(100, round(runs)),
                waiting=max(0, round(runs) - 100),
                tokens_per_s=tokens,
                adapters=adapters,
            )
        )
    return Fleet(tuple(made))


@dataclass(frozen=True)
class Case:
    says: str
    fleet: Fleet
    k: int
    declared: int | None = None


CASES = [
    Case("an adapter nobody asked for has one home", fleet(4.0, part=0.0), 1),
    Case("what is declared counts whatever the load", fleet(4.0, held=[0]), 2, declared=2),
    Case("no more than there are replicas", fleet(4.0, held=[0]), 8, declared=20),
    Case("no fewer than one", fleet(0.0), 1, declared=0),
    Case("all of an idle fleet's tokens need one replica", fleet(0.4, held=[0]), 1),
    Case("work over three quarters of a replica gets a second", fleet(0.88, held=[0]), 2),
    Case("half of what two replicas do too", fleet(2.0, part=0.5, held=[0]), 2),
    Case("an exploding adapter gets several at once", fleet(3.04, held=[0]), 3),
    Case("and as many as it fills, once it has those", fleet(3.04, held=[0, 1, 2]), 5),
    Case("between the marks it keeps the two that it has", fleet(0.64, held=[0, 1]), 2),
    Case("between the marks it keeps the one that it has", fleet(0.64, held=[0]), 1),
    Case("below the lower mark it goes back to one", fleet(0.48, held=[0, 1]), 1),
    Case("a copy that spilled to a far place is no home", fleet(0.64, held=[0, 3]), 1),
    Case(
        "a copy of a quarter of the memory must fill its replicas",
        fleet(0.88, held=[0], bytes_=GB // 4),
        1,
    ),
    Case("a queue counts as work", fleet(1.6, held=[0]), 3),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says.replace(" ", "_"))
def test_k_follows_the_rules(case: Case) -> None:
    assert replicas_for(ADAPTER, case.fleet, case.declared) == case.k


def test_replicas_that_report_no_load_leave_one_home() -> None:
    view = Fleet(tuple(Replica(f"pod-{i}", reports=False, running=9) for i in range(3)))
    assert replicas_for(ADAPTER, view) == 1


def test_an_empty_fleet_still_has_a_k() -> None:
    assert replicas_for(ADAPTER, Fleet()) == 1


@settings(max_examples=80, deadline=None)
@given(
    work=st.floats(0.0, 12.0),
    part=st.floats(0.0, 1.0),
    held=st.integers(0, 8),
    noise=st.lists(st.floats(-0.12, 0.12), min_size=5, max_size=20),
)
def test_a_steady_load_that_fluctuates_by_a_tenth_moves_k_in_one_direction_only(
    work: float, part: float, held: int, noise: list[float]
) -> None:
    # Homes of the last view hold the adapter in the next one, as the requests made them.
    ks = []
    for each in noise:
        held = replicas_for(ADAPTER, fleet(work * (1 + each), part=part, held=range(held)))
        ks.append(held)
    settled = ks[1:]
    assert settled in (sorted(settled), sorted(settled, reverse=True))


@settings(max_examples=100, deadline=None)
@given(work=st.floats(0.0, 8.0), held=st.integers(0, 8))
def test_k_settles_in_a_few_steps(work: float, held: int) -> None:
    # With none no request has been there; what waits at one counts as one more at most.
    ks = [held or 1]
    for _ in range(4):
        ks.append(replicas_for(ADAPTER, fleet(work, held=range(ks[-1]))))
    assert ks[-1] == ks[-2]
    assert ks[1:] in (sorted(ks[1:]), sorted(ks[1:], reverse=True))


@settings(max_examples=100, deadline=None)
@given(low=st.floats(0.0, 8.0), more=st.floats(0.0, 4.0), held=st.integers(1, 8))
def test_more_work_never_means_fewer_homes(low: float, more: float, held: int) -> None:
    lower = replicas_for(ADAPTER, fleet(low, held=range(held)))
    assert replicas_for(ADAPTER, fleet(low + more, held=range(held))) >= lower


def test_the_marks_are_the_policy_s() -> None:
    view = fleet(0.64, held=[0])
    assert replicas_for(ADAPTER, view, policy=PlacementPolicy(fill=0.6, empty=0.3)) == 2


def test_one_that_lies_about_its_work_spreads_no_adapter_of_the_others() -> None:
    honest = fleet(1.0, part=0.2, held=[0])
    liar = Replica("zz", slots=8, running=1 << 50, waiting=1 << 50, max_num_seqs=1)
    assert replicas_for(ADAPTER, honest) == 1
    assert replicas_for(ADAPTER, Fleet((*honest.replicas, liar))) == 1


@pytest.mark.parametrize("lie", ["load", "tokens_per_s"])
def test_what_one_says_of_an_adapter_counts_for_no_more_than_one(lie: str) -> None:
    cold, hot = fleet(4.0, part=0.02, held=[0]), fleet(4.0, part=0.7, held=range(4))
    place = order(ADAPTER, cold)[5].name

    def lying(view: Fleet) -> Fleet:
        said = {"tokens_per_s": 1e12} if lie == "tokens_per_s" else {"tokens_per_s": 1.0}
        told = {ADAPTER: Residency("host", load=1e12 if lie == "load" else 0.0)}
        more: dict[str, Any] = {"running": 1 << 50, "adapters": told, **said}
        return Fleet(
            tuple(replace(each, **more) if each.name == place else each for each in view.replicas)
        )

    assert (replicas_for(ADAPTER, cold), replicas_for(ADAPTER, hot)) == (1, 4)
    assert replicas_for(ADAPTER, lying(cold)) <= 3
    assert 4 <= replicas_for(ADAPTER, lying(hot)) <= 7
