"""How soon the fleet shows that a replica drains, dies or is not ready: as soon as it is known.

The bound is the interval of heartbeats. It leaves a busy machine time enough, and whatever is seen
by the next heartbeat, by a reconnection that waits or by ageing alone comes after it.
``benchmarks/discovery.py`` measures the times themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from mural_resolvers.backoff import Backoff
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.follow import MuralFollower
from mural_router.fleet.view import FleetSettings
from mural_server.api.state_feed import HEARTBEAT_S
from mural_server.protocol import ControlClient, Delta

SEEN_WITHIN_S = HEARTBEAT_S


def test_the_bound_tells_apart_what_is_told_and_what_is_noticed_by_silence():
    assert FleetSettings().stale_after_s > 2 * SEEN_WITHIN_S


async def seen(watched, *, ready: bool) -> None:
    async with asyncio.timeout(SEEN_WITHIN_S):
        await watched.until(lambda fleet: [one.ready for one in fleet.replicas] == [ready])


async def test_a_drain_is_seen_in_time(watch, start_server, endpoint_of):
    server = await start_server()
    watched = await watch(endpoint_of(server))
    await watched.ready("a")
    await ControlClient("127.0.0.1", server.control_port).drain()
    await seen(watched, ready=False)


async def test_a_server_s_word_about_its_readiness_is_seen_in_time(watch, state_server):
    server = await state_server()
    watched = await watch(server.endpoint)
    await watched.ready("a")
    for seq, ready in enumerate((False, True), 1):
        server.send(Delta(boot_id="boot", seq=seq, ready=ready))
        await seen(watched, ready=ready)


async def test_a_killed_server_is_seen_in_time(watch, state_server):
    server = await state_server()
    watched = await watch(server.endpoint)
    await watched.ready("a")
    server.close()
    server.drop()
    await seen(watched, ready=False)


async def test_after_a_connection_that_held_the_next_try_is_at_once(
    watch, state_server, monkeypatch
):
    happened: list[str] = []

    class Told(Backoff):
        def next_s(self) -> float:
            happened.append("wait")
            return super().next_s()

        def reset(self) -> None:
            happened.append("reset")
            super().reset()

    monkeypatch.setattr("mural_router.fleet.follow.Backoff", Told)
    server = await state_server()
    watched = await watch(server.endpoint)
    await watched.ready("a")
    # As if it had been silent for long: no event comes by which that would be noticed before.
    monkeypatch.setattr(MuralFollower, "STEADY_S", 0.0)
    server.drop()
    server.change(1)
    await watched.replica("a", lambda one: one.running == 1)
    assert happened[:2] == ["reset", "wait"]


async def test_what_discovery_knows_of_a_pod_is_seen_in_time(watch, state_server, listed):
    server = await state_server()
    discovery = listed(server.endpoint)
    watched = await watch(discovery)
    await watched.ready("a")
    for ready in (False, True):
        discovery.sets.put_nowait((replace(server.endpoint, ready=ready),))
        await seen(watched, ready=ready)


@pytest.fixture
async def pod() -> AsyncIterator[Endpoint]:
    """A vLLM pod that is well until it is asked for the second time."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
        asked += path == b"/health"
        page = b'{"data":[{"id":"tiny"}]}' if path == b"/v1/models" else b""
        status = b"503" if path == b"/health" and asked > 1 else b"200"
        head = b"HTTP/1.1 %b X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (status, len(page)) + page)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    yield Endpoint("a", "127.0.0.1", port, engine="vllm")
    server.close()


async def test_a_pod_that_is_not_healthy_is_seen_in_time_at_the_router_s_own_interval(watch, pod):
    watched = await watch(pod)
    await watched.ready("a")
    await seen(watched, ready=False)
