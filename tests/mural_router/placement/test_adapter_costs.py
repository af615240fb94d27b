"""What adapters cost counts: their ranks as load, their bytes as memory; a rule in a row."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mural_router.placement import (
    PlacementPolicy,
    PlacementRequest,
    Replica,
    Residency,
    Use,
    UseCount,
    choose,
    only_home,
    reported_loads,
)
from tests.mural_router.placement.four_replicas import (
    ADAPTER,
    CAN,
    FIRST,
    HELD,
    LARGE,
    LAST,
    ON_DISK,
    SECOND,
    THIRD,
    Case,
    busy,
    chosen,
    fleet,
    with_others,
)

CASES = [
    # What adapters cost: their ranks to those they are computed with, their bytes to those they
    # are held with. A replica's memory is 1,024 MiB.
    Case(
        "of two homes with as many sequences the one with the lower ranks takes it",
        SECOND,
        "resident",
        k=2,
        fleet=fleet(
            first=with_others(1, rank=64, requests=3, running=3, adapters=HELD),
            second=with_others(1, rank=8, requests=3, running=3, adapters=HELD),
        ),
    ),
    Case(
        "a few sequences more of small ranks cost less than a few of large ones",
        SECOND,
        "resident",
        k=2,
        fleet=fleet(
            first=with_others(1, rank=64, requests=3, running=3, adapters=HELD),
            second=with_others(1, rank=8, requests=5, running=5, adapters=HELD),
        ),
    ),
    Case(
        "home is over the bound by its ranks, though not by its sequences",
        SECOND,
        "spilled",
        fleet=fleet(
            first=with_others(1, rank=64, requests=7, running=7, adapters=HELD),
            second=busy(8),
            third=busy(8),
            last=busy(8),
        ),
    ),
    Case(
        "the same sequences of a small rank leave it within",
        FIRST,
        "resident",
        fleet=fleet(
            first=with_others(1, rank=8, requests=8, running=8, adapters=HELD),
            second=busy(8),
            third=busy(8),
            last=busy(8),
        ),
    ),
    Case(
        "a home that would have to forget what is in use is passed over for one with room",
        SECOND,
        "spilled",
        fleet=fleet(first=with_others(500, adapters=LARGE)),
    ),
    Case(
        "a small adapter still has room there",
        FIRST,
        "home",
        fleet=fleet(first=with_others(500, adapters=ON_DISK)),
    ),
    Case(
        "what nobody has used of late makes room",
        FIRST,
        "home",
        fleet=fleet(first=with_others(500, load=0.001, adapters=LARGE)),
    ),
    Case(
        "what computes is in use whatever its window says",
        SECOND,
        "spilled",
        fleet=fleet(first=with_others(500, load=0.0, requests=1, adapters=LARGE)),
    ),
    Case(
        "one that it holds stays there",
        FIRST,
        "resident",
        fleet=fleet(first=with_others(500, adapters={ADAPTER: Residency("host", bytes=600 << 20)})),
    ),
    Case(
        "away from home it stays where it found room, though one before has some by now",
        THIRD,
        "spilled",
        fleet=fleet(
            first=with_others(500),
            second=with_others(100),
            third=with_others(100, adapters={ADAPTER: Residency("host", bytes=600 << 20)}),
        ),
    ),
    Case(
        "a home with hardly room leaves it there: the next request could take that again",
        SECOND,
        "spilled",
        fleet=fleet(
            first=with_others(300),
            second=with_others(100, adapters={ADAPTER: Residency("host", bytes=600 << 20)}),
        ),
    ),
    Case(
        "so does one that counts adapters",
        SECOND,
        "spilled",
        fleet=fleet(first=with_others(1, max_cpu_loras=2), second=replace(CAN, adapters=HELD)),
    ),
    Case(
        "but takes it when that one has no seat for it at once",
        FIRST,
        "home",
        fleet=fleet(
            first=with_others(300),
            second=with_others(
                100, running=32, adapters={ADAPTER: Residency("host", bytes=600 << 20)}
            ),
        ),
    ),
    Case(
        "one that has not been heard from is not asked for its room",
        FIRST,
        "home",
        fleet=fleet(
            first=with_others(500, adapters=LARGE),
            second=with_others(500),
            third=with_others(500),
            last=replace(CAN, stale=True),
        ),
    ),
    Case(
        "nor for what it held",
        FIRST,
        "home",
        fleet=fleet(
            first=with_others(300, adapters=LARGE), last=replace(CAN, adapters=HELD, stale=True)
        ),
    ),
    Case(
        "a home that has room again has it back",
        FIRST,
        "home",
        fleet=fleet(
            first=with_others(100),
            second=with_others(100, adapters={ADAPTER: Residency("host", bytes=600 << 20)}),
        ),
    ),
    Case(
        "with no room anywhere it goes home, and something is forgotten there",
        FIRST,
        "home",
        fleet=fleet(
            first=with_others(500, adapters=LARGE),
            second=with_others(500),
            third=with_others(500),
            last=with_others(500),
        ),
    ),
    Case(
        "over the bound as well it spills to one with room first",
        LAST,
        "spilled",
        fleet=fleet(
            first=with_others(1, running=20, adapters=HELD | {"a:v1": LARGE[ADAPTER]}),
            second=with_others(1024),
            third=with_others(1024),
        ),
    ),
    Case(
        "a replica that holds as many adapters as it may has no room either",
        SECOND,
        "spilled",
        fleet=fleet(first=with_others(1, max_cpu_loras=1)),
    ),
    Case(
        "one of unknown size is taken to be as large as those there",
        SECOND,
        "spilled",
        fleet=fleet(first=with_others(600)),
    ),
    Case(
        "what is pinned never makes room: that is no home",
        SECOND,
        "home",
        fleet=fleet(first=with_others(500, pinned=True, load=0.0, adapters=LARGE)),
    ),
    Case(
        "not even when nobody else is there",
        None,
        fleet=fleet(
            first=with_others(500, pinned=True, adapters=LARGE),
            **{place: replace(CAN, ready=False) for place in ("second", "third", "last")},
        ),
    ),
    Case(
        "a replica that says more than it can hold keeps no adapter from the others",
        FIRST,
        "home",
        fleet=fleet(
            last=replace(CAN, adapters={ADAPTER: Residency("disk", rank=512, bytes=1 << 40)})
        ),
    ),
    Case(
        "nor one that says more than those who hold it",
        FIRST,
        "resident",
        fleet=fleet(
            first=replace(CAN, adapters=HELD),
            last=replace(
                CAN,
                max_lora_rank=512,
                host_bytes=1 << 50,
                adapters={ADAPTER: Residency("host", rank=512, bytes=1 << 40)},
            ),
        ),
    ),
    Case(
        "nor one that says nothing of what it takes itself",
        FIRST,
        "home",
        fleet=fleet(
            last=Replica(
                "", slots=8, adapters={ADAPTER: Residency("disk", rank=512, bytes=1 << 40)}
            )
        ),
    ),
    Case(
        "among three that tell, none has it go where it is refused",
        SECOND,
        "resident",
        fleet=fleet(
            first=replace(CAN, max_lora_rank=8),
            second=replace(CAN, adapters=HELD),
            third=replace(CAN, adapters=HELD),
            last=replace(CAN, adapters={ADAPTER: Residency("host", rank=1, bytes=1)}),
        ),
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.says.replace(" ", "_"))
def test_an_adapter_s_request_goes_where_it_costs_least(case: Case) -> None:
    choice = chosen(case.fleet, case.request, declared=case.k)
    if case.to is None:
        assert choice is None
    else:
        assert choice is not None
        assert (choice.replica.name, choice.reason) == (case.to, case.reason)


def test_a_request_s_own_rank_counts_in_the_bound() -> None:
    policy = PlacementPolicy(light=0.0, light_sequences=0, load_bound=1.0, rank_cost=1 / 8)
    for rank, reason in ((0, "spilled"), (8, "spilled"), (64, "resident")):
        held = {ADAPTER: Residency("host", rank=rank)}
        # By its rank the request costs 1, 2 or 9: its half of the total is above 5, or is not.
        view = fleet(
            first=busy(5, adapters=held),
            third=replace(CAN, ready=False),
            last=replace(CAN, ready=False),
        )
        loads = reported_loads(view, policy)
        choice = choose(PlacementRequest(ADAPTER), view, loads, policy=policy)
        assert choice is not None
        assert choice.reason == reason
        home = only_home(ADAPTER, view, policy=policy)
        assert home is not None
        assert home.takes_one_more(loads) == (reason == "resident")


def test_names_of_one_content_count_once() -> None:
    one = Residency("slot", digest="d" * 64, pinned=True, rank=8, bytes=100, requests=2)
    names = {f"acme:v{i}": one for i in range(5)}
    assert replace(CAN, adapters=names).use == Use(16, 100, 1, 100)
    other = replace(one, digest="e" * 64)
    assert replace(CAN, adapters=names | {"globex:v1": other}).use == Use(32, 200, 2, 200)
    # Whose content is unknown is somebody else's.
    unknown = replace(one, digest="")
    both = {"acme:v1": unknown, "acme:v2": unknown}
    assert replace(CAN, adapters=both).use == Use(32, 200, 2, 200)
    count = UseCount()
    for each in (one, one, other):
        count.add(each)
    for each in (one, other, one):
        assert count.use != Use()
        count.add(each, -1)
    assert count.use == Use()


def test_who_has_an_adapter_in_memory_knows_what_it_takes_there() -> None:
    disk, memory = Residency("disk", bytes=7), Residency("host", bytes=14)
    for held in ((disk, memory), (memory, disk)):
        view = fleet(
            **{
                place: replace(CAN, adapters={ADAPTER: each})
                for place, each in zip(("first", "second"), held, strict=True)
            }
        )
        assert view.facts(ADAPTER).bytes == 14
    view = fleet(first=replace(CAN, adapters={ADAPTER: disk}))
    assert view.facts(ADAPTER).bytes == 7


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["unknown_limit", "no_limit"])
def test_a_rank_that_no_adapter_has_makes_no_request_dear(limit: int) -> None:
    liar = replace(CAN, max_lora_rank=limit, adapters={ADAPTER: Residency("host", rank=1 << 40)})
    home = only_home(ADAPTER, fleet(first=liar))
    assert home is not None
    assert home.cost <= 1 + PlacementPolicy().rank_cost * CAN.max_lora_rank
