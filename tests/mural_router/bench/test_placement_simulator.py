"""The simulator counts right, so that the published figure may be believed."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from mural_router.bench.figure import figure, table
from mural_router.bench.policies import (
    POLICIES,
    BoundedLoadRing,
    LeastLoaded,
    Mural,
    RoundRobin,
    SizeBlind,
)
from mural_router.bench.simulator import FleetModel, Result, simulate
from mural_router.bench.traces import TRACES, Arrival, Outage, Trace, exploding, loss, mixed, zipf
from mural_router.placement import Fleet, Replica

ALONE = FleetModel(replicas=1, routers=1)


def asks(*at_s: float, adapter: str = "acme:v1", prefix: int = 0) -> tuple[Arrival, ...]:
    return tuple(
        Arrival(at, adapter, prefix, shared_tokens=900, own_tokens=100, output_tokens=11)
        for at in at_s
    )


def test_a_first_token_costs_the_load_and_the_prompt_and_a_later_one_its_own_part() -> None:
    result = simulate(Trace("two", asks(0.0, 10.0)), LeastLoaded, ALONE)
    cold = ALONE.load_s + 1000 / ALONE.prefill_tokens_per_s
    warm = 100 / ALONE.prefill_tokens_per_s
    assert result.ttft_p50_s == pytest.approx((cold + warm) / 2)
    assert result.residency_hits == 0.5
    assert result.prefix_hits == pytest.approx(900 / 2000)


def test_requests_that_wait_for_one_load_share_it() -> None:
    result = simulate(Trace("burst", asks(0.0, 0.1, 0.2)), LeastLoaded, ALONE)
    assert result.residency_hits == pytest.approx(2 / 3)


def test_memory_forgets_the_adapter_used_least_recently() -> None:
    model = replace(ALONE, ranks_held=16)
    arrivals = (*asks(0.0), *asks(10.0, adapter="globex:v1", prefix=1), *asks(20.0))
    assert simulate(Trace("turns", arrivals), LeastLoaded, model).residency_hits == 0
    roomy = simulate(Trace("turns", arrivals), LeastLoaded, replace(model, ranks_held=32))
    assert roomy.residency_hits == pytest.approx(1 / 3)


def test_more_than_the_seats_wait_in_line() -> None:
    model = replace(ALONE, seats=1, token_s=1.0, token_s_a_seat=0.0)
    result = simulate(Trace("line", asks(0.0, 0.0)), LeastLoaded, model)
    # The second begins when the first has made its ten further tokens.
    assert result.ttft_p99_s > 10


def test_what_a_dying_replica_had_not_begun_is_answered_elsewhere() -> None:
    model = FleetModel(replicas=2, routers=1, load_s=5.0)
    trace = Trace("dies", asks(0.0, 0.1, 0.2, 0.3), (Outage(0, 1.0, 20.0), Outage(1, 40.0, 50.0)))
    result = simulate(trace, RoundRobin, model)
    assert result.broken == 0


def test_streams_of_a_dying_replica_break() -> None:
    model = replace(ALONE, token_s=10.0)
    trace = Trace("dies", (*asks(0.0), *asks(90.0, 91.0)), (Outage(0, 20.0, 30.0),))
    assert simulate(trace, LeastLoaded, model).broken == 1


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_replay_is_the_same_every_time(policy: type[Mural]) -> None:
    trace = zipf(5.0, 40.0, 50)
    assert simulate(trace, policy, FleetModel()) == simulate(trace, policy, FleetModel())


def test_traces_hold_what_they_are_named_for() -> None:
    for make in TRACES:
        trace = make(30.0, 50.0, 100)
        times = [each.at_s for each in trace.arrivals]
        assert times == sorted(times)
        assert times[-1] < 30.0
    middle = [each for each in exploding(30.0, 50.0, 100).arrivals if 10 <= each.at_s < 20]
    assert sum(each.adapter.endswith("adapter-50:v1") for each in middle) > 0.4 * len(middle)
    assert loss(30.0, 50.0, 100).outages == (Outage(2, 15.0, 22.5),)


def test_the_ring_keeps_to_its_bound() -> None:
    ring = BoundedLoadRing()
    ring.observe(Fleet(tuple(Replica(f"mural-{i}") for i in range(4))))
    sent = []
    for number in range(1, 101):
        name = ring.choose(asks(0.0)[0])
        assert name is not None
        ring.started(name, asks(0.0)[0])
        sent.append(name)
        assert sent.count(name) <= max(1, 1.25 * number / 4) or number < 4


def test_pinned_placement_beats_spraying_where_adapters_exceed_one_replica_s_memory() -> None:
    trace = zipf(20.0, 60.0, 400)
    model = FleetModel(replicas=6, ranks_held=70 * 16)
    ours = simulate(trace, Mural, model)
    for other in (RoundRobin, LeastLoaded):
        theirs = simulate(trace, other, model)
        assert ours.residency_hits > theirs.residency_hits + 0.1
        assert ours.prefix_hits > theirs.prefix_hits
        assert ours.homes < theirs.homes


def test_ranks_make_loads_longer_memory_smaller_and_tokens_slower() -> None:
    small, large = (tuple(replace(each, rank=rank) for each in asks(0.0)) for rank in (16, 64))
    times = [
        simulate(Trace("two", each * 2), LeastLoaded, ALONE).ttft_p50_s for each in (small, large)
    ]
    assert times[1] - times[0] == pytest.approx(3 * ALONE.load_s)
    others = asks(20.0, adapter="globex:v1", prefix=1)
    model = replace(ALONE, ranks_held=80)
    again = asks(40.0)
    for arrivals, hits in ((small, 1 / 3), (large, 1 / 3)):
        trace = Trace("three", (*arrivals, *others, *(replace(again[0], rank=arrivals[0].rank),)))
        assert simulate(trace, LeastLoaded, model).residency_hits == pytest.approx(hits)
        tight = simulate(trace, LeastLoaded, replace(model, ranks_held=72))
        assert tight.residency_hits == pytest.approx(hits if arrivals is small else 0)
    slow = replace(ALONE, seats=1, token_s=0.0, token_s_a_seat=1.0, load_s=0.0)
    waits = [
        simulate(Trace("two", each * 2), LeastLoaded, slow).ttft_p99_s for each in (small, large)
    ]
    assert waits[1] / waits[0] == pytest.approx((1 + 0.02 * 64) / (1 + 0.02 * 16), rel=0.01)


def test_costs_are_more_even_where_ranks_and_bytes_are_known() -> None:
    trace = mixed(30.0, 96.0, 300)
    assert {each.rank for each in trace.arrivals} == {8, 64}
    known, blind = (simulate(trace, policy, FleetModel()) for policy in (Mural, SizeBlind))
    assert known.spread < blind.spread - 0.02
    assert known.residency_hits > blind.residency_hits - 0.03


def test_the_program_that_times_a_choice_runs() -> None:
    program = Path(__file__).parents[3] / "benchmarks" / "placement.py"
    command = [sys.executable, str(program), "--replicas", "4", "--adapters", "20"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60, text=True)
    assert "view of the fleet new" in done.stdout


def test_the_figure_and_the_table_hold_every_result() -> None:
    results = [
        Result(trace, policy.name, 10, 0, 0.5, 0.25, 1.1, 1.0, 0.05, 2.5)
        for trace in ("Zipf", "diurnal & more")
        for policy in POLICIES
    ]
    drawn = ET.fromstring(figure(results))
    texts = [element.text for element in drawn.iter() if element.text and element.text.strip()]
    assert texts.count("50 ms") == len(results)
    assert texts.count("2.5 s") == len(results)
    assert {policy.name for policy in POLICIES} <= set(texts)
    assert table(results).count("\n") == len(results) + 1
