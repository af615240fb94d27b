"""The control API through its own client: state, residency, declared adapters, drain."""

from __future__ import annotations

import asyncio
import json

import httpx
import msgspec
import pytest

from mural_resolvers.errors import Unavailable, UnusableAdapter
from mural_server.api.state_feed import StateFeed, difference, in_half_octaves
from mural_server.protocol import (
    ControlClient,
    ControlError,
    Delta,
    Heartbeat,
    Snapshot,
    StateEvent,
    StateGap,
    apply,
)

TOKEN = "the-control-token"


@pytest.fixture
async def controlled(start_server, adapter_dir):
    return await start_server(adapter_dir=str(adapter_dir), control_token=TOKEN)


@pytest.fixture
def control(controlled) -> ControlClient:
    return ControlClient("127.0.0.1", controlled.control_port, token=TOKEN)


async def test_residency_is_set_seen_and_taken_away(controlled, control):
    status = await control.set_resident("acme:v1", level="slot", pinned=True)
    assert (status.level, status.pinned, status.rank) == ("slot", True, 4)
    again = await control.set_resident(
        "acme/default:v1", digest=status.digest, level="slot", pinned=True
    )
    assert again.name == "acme:v1"
    assert again.digest == status.digest
    freed = (await control.remove("acme:v1")).freed
    assert (freed.slot, freed.host, freed.kv_blocks) == (7, 100, 2)
    assert (await control.remove("acme:v1")).freed.host == 0
    assert controlled.engine.resident == {}


async def test_refusals_keep_their_status(controlled, control):
    controlled.engine.refusals["globex:v1"] = UnusableAdapter("rank 64 is above 8")
    for name, digest, status in (
        ("acme:v1", "0" * 64, 409),
        ("globex:v1", None, 422),
        ("acme:v9", None, 404),
        ("a:b:c", None, 400),
        ("tiny", None, 400),
    ):
        with pytest.raises(ControlError) as caught:
            await control.set_resident(name, digest=digest)
        assert caught.value.status == status, caught.value
    with pytest.raises(ControlError) as caught:
        await control.remove("..")
    assert caught.value.status == 400


async def test_declared_adapters_hold_back_readiness_until_they_were_there_once(
    start_server, adapter_dir
):
    server = await start_server(adapter_dir=str(adapter_dir), await_declared_s=600)
    control = ControlClient("127.0.0.1", server.control_port)
    assert not await control.ready()
    answer = await control.declare(("acme:v1", "acme:v2"))
    assert answer.missing == ("acme:v1", "acme:v2")
    assert (await server.http.get("/ready")).status_code == 503
    for name in ("acme:v1", "acme:v2"):
        assert not await control.ready()
        await control.set_resident(name)
    assert await control.ready()
    assert (await server.http.get("/ready")).status_code == 200
    assert (await control.declare(("acme:v1",))).resident == ("acme:v1",)
    await control.remove("acme:v1")
    assert (await control.declare(("acme:v1", "globex:v1"))).missing == ("acme:v1", "globex:v1")
    assert await control.ready()


async def test_without_a_wait_for_it_a_declaration_takes_nobody_out_of_service(controlled, control):
    await control.declare(("acme:v1",))
    assert await control.ready()
    states = control.states()
    state = await anext(states)
    await states.aclose()
    assert (state.ready, state.declared) == (True, ("acme:v1",))


async def test_only_what_is_resident_can_be_pinned(control):
    with pytest.raises(ControlError) as caught:
        await control.set_resident("acme:v1", level="disk", pinned=True)
    assert caught.value.status == 400


async def test_where_no_source_downloads_there_is_no_disk_to_fetch_to(controlled, control):
    with pytest.raises(ControlError, match="no disk cache") as caught:
        await control.set_resident("acme:v1", level="disk")
    assert caught.value.status == 400
    assert controlled.engine.loads == []


async def test_drain_takes_no_more_requests(controlled, control):
    answer = await control.drain()
    assert not answer.accepting
    assert not await control.ready()
    assert await control.healthy()
    refused = await controlled.complete()
    assert refused.status_code == 503
    assert refused.headers["retry-after"]


async def test_without_the_token_all_is_401_but_the_probes(controlled):
    bare = ControlClient("127.0.0.1", controlled.control_port)
    wrong = ControlClient("127.0.0.1", controlled.control_port, token="wrong")
    for client in (bare, wrong):
        assert await client.healthy()
        with pytest.raises(ControlError) as caught:
            await client.drain()
        assert caught.value.status == 401
        with pytest.raises(ControlError):
            await anext(client.events())
    assert controlled.state.admission.accepting


async def test_a_page_in_a_browser_reaches_nothing(server):
    async with httpx.AsyncClient(base_url=server.control_url) as http:
        response = await http.post("/mural/v1/drain", headers={"origin": "https://example.org"})
    assert response.status_code == 403
    assert server.state.admission.accepting


async def test_bodies_that_are_none_are_400(server):
    async with httpx.AsyncClient(base_url=server.control_url) as http:
        for path in ("/mural/v1/resident", "/mural/v1/declared"):
            for body in (b"", b"[]", b"{}", b'{"names": 5}', b'{"name": "acme:v1", "x": 1}'):
                response = await http.put(path, content=body)
                assert response.status_code == 400
                assert response.json()["error"]["message"]
        for since in ("-1", "x", "9" * 30, "１"):
            response = await http.get("/mural/v1/state", params={"since": since})
            assert response.status_code == 400


async def test_the_stream_begins_with_a_snapshot_and_follows_changes(controlled, control):
    states = control.states()
    first = await anext(states)
    assert first.base.model_names == ("tiny", "tiny-alias")
    assert first.base.spec_hash == controlled.engine.info.base_spec.hash
    assert first.limits.slots == 4
    assert first.adapters == {}
    await control.set_resident("acme:v1")
    state = first
    while "acme:v1" not in state.adapters or state.adapters["acme:v1"].level != "host":
        state = await asyncio.wait_for(anext(states), 10)
    assert state.boot_id == first.boot_id
    assert state.seq > first.seq
    await states.aclose()

    # What a reader that was away missed is told from where it was.
    events = control.events(since=first.seq)
    missed = await anext(events)
    await events.aclose()
    assert isinstance(missed, Delta)
    assert missed.seq == first.seq + 1


async def test_a_number_that_is_not_known_gets_a_snapshot(controlled, control):
    events = control.events(since=10**6)
    assert isinstance(await anext(events), Snapshot)
    await events.aclose()


@pytest.fixture
async def feed(server) -> StateFeed:
    return StateFeed(server.state, boot_id="boot", history=4, heartbeat_s=0.01)


async def decoded(events) -> StateEvent:
    data = await anext(events)
    assert data.startswith(b"data: ")
    return msgspec.json.decode(data[6:], type=StateEvent)


async def test_silence_is_filled_with_heartbeats(feed):
    events = feed.read(None)
    snapshot = await decoded(events)
    assert await decoded(events) == Heartbeat(boot_id="boot", seq=snapshot.seq)
    await events.aclose()


async def test_a_reader_that_fell_behind_gets_a_snapshot(feed, server):
    events = feed.read(None)
    assert isinstance(await decoded(events), Snapshot)
    for running in range(1, 10):
        server.engine.numbers.running = running
        feed.refresh()
    state = await decoded(events)
    assert isinstance(state, Snapshot)
    assert state.load.running == 9
    await events.aclose()


async def test_readers_are_bounded(feed):
    readers = [feed.read(None) for _ in range(64)]
    for reader in readers:
        await anext(reader)
    with pytest.raises(Unavailable):
        feed.read(None)
    for reader in readers:
        await reader.aclose()
    assert await anext(feed.read(None))


async def test_deltas_applied_give_the_next_snapshot(feed, server):
    old = feed.snapshot
    server.engine.numbers.running = 3
    server.engine.numbers.prefix_hits = 5
    await server.complete(model="acme:v1")
    server.state.readiness.declare({"globex:v1"})
    feed.refresh()
    delta = difference(old, feed.snapshot)
    assert delta is not None
    assert apply(old, delta) == feed.snapshot
    await server.state.catalog.admin.unload("acme:v1")
    old = feed.snapshot
    feed.refresh()
    delta = difference(old, feed.snapshot)
    assert delta is not None
    assert apply(old, delta) == feed.snapshot
    assert feed.snapshot.adapters == {}


async def test_nothing_new_is_no_event(feed):
    feed.refresh()
    before = feed.snapshot.seq
    feed.refresh()
    assert feed.snapshot.seq == before


def test_a_load_that_only_fades_is_told_in_steps():
    assert in_half_octaves(0.0) == 0.0
    assert in_half_octaves(8.0) == 8.0
    assert in_half_octaves(8.5) == 8.0
    assert len({in_half_octaves(1 + rate / 1000) for rate in range(1000)}) == 3


async def test_events_are_one_json_line_each(server):
    async with (
        httpx.AsyncClient(base_url=server.control_url, timeout=10) as http,
        http.stream("GET", "/mural/v1/state") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            event = json.loads(line.removeprefix("data: "))
            assert event["event"] == "snapshot"
            break


async def test_an_event_out_of_order_is_a_gap(feed):
    snapshot = feed.snapshot
    with pytest.raises(StateGap):
        apply(None, Delta(boot_id="boot", seq=1))
    with pytest.raises(StateGap):
        apply(snapshot, Delta(boot_id="boot", seq=snapshot.seq + 2))
    with pytest.raises(StateGap):
        apply(snapshot, Delta(boot_id="other", seq=snapshot.seq + 1))
    with pytest.raises(StateGap):
        apply(snapshot, Heartbeat(boot_id="boot", seq=snapshot.seq + 1))
