"""What holds for any fleet: choices stay within the rules, the bound and each other."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from math import ceil

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
    explain,
    order,
    reported_loads,
)

STRICT = PlacementPolicy(light=0.0, light_sequences=0)
"""The bound by the mean alone."""

residencies = st.builds(
    Residency,
    level=st.sampled_from(["disk", "host", "slot"]),
    loading=st.booleans(),
    rank=st.sampled_from([0, 8, 64, 256]),
    bytes=st.integers(0, 200),
    load=st.floats(0, 1000),
)
adapters = st.sampled_from(["acme:v1", "acme/support:v3", "globex:v2"])


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    names = sorted(draw(st.sets(st.sampled_from("abcdefgh"), max_size=8)))
    return Fleet(
        tuple(
            Replica(
                name,
                weight=draw(st.sampled_from([0.5, 1.0, 4.0])),
                ready=draw(st.booleans()),
                stale=draw(st.booleans()),
                reports=draw(st.booleans()),
                slots=draw(st.integers(0, 4)),
                host_bytes=draw(st.sampled_from([0, 100])),
                max_lora_rank=draw(st.sampled_from([0, 64])),
                max_num_seqs=draw(st.sampled_from([0, 8])),
                running=draw(st.integers(0, 20)),
                waiting=draw(st.integers(0, 40)),
                kv_usage=draw(st.sampled_from([0.1, 1.0])),
                tokens_per_s=draw(st.floats(0, 1000)),
                adapters=draw(st.dictionaries(adapters, residencies)),
            )
            for name in names
        )
    )


requests = st.builds(
    PlacementRequest,
    adapter=st.none() | adapters,
    prefix=st.none() | st.integers(0, 2**64 - 1),
    session=st.none() | st.text(max_size=5),
    sequences=st.integers(1, 20),
    candidates=st.none() | st.frozensets(st.sampled_from("abcdefgh"), max_size=4),
    excluded=st.frozensets(st.sampled_from("abcdefgh"), max_size=4),
)


@settings(max_examples=120, deadline=None)
@given(fleet=fleets(), request=requests, declared=st.none() | st.integers(1, 9))
def test_a_choice_may_take_the_request(
    fleet: Fleet, request: PlacementRequest, declared: int | None
) -> None:
    choice = choose(request, fleet, reported_loads(fleet), declared=declared)
    if choice is None:
        return
    replica = choice.replica
    assert replica in fleet.replicas
    assert replica.ready
    assert replica.name not in request.excluded
    assert request.candidates is None or replica.name in request.candidates
    if request.adapter is not None:
        assert replica.slots > 0 or not replica.reports
        assert len(choice.homes) <= choice.k


@settings(max_examples=120, deadline=None)
@given(fleet=fleets(), request=requests, declared=st.none() | st.integers(1, 9))
def test_an_explanation_tells_the_choice_that_is_made(
    fleet: Fleet, request: PlacementRequest, declared: int | None
) -> None:
    loads = reported_loads(fleet)
    choice = choose(request, fleet, loads, declared=declared)
    told = explain(request, fleet, loads, declared=declared)
    assert {row.replica for row in told.rows} == {each.name for each in fleet.replicas}
    assert [row.score for row in told.rows] == sorted(
        (row.score for row in told.rows), reverse=True
    )
    against = {row.replica: set(row.against) for row in told.rows}
    if choice is None:
        assert told.choice is None
        assert all(against[name] - {"over the bound", "stale"} for name in against)
    else:
        assert told.choice == choice.replica.name
        assert told.reason == choice.reason
        assert against[told.choice] <= {"over the bound", "stale"}
        assert {row.replica for row in told.rows if row.home} == set(choice.homes)


@settings(max_examples=80, deadline=None)
@given(fleet=fleets(), request=requests)
def test_two_routers_that_see_the_same_fleet_choose_the_same(
    fleet: Fleet, request: PlacementRequest
) -> None:
    one, other = LoadLedger(), LoadLedger()
    seen_twice = Fleet(tuple(replace(each) for each in fleet.replicas))
    one.observe(fleet)
    other.observe(seen_twice)
    assert choose(request, fleet, one.loads) == choose(request, seen_twice, other.loads)


@settings(max_examples=80, deadline=None)
@given(
    fleet=fleets(),
    adapter=adapters,
    more=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 9)),
)
def test_routers_with_other_requests_in_flight_agree_on_order_and_homes(
    fleet: Fleet, adapter: str, more: dict[str, int]
) -> None:
    one, other = LoadLedger(), LoadLedger()
    one.observe(fleet)
    other.observe(fleet)
    for name, sequences in more.items():
        other.start(name, sequences)
    request = PlacementRequest(adapter)
    first, second = choose(request, fleet, one.loads), choose(request, fleet, other.loads)
    if first is not None and second is not None:
        assert (first.k, first.homes) == (second.k, second.homes)


@settings(max_examples=100, deadline=None)
@given(
    replicas=st.integers(1, 12),
    exponent=st.floats(0.5, 2.5),
    seed=st.integers(0, 2**32),
    bound=st.sampled_from([1.0, 1.25, 2.0]),
)
def test_the_bound_holds_at_every_step_under_zipf(
    replicas: int, exponent: float, seed: int, bound: float
) -> None:
    rng = random.Random(seed)
    policy = replace(STRICT, load_bound=bound)
    fleet = Fleet(
        tuple(Replica(f"mural-{i:02}", slots=8, max_num_seqs=1000) for i in range(replicas))
    )
    ledger = LoadLedger()
    ledger.observe(fleet)
    names = [f"tenant/adapter-{i}:v1" for i in range(50)]
    popularity = [1 / (i + 1) ** exponent for i in range(50)]
    in_flight: list[str] = []
    for step, name in enumerate(rng.choices(names, popularity, k=150)):
        if in_flight and step % 3 == 2:
            ledger.finish(in_flight.pop(rng.randrange(len(in_flight))), 1)
        total = ledger.loads.total
        choice = choose(PlacementRequest(name), fleet, ledger.loads, policy=policy)
        assert choice is not None
        assert choice.reason != "over_bound"
        ledger.start(choice.replica.name, 1)
        in_flight.append(choice.replica.name)
        assert ledger.loads.of(choice.replica.name) <= ceil(bound * (total + 1) / replicas)


def test_someone_is_always_within_the_bound_whatever_a_request_opens() -> None:
    fleet = Fleet(tuple(Replica(f"mural-{i}", slots=8, max_num_seqs=10_000) for i in range(4)))
    ledger = LoadLedger()
    ledger.observe(fleet)
    policy = replace(STRICT, load_bound=1.0)
    for sequences in itertools.islice(itertools.cycle([1, 7, 128, 3]), 200):
        request = PlacementRequest("acme:v1", sequences=sequences)
        choice = choose(request, fleet, ledger.loads, policy=policy)
        assert choice is not None
        assert choice.reason != "over_bound"
        ledger.start(choice.replica.name, sequences)


def test_the_order_does_not_depend_on_load_residency_or_readiness_of_others() -> None:
    bare = Fleet(tuple(Replica(f"mural-{i}") for i in range(6)))
    names = [each.name for each in order("acme:v1", bare)]
    held = {"acme:v1": Residency("slot", load=50.0)}
    changed = Fleet(
        tuple(
            replace(each, running=i * 7, adapters=held if i % 2 else {}, ready=i != 3)
            for i, each in enumerate(bare.replicas)
        )
    )
    assert [each.name for each in order("acme:v1", changed)] == [
        name for name in names if name != "mural-3"
    ]
