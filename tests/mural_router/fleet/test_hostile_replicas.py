"""Servers that lie, flood or stall: they cost the others nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.follow import StateReader
from mural_router.fleet.report import Report, exact_name
from mural_router.placement import Base, Replica, UseCount, agreed_base, base_names
from mural_server.protocol import (
    AdapterStatus,
    Delta,
    Heartbeat,
    Load,
    Snapshot,
    StateEvent,
    StateGap,
    apply,
)
from mural_server.protocol import Base as WireBase
from mural_server.protocol.caution import BURST, MAX_COUNT, EventBudget
from tests.mural_router.fleet.conftest import snapshot_of

HUGE = 10**40


def status(name: str, **more: Any) -> AdapterStatus:
    return AdapterStatus(**({"name": name, "digest": "a" * 64, "level": "host"} | more))


async def report_of(snapshot: Snapshot) -> Report:
    report = await StateReader().take(snapshot)
    assert report is not None
    return report


async def test_numbers_that_cannot_be_are_made_sane(make_snapshot):
    lies = {
        "load": Load(running=HUGE, waiting=-5, kv_usage=-1.0, tokens_per_s=1e300),
        "adapters": {
            "a:v1": status(
                "a:v1", rank=-1, bytes=HUGE, requests=HUGE, load=1e308, digest="x" * 100_000
            )
        },
    }
    report = await report_of(make_snapshot("boot", **lies))
    assert (report.running, report.waiting, report.kv_usage) == (MAX_COUNT, 0, 0.0)
    found = report.adapters["a/default:v1"]
    assert (found.rank, found.bytes, found.requests, found.digest) == (0, MAX_COUNT, MAX_COUNT, "")
    assert found.load < 1e10
    assert report.tokens_per_s < 1e10


async def test_names_that_are_none_are_dropped_and_counted(make_snapshot):
    names = ["acme:v1", "../etc:v1", "A:v1", "x" * 1000 + ":v1", "a:b:c", "sql", "bad name", ""]
    report = await report_of(make_snapshot("boot", adapters={name: status(name) for name in names}))
    assert set(report.adapters) == {"acme/default:v1", "sql"}
    assert report.dropped == 6


async def test_names_beyond_the_bound_are_dropped(make_snapshot, monkeypatch):
    monkeypatch.setattr("mural_router.fleet.follow.MAX_ADAPTERS", 1000)
    reader = StateReader()
    names = [f"acme:v{i}" for i in range(1500)]
    report = await reader.take(
        make_snapshot("boot", adapters={name: status(name) for name in names})
    )
    assert report is not None
    assert (len(report.adapters), report.dropped) == (1000, 500)
    report = await reader.take(
        Delta(boot_id="boot", seq=1, changed=(status("acme:v1", level="slot"), status("new:v1")))
    )
    assert report is not None
    # What is known goes on being told, and nothing more is taken in.
    assert report.adapters["acme/default:v1"].level == "slot"
    assert len(report.adapters) == 1000


async def test_the_loop_turns_while_a_large_snapshot_is_taken(make_snapshot):
    names = [f"acme:v{i}" for i in range(2000)]
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    turning = asyncio.create_task(turn())
    await report_of(make_snapshot("boot", adapters={name: status(name) for name in names}))
    turning.cancel()
    assert turns >= 9


def test_a_base_has_no_name_that_could_be_a_tenants():
    assert base_names(("tiny", "acme:v1", "", "x" * 300, "a\nb", "org/Model-1.5")) == (
        "tiny",
        "org/Model-1.5",
    )
    assert len(base_names(tuple(f"m{i}" for i in range(1000)))) == 16


def test_most_replicas_decide_which_base_it_is_and_all_routers_alike():
    ours = Report(ready=True, base_names=("tiny",), spec_hash="1")
    liar = Report(ready=True, base_names=("acme",), spec_hash="0")
    assert agreed_base([ours.base, liar.base, ours.base]) == Base(("tiny",), "1")
    assert agreed_base([liar.base, ours.base]) == agreed_base([ours.base, liar.base])
    assert agreed_base([]) is None
    assert agreed_base([replace(ours, base_names=()).base]) is None


@given(st.text(max_size=300))
def test_every_text_is_a_name_or_none(text):
    found = exact_name(text)
    assert found is None or exact_name(found) == found


async def test_following_gives_the_state_that_the_protocol_defines(make_snapshot):
    state = make_snapshot("boot", adapters={"acme:v1": status("acme:v1")})
    reader = StateReader()
    await reader.take(state)
    events: list[StateEvent] = [
        Delta(boot_id="boot", seq=1, changed=(status("globex:v1"),), load=Load(running=3)),
        Heartbeat(boot_id="boot", seq=1),
        Delta(boot_id="boot", seq=2, removed=("acme:v1",), accepting=False),
        Delta(boot_id="boot", seq=3, accepting=True, load=Load(paused=2, waiting=1)),
    ]
    report: Report | None = None
    for event in events:
        state = apply(state, event)
        report = await reader.take(event) or report
    assert report is not None
    assert report.ready == (state.accepting and state.ready)
    assert report.waiting == state.load.waiting + state.load.paused
    assert set(report.adapters) == {exact_name(name) for name in state.adapters}
    assert reader.since == state.seq


STATUSES = st.builds(
    lambda name, level, loading, pinned, requests, load: status(
        name, level=level, loading=loading, pinned=pinned, requests=requests, load=load, rank=8
    ),
    st.sampled_from(["acme:v1", "globex:v1", "sql", "a:b:c"]),
    st.sampled_from(["disk", "host", "slot"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 2, HUGE]),
    st.sampled_from([0.0, 1.0]),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(STATUSES, max_size=3), st.lists(st.sampled_from(["acme:v1", "sql", "a:b:c"]))
        ),
        max_size=8,
    )
)
def test_what_adapters_take_together_is_kept_up_and_never_counted_anew(changes):
    async def follow() -> None:
        reader = StateReader()
        begin = snapshot_of("boot")
        for turn in range(2):  # A second snapshot begins anew.
            await reader.take(begin)
            for seq, (changed, removed) in enumerate(changes, 1):
                delta = Delta(
                    boot_id="boot", seq=seq, changed=tuple(changed), removed=tuple(removed)
                )
                report = await reader.take(delta)
                assert report is not None
                counted = Replica("a", adapters=dict(report.adapters)).use
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(UseCount, "add", None)
                    assert Replica("a", adapters=report.adapters).use == counted, turn

    asyncio.run(follow())


@pytest.mark.parametrize(
    "event",
    [
        Delta(boot_id="boot", seq=2),
        Delta(boot_id="other", seq=1),
        Heartbeat(boot_id="boot", seq=7),
        Heartbeat(boot_id="other", seq=0),
    ],
)
async def test_an_event_that_does_not_follow_is_a_gap(make_snapshot, event):
    reader = StateReader()
    with pytest.raises(StateGap):
        await reader.take(event)
    await reader.take(make_snapshot("boot"))
    with pytest.raises(StateGap):
        await reader.take(event)
    reader.forget()
    assert reader.since is None


async def test_events_are_read_no_faster_than_their_budget():
    now, slept = [0.0], []
    budget = EventBudget(lambda: now[0])

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mural_server.protocol.caution.asyncio.sleep", sleep)
        for _ in range(int(BURST)):
            await budget.spend(100)
        burst = len(slept)
        for _ in range(200):
            await budget.spend(100)
        # 20 a second.
        assert sum(slept) == pytest.approx(10, rel=0.05)
        assert burst <= 1
        # Eight MB cost as much as 128 more events.
        before = now[0]
        await budget.spend(8 << 20)
        assert now[0] - before == pytest.approx(129 / 20, rel=0.05)


async def test_a_gap_is_followed_by_a_snapshot(watch, state_server):
    server = await state_server()
    watched = await watch(server.endpoint)
    await watched.ready("a")
    server.seq += 5
    server.change(3)
    await watched.until(lambda fleet: server.connections == 2)
    server.change(4)
    await watched.replica("a", lambda one: one.running == 4)


@pytest.mark.parametrize(
    "extra",
    [
        b"data: nonsense\n\n",
        b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: " + b"x" * (9 << 20),
        b"\xff" * 1000 + b"\ndata: {}\n\n",
        b'data: {"event":"delta","boot_id":"boot","seq":1,"changed":[{"name":5}]}\n\n',
        b'data: {"event":"heartbeat","boot_id":"boot","seq":99}\n\n' * 1000,
        b'data: {"event":"heartbeat","boot_id":"boot","seq":0}\n\n' * 100_000,
    ],
)
async def test_a_server_that_sends_anything_disturbs_no_other(
    watch, state_server, start_server, endpoint_of, extra
):
    hostile = await state_server(extra=extra)
    server = await start_server()
    honest = (endpoint_of(server, "h1"), endpoint_of(server, "h2"))
    watched = await watch(hostile.endpoint, *honest)
    await watched.ready("h1")
    await watched.ready("h2")
    server.engine.numbers.running = 3
    await watched.replica("h1", lambda one: one.running == 3)
    # Bounded: it is not asked over and over.
    assert hostile.connections < 20
    assert [member.endpoint.name for member in watched.view.snapshot()] == ["a", "h1", "h2"]


async def test_a_server_that_says_nothing_is_given_up_and_asked_again(watch, monkeypatch):
    monkeypatch.setattr("mural_router.fleet.follow.CONNECT_TIMEOUT_S", 0.1)
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    watched = await watch(Endpoint(name="a", host="127.0.0.1", port=port, control_port=port))
    await watched.until(lambda fleet: watched.view.settled)
    (member,) = watched.view.snapshot()
    assert "no answer in time" in member.error
    assert not member.replica.ready
    listening.close()


async def test_a_name_that_does_not_resolve_is_told_as_an_error(watch):
    watched = await watch(Endpoint(name="a", host="no.such.invalid", port=1, control_port=2))
    await watched.until(lambda fleet: watched.view.settled)
    assert "no.such.invalid" in watched.view.snapshot()[0].error


def test_a_snapshot_of_a_version_to_come_is_read(make_snapshot):
    data = msgspec.json.encode(make_snapshot("boot"))
    more = data[:-1] + b',"news":{"of":["later"]}}'
    assert msgspec.json.decode(more, type=Snapshot).base == WireBase(
        model_names=("other",), spec_hash="0" * 64
    )
