"""What speaks against a replica, in words with numbers, and what the choice went by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from mural_router.placement import (
    Explanation,
    Fleet,
    Loads,
    PlacementPolicy,
    PlacementRequest,
    Replica,
    Residency,
    explain,
    reported_loads,
)

ADAPTER = "acme/support:v3"
SIZE = 14_700_000
CAN = Replica("a", report=1, slots=8, host_bytes=18_000_000, max_lora_rank=64, max_num_seqs=32)
KNOWS = replace(CAN, name="b", adapters={ADAPTER: Residency("disk", rank=64, bytes=SIZE)})
"""Tells how large the adapter is."""


def told(*replicas: Replica, adapter: str | None = ADAPTER) -> Explanation:
    fleet = Fleet(replicas)
    return explain(PlacementRequest(adapter), fleet, reported_loads(fleet))


def against(replica: Replica) -> tuple[str, ...]:
    return next(row.against for row in told(replica, KNOWS).rows if row.replica == "a")


def others(count: int, size: int, *, pinned: bool = False) -> Mapping[str, Residency]:
    one = Residency("host", bytes=size, pinned=pinned, load=1.0)
    return {f"globex:v{at}": one for at in range(count)}


@pytest.mark.parametrize(
    ("replica", "expected"),
    [
        (CAN, ()),
        (replace(CAN, slots=0), ("cannot hold it: no slots",)),
        (replace(CAN, max_lora_rank=16), ("cannot hold it: rank 64 above 16",)),
        (replace(CAN, host_bytes=10_000_000), ("cannot hold it: 14.7 MB above its 10.0 MB",)),
        (
            replace(CAN, adapters=others(1, 3_700_000, pinned=True)),
            (
                "pinned: 3.7 MB of 18.0 MB are pinned, 14.7 MB do not fit beside",
                "crowded: 3.7 MB of 18.0 MB are wanted there",
            ),
        ),
        (
            replace(CAN, adapters=others(1, 17_000_000)),
            ("crowded: 17.0 MB of 18.0 MB are wanted there",),
        ),
        (
            replace(CAN, host_bytes=0, max_cpu_loras=3, adapters=others(3, 1)),
            ("crowded: 3 of 3 adapters are wanted there",),
        ),
        (replace(CAN, ready=False), ("not ready",)),
    ],
    ids=str,
)
def test_what_speaks_against_a_replica_is_said_with_numbers(
    replica: Replica, expected: tuple[str, ...]
) -> None:
    assert against(replica) == expected


def test_a_full_home_and_another_without_a_seat_are_told_apart() -> None:
    full = replace(CAN, running=60)
    assert told(full).rows[0].against == ("full",)
    twice = told(full, replace(full, name="b"))
    assert {row.home: row.against for row in twice.rows} == {
        True: ("full",),
        False: ("no seat is free at once",),
    }


def test_a_home_without_room_to_spare_is_nearly_crowded() -> None:
    alone = replace(CAN, adapters=others(1, 5_000_000))
    by_size = told(replace(alone, host_bytes=11_000_000))
    assert by_size.rows[0].against == ("nearly crowded: 5.0 MB of 11.0 MB are wanted there",)
    by_count = told(replace(alone, host_bytes=0, max_cpu_loras=3, adapters=others(2, 1)))
    assert by_count.rows[0].against == ("nearly crowded: 2 of 3 adapters are wanted there",)


@pytest.mark.parametrize("adapter", [ADAPTER, None])
def test_of_a_replica_that_was_never_heard_of_nothing_else_is_said(adapter: str | None) -> None:
    unheard = Replica("a", ready=False, stale=True)
    (row,) = told(unheard, adapter=adapter).rows
    assert row.against == ("not ready", "stale")
    assert (row.residency, row.host_bytes, row.max_cpu_loras) == ("unknown", None, None)
    heard = replace(unheard, report=1)
    (row,) = told(heard, adapter=adapter).rows
    assert row.residency == ("unknown" if adapter is None else "absent")
    assert row.against[2:] == (() if adapter is None else ("cannot hold it: no slots",))


def test_who_waits_is_told_whether_anybody_is_ready() -> None:
    assert told().reason == told(replace(CAN, ready=False)).reason == "none is ready"
    assert told(replace(CAN, slots=0)).reason == "nobody that may take it has room"


def test_it_shows_what_the_router_believes_of_the_adapter() -> None:
    found = told(CAN, KNOWS)
    assert (found.known, found.rank, found.bytes) == (True, 64, SIZE)
    assert (found.cost, found.rank_cost) == (2.28, 0.02)
    unknown = told(CAN)
    assert (unknown.known, unknown.rank, unknown.bytes, unknown.cost) == (False, None, None, 1.0)
    base = told(CAN, adapter=None)
    assert (base.known, base.rank, base.bytes, base.cost) == (True, None, None, 1.0)


def test_it_shows_the_memory_and_the_load_that_a_choice_goes_by() -> None:
    held = {**others(2, 1_000_000), "acme:v1": Residency("host", bytes=5, pinned=True)}
    fleet = Fleet((replace(CAN, max_cpu_loras=4, adapters=held),))
    loads = Loads({"a": 3}, {"a": 3.12345}, 3.12345)
    policy = PlacementPolicy(light=0.25)
    (row,) = explain(PlacementRequest(ADAPTER), fleet, loads, policy=policy).rows
    assert (row.sequences, row.cost, row.cost_limit) == (3, 3.123, 8.0)
    assert (row.host_bytes, row.pinned_bytes, row.wanted_bytes) == (18_000_000, 5, 2_000_005)
    assert (row.wanted, row.max_cpu_loras) == (3, 4)
    assert row.score == round(row.score, 3)
