"""The order of replicas: one for all routers, and still mostly the same when one comes or goes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_router.placement import Fleet, Replica, order

ADAPTERS = [f"tenant-{i % 97}/adapter-{i}:v1" for i in range(3000)]


def fleet_of(*names: str, **weights: float) -> Fleet:
    return Fleet(tuple(Replica(name, weight=weights.get(name, 1.0)) for name in sorted(names)))


def numbered(count: int) -> list[str]:
    return [f"mural-{i}" for i in range(count)]


def homes(fleet: Fleet) -> list[str]:
    return [order(adapter, fleet)[0].name for adapter in ADAPTERS]


def test_every_process_computes_the_same_order() -> None:
    program = (
        "from mural_router.placement import Fleet, Replica, order\n"
        "fleet = Fleet(tuple(Replica(f'mural-{i}') for i in range(5)))\n"
        "print(*(each.name for each in order('acme/support:v3', fleet)))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    here = order("acme/support:v3", fleet_of(*numbered(5)))
    assert printed.stdout.split() == [each.name for each in here]


def test_the_order_is_what_it_was_in_earlier_releases() -> None:
    # Routers of two versions work side by side during an upgrade.
    names = [each.name for each in order("acme/support:v3", fleet_of(*numbered(5)))]
    assert names == ["mural-1", "mural-2", "mural-4", "mural-0", "mural-3"]


@pytest.mark.parametrize("count", [3, 10, 40])
def test_a_replica_that_leaves_moves_its_own_adapters_and_no_other(count: int) -> None:
    names = numbered(count)
    before, after = homes(fleet_of(*names)), homes(fleet_of(*names[:-1]))
    moved = [old for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {names[-1]}
    assert len(moved) <= 1.5 / count * len(ADAPTERS)


@pytest.mark.parametrize("count", [3, 10, 40])
def test_a_replica_that_comes_takes_its_share_and_moves_nothing_between_others(count: int) -> None:
    names = numbered(count)
    before, after = homes(fleet_of(*names[:-1])), homes(fleet_of(*names))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {names[-1]}
    assert len(moved) <= 1.5 / count * len(ADAPTERS)


@settings(max_examples=60, deadline=None)
@given(
    names=st.sets(st.text(min_size=1, max_size=20), min_size=2, max_size=12),
    adapter=st.text(min_size=1, max_size=30),
    data=st.data(),
)
def test_the_others_keep_their_order_when_any_replica_is_not_ready(
    names: set[str], adapter: str, data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(sorted(names)))
    fleet = Fleet(tuple(Replica(name, ready=name != gone) for name in sorted(names)))
    without = Fleet(tuple(Replica(name) for name in sorted(names - {gone})))
    assert [each.name for each in order(adapter, fleet)] == [
        each.name for each in order(adapter, without)
    ]


def test_a_replica_of_twice_the_weight_is_home_of_twice_as_many() -> None:
    won = Counter(homes(fleet_of("a", "b", "c", "d", a=2.0)))
    assert won["a"] / len(ADAPTERS) == pytest.approx(2 / 5, rel=0.1)
    for name in "bcd":
        assert won[name] / len(ADAPTERS) == pytest.approx(1 / 5, rel=0.15)


def test_a_heavier_replica_takes_adapters_and_moves_none_between_others() -> None:
    before, after = homes(fleet_of("a", "b", "c")), homes(fleet_of("a", "b", "c", a=1.5))
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"a"}


def test_second_homes_are_spread_over_all_others() -> None:
    fleet = fleet_of(*numbered(5))
    seconds = Counter(
        second.name
        for first, second, *_ in (order(adapter, fleet) for adapter in ADAPTERS)
        if first.name == "mural-0"
    )
    assert len(seconds) == 4
    assert min(seconds.values()) > 0.7 * max(seconds.values())


def test_stale_replicas_are_in_no_order_while_a_fresh_one_is() -> None:
    fleet = Fleet((Replica("a", stale=True), Replica("b"), Replica("c", stale=True)))
    assert [each.name for each in order("acme:v1", fleet)] == ["b"]
    all_stale = Fleet((Replica("a", stale=True), Replica("b", stale=True)))
    assert {each.name for each in order("acme:v1", all_stale)} == {"a", "b"}


def test_an_empty_fleet_has_an_empty_order() -> None:
    assert order("acme:v1", Fleet()) == ()


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan")])
def test_a_weight_that_is_not_above_zero_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="weight is above 0"):
        order("acme:v1", Fleet((Replica("a", weight=weight),)))


def test_the_same_members_keep_their_orders_in_the_next_view_of_the_fleet() -> None:
    first = Fleet((Replica("a"), Replica("b")))
    second = Fleet((Replica("a", running=3), Replica("b", ready=False)))
    assert first.members is second.members
