"""The view over real control APIs: found, heard, drained, killed, restarted, silent."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace

import msgspec
import pytest
import trustme

from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.follow import MuralFollower
from mural_router.fleet.member import Member
from mural_router.fleet.static import StaticDiscovery
from mural_router.fleet.view import FleetSettings, FleetView
from mural_router.placement import Fleet, Replica, Residency, Use
from mural_server.protocol import AdapterStatus, ControlClient

TOKEN = "the-control-token"


async def test_a_server_is_heard_with_its_adapters_under_exact_names(
    watch, start_server, adapter_dir, endpoint_of
):
    server = await start_server(adapter_dir=str(adapter_dir), control_token=TOKEN)
    watched = await watch(endpoint_of(server), control_token=TOKEN)
    replica = await watched.ready("a")
    assert (replica.slots, replica.max_lora_rank, replica.max_num_seqs) == (4, 8, 4)
    assert replica.reports
    assert watched.view.base.model_names == ("tiny", "tiny-alias")
    control = ControlClient("127.0.0.1", server.control_port, token=TOKEN)
    status = await control.set_resident("acme:v1", level="slot", pinned=True)
    replica = await watched.replica(
        "a",
        lambda one: (
            "acme/default:v1" in one.adapters and not one.adapters["acme/default:v1"].loading
        ),
    )
    assert replica.adapters == {
        "acme/default:v1": Residency(
            level="slot", digest=status.digest, pinned=True, rank=4, bytes=100
        )
    }
    await control.remove("acme:v1")
    await watched.replica("a", lambda one: not one.adapters)


async def test_what_was_given_out_does_not_change(watch, start_server, adapter_dir, endpoint_of):
    server = await start_server(adapter_dir=str(adapter_dir))
    watched = await watch(endpoint_of(server))
    before = await watched.ready("a")
    await ControlClient("127.0.0.1", server.control_port).set_resident("acme:v1")
    after = await watched.replica("a", lambda one: one.adapters)
    assert before.adapters == {}
    assert "acme/default:v1" in after.adapters


async def test_a_draining_server_is_not_ready(watch, start_server, endpoint_of):
    server = await start_server()
    watched = await watch(endpoint_of(server))
    await watched.ready("a")
    await ControlClient("127.0.0.1", server.control_port).drain()
    replica = await watched.replica("a", lambda one: not one.ready)
    assert not replica.stale
    assert "draining" in watched.view.snapshot()[0].why_not_ready


async def test_a_server_that_ends_is_not_ready_at_once_and_ready_again_when_it_is_back(
    watch, start_server, endpoint_of, listed
):
    first = await start_server()
    discovery = listed(endpoint_of(first))
    watched = await watch(discovery)
    await watched.ready("a")
    first.stop.set()
    replica = await watched.replica("a", lambda one: not one.ready)
    assert not replica.stale, "refused, which is no silence"
    await first.exit_status
    second = await start_server()
    discovery.sets.put_nowait((endpoint_of(second),))
    await watched.ready("a")


async def test_another_process_in_the_same_place_is_begun_with_a_snapshot(watch, state_server):
    server = await state_server(boots=("one", "two"))
    watched = await watch(server.endpoint)
    await watched.ready("a")
    server.drop()
    await watched.until(lambda fleet: watched.view.snapshot()[0].restarts == 1)
    assert watched.view.snapshot()[0].report.boot_id == "two"


async def test_a_killed_process_is_not_ready_though_it_said_no_word(watch, state_server):
    server = await state_server()
    watched = await watch(server.endpoint)
    await watched.ready("a")
    server.close()
    server.drop()
    replica = await watched.replica("a", lambda one: not one.ready)
    assert not replica.stale
    assert watched.view.snapshot()[0].why_not_ready == "nobody listens there"


async def test_a_connection_that_breaks_alone_takes_no_replica_away(watch, state_server):
    server = await state_server()
    watched = await watch(server.endpoint)
    await watched.ready("a")
    unready: list[Replica] = []
    watched.view.subscribe(
        lambda fleet: unready.extend(one for one in fleet.replicas if not one.ready)
    )
    server.drop()
    await watched.until(lambda fleet: server.connections == 2)
    server.change(7)
    await watched.replica("a", lambda one: one.running == 7)
    assert unready == []


async def test_without_the_token_a_server_is_never_ready_and_the_view_says_why(
    watch, start_server, endpoint_of
):
    server = await start_server(control_token=TOKEN)
    watched = await watch(endpoint_of(server))
    await watched.until(lambda fleet: watched.view.settled)
    (member,) = watched.view.snapshot()
    assert "token" in member.error
    assert not member.replica.ready


async def test_replicas_come_and_go_with_discovery(watch, start_server, endpoint_of, listed):
    server = await start_server()
    discovery = listed()
    watched = await watch(discovery)
    a, b = endpoint_of(server, "a"), endpoint_of(server, "b")
    discovery.sets.put_nowait((b, a))
    await watched.ready("a")
    await watched.ready("b")
    assert watched.view.endpoint("a") == a
    discovery.sets.put_nowait((b,))
    await watched.until(lambda fleet: len(fleet.replicas) == 1)
    assert watched.view.endpoint("a") is None


async def test_a_pod_that_is_not_ready_is_followed_and_not_used(
    watch, start_server, endpoint_of, listed
):
    server = await start_server()
    discovery = listed(endpoint_of(server))
    watched = await watch(discovery)
    replica = await watched.ready("a")
    discovery.sets.put_nowait((replace(endpoint_of(server), ready=False, weight=2.0),))
    replica = await watched.replica("a", lambda one: not one.ready)
    assert replica.weight == 2.0
    assert watched.view.snapshot()[0].restarts == 0
    discovery.sets.put_nowait((endpoint_of(server),))
    await watched.ready("a")


async def test_what_a_replica_says_of_its_adapters_and_limits_reaches_placement(
    watch, state_server
):
    told = (
        AdapterStatus(
            name="acme:v1", digest="", level="slot", pinned=True, rank=64, bytes=100, requests=3
        ),
        AdapterStatus(name="acme:v2", digest="", level="host", rank=8, bytes=10, load=2.0),
        AdapterStatus(name="acme:v3", digest="", level="host", rank=8, bytes=10),
        AdapterStatus(name="acme:v4", digest="", level="disk", rank=8, bytes=10),
    )
    server = await state_server()
    adapters = {each.name: each for each in told}
    server.snapshot = msgspec.structs.replace(server.snapshot, adapters=adapters)
    watched = await watch(server.endpoint)
    replica = await watched.ready("a")
    assert replica.max_cpu_loras == 8
    assert replica.use == Use(ranks=192, pinned_bytes=100, wanted=2, wanted_bytes=110)
    server.change(5)
    replica = await watched.replica("a", lambda one: one.running == 5)
    assert replica.max_cpu_loras == 8


async def test_a_fleet_has_the_same_replica_for_a_member_with_nothing_new_to_say(
    watch, state_server
):
    quiet, other = await state_server(), await state_server()
    endpoints = (quiet.endpoint, replace(other.endpoint, name="b"))
    watched = await watch(*endpoints)
    first = await watched.ready("a")
    before = await watched.ready("b")
    other.change(3)
    after = await watched.replica("b", lambda one: one.running == 3)
    assert after is not before
    assert await watched.ready("a") is first
    quiet.close()
    quiet.drop()
    await watched.replica("a", lambda one: not one.ready)


async def test_a_silent_replica_becomes_stale_and_fresh_again(watch, state_server):
    server = await state_server()
    watched = await watch(server.endpoint, stale_after_s=0.2)
    await watched.ready("a")
    replica = await watched.replica("a", lambda one: one.stale)
    assert replica.ready, "what it said last"
    server.beat()
    await watched.ready("a")


@pytest.fixture
async def mute() -> AsyncIterator[int]:
    """A port that takes connections and says nothing."""

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(wait, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


async def test_a_stale_replica_that_answers_nothing_else_is_silent_and_not_ready_until_it_is_heard(
    watch, state_server, mute, monkeypatch
):
    monkeypatch.setattr("mural_router.fleet.member.SILENCE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("mural_router.fleet.member.SILENCE_INTERVAL_S", 0.01)
    server = await state_server()
    watched = await watch(replace(server.endpoint, port=mute), stale_after_s=0.2)
    assert not (await watched.ready("a")).silent
    for _ in range(2):
        replica = await watched.replica("a", lambda one: one.silent)
        assert (replica.stale, replica.ready) == (True, False)
        assert watched.view.snapshot()[0].why_not_ready == "it answers nothing any more"
        # It is told again and again.
        published = watched.published
        await watched.until(lambda fleet, before=published: watched.published > before)
        server.beat()
        assert not (await watched.ready("a")).silent


async def test_a_stale_replica_that_answers_a_request_is_not_silent(
    watch, state_server, monkeypatch
):
    asked = asyncio.Event()
    answers = Member._answers

    async def noted(member: Member) -> bool:
        answered = await answers(member)
        asked.set()
        return answered

    monkeypatch.setattr(Member, "_answers", noted)
    # A machine that stands still for a moment answers late, and that is another test.
    monkeypatch.setattr("mural_router.fleet.member.SILENCE_TIMEOUT_S", 20.0)
    server = await state_server()
    watched = await watch(server.endpoint, stale_after_s=0.2)
    await watched.replica("a", lambda one: one.stale)
    await asyncio.wait_for(asked.wait(), 20)
    (member,) = watched.view.snapshot()
    assert member.replica.stale
    assert member.replica.ready, "what it said last"
    assert not member.replica.silent


async def test_a_suspected_replica_is_not_ready_until_its_port_answers(
    watch, start_server, endpoint_of
):
    server = await start_server()
    watched = await watch(endpoint_of(server))
    await watched.ready("a")
    watched.view.suspect("a")
    await watched.replica("a", lambda one: not one.ready)
    await watched.ready("a")
    watched.view.suspect("nobody")


async def test_a_suspicion_is_in_the_fleet_before_the_next_request(watch, state_server):
    server = await state_server()
    watched = await watch(server.endpoint)
    await watched.ready("a")
    for round_ in range(2):
        # Something was published just now, so that what is no news waits to be told.
        server.change(round_ + 1)
        await watched.replica("a", lambda one, number=round_ + 1: one.running == number)
        watched.view.suspect("a")
        assert [one.ready for one in watched.view.fleet.replicas] == [False]
        await watched.ready("a")


async def test_a_replica_whose_api_port_is_dead_stays_suspected(watch, start_server, endpoint_of):
    server = await start_server()
    watched = await watch(replace(endpoint_of(server), port=1))
    await watched.ready("a")
    watched.view.suspect("a")
    await watched.replica("a", lambda one: not one.ready)
    await ControlClient("127.0.0.1", server.control_port).drain()
    await watched.until(lambda fleet: not watched.view.snapshot()[0].report.ready)
    assert watched.view.snapshot()[0].why_not_ready == "no connection to its port"


async def test_a_replica_of_another_base_is_not_ready(
    watch, start_server, endpoint_of, state_server
):
    ours = await start_server()
    other = await state_server()
    watched = await watch(
        endpoint_of(ours, "a"), endpoint_of(ours, "b"), replace(other.endpoint, name="c")
    )
    await watched.ready("a")
    await watched.ready("b")
    await watched.until(
        lambda fleet: watched.view.snapshot()[2].why_not_ready == "serves another base model"
    )
    assert watched.view.base.model_names == ("tiny", "tiny-alias")


async def test_a_burst_of_changes_is_told_together(watch, state_server):
    server = await state_server()
    watched = await watch(server.endpoint)
    await watched.ready("a")
    before = watched.published
    for running in range(1, 31):
        server.change(running)
    await watched.replica("a", lambda one: one.running == 30)
    assert watched.published - before < 30


async def test_a_subscriber_that_fails_disturbs_nobody(watch, start_server, endpoint_of, listed):
    server = await start_server()
    discovery = listed()
    watched = await watch(discovery)
    seen: list[Fleet] = []

    def fail(fleet: Fleet) -> None:
        raise RuntimeError("mine alone")

    watched.view.subscribe(fail)
    end = watched.view.subscribe(seen.append)
    discovery.sets.put_nowait((endpoint_of(server),))
    await watched.ready("a")
    assert seen[-1] is watched.view.fleet
    end()
    count = len(seen)
    watched.view.suspect("a")
    await watched.replica("a", lambda one: not one.ready)
    assert len(seen) == count


async def test_the_end_of_discovery_ends_the_view():
    class Broken(Discovery):
        async def watch(self):
            yield ()
            raise LookupError("no such service")

    with pytest.raises(ExceptionGroup) as caught:
        await FleetView(Broken(), FleetSettings()).run()
    assert caught.group_contains(LookupError)


async def test_a_renewed_certificate_holds_for_the_next_connection(watch, state_server):
    old, new = trustme.CA(), trustme.CA()
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    new.issue_cert("127.0.0.1").configure_cert(served)
    server = await state_server(ssl=served)
    trusted = ssl.create_default_context()
    old.configure_trust(trusted)
    watched = await watch(replace(server.endpoint, tls=True), ssl=trusted)
    await watched.until(lambda fleet: watched.view.settled)
    assert "CERTIFICATE" in watched.view.snapshot()[0].error.upper()
    renewed = ssl.create_default_context()
    new.configure_trust(renewed)
    watched.view.use_tls(renewed)
    await watched.ready("a")


async def test_a_follower_that_fails_is_begun_again(
    watch, start_server, endpoint_of, monkeypatch, caplog
):
    class FailsOnce(MuralFollower):
        failed = False

        async def run(self) -> None:
            if not FailsOnce.failed:
                FailsOnce.failed = True
                raise KeyError("a fault of ours")
            await super().run()

    monkeypatch.setattr("mural_router.fleet.view.MuralFollower", FailsOnce)
    watched = await watch(endpoint_of(await start_server()))
    await watched.ready("a")
    assert "a fault of ours" in caplog.text


@pytest.mark.parametrize("servers", ["first-control-token", "second-control-token"])
async def test_while_a_token_is_renewed_a_server_may_know_either(
    watch, start_server, endpoint_of, listed, servers
):
    old, new = "first-control-token", "second-control-token"
    found = listed()
    watched = await watch(found, control_token=old)
    watched.view.use_control_token(new)
    watched.view.use_control_token(new)
    server = await start_server(control_token=servers)
    found.sets.put_nowait((endpoint_of(server),))
    await watched.replica("a", lambda one: not one.stale)


async def test_what_is_said_of_hundreds_while_a_fleet_is_told_is_told_after_it(monkeypatch):
    """A network that is cut has each replica suspected while it is told that all are silent."""

    class Idle:
        async def run(self) -> None:
            await asyncio.Event().wait()

    monkeypatch.setattr(FleetView, "_follower", lambda *_: Idle())
    endpoints = tuple(Endpoint(f"r{each}", "127.0.0.1", 1 + each) for each in range(300))
    discovery = StaticDiscovery(endpoints)
    view = FleetView(discovery, FleetSettings())
    told: list[str] = []

    def suspect_all(fleet: Fleet) -> None:
        told.append("begins")
        for replica in fleet.replicas:
            view.suspect(replica.name)
        told.append("ends")

    view.subscribe(suspect_all)
    running = asyncio.create_task(view.run())
    async with asyncio.timeout(20):
        while len(told) < 4:  # noqa: ASYNC110 - its own callbacks are what is looked at
            await asyncio.sleep(0.001)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert told[:4] == ["begins", "ends", "begins", "ends"]
