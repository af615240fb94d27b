"""Replicas that fail, break off and fall silent, seen alike with and without the express way."""

from __future__ import annotations

import asyncio

import pytest

from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.scan import plain_request
from mural_router.http.settings import HttpSettings
from tests.mural_router.proxy.express_scenarios import Scenario, Scenarios
from tests.mural_router.proxy.express_stage import ADMIN, Here, answers_after, request, whole
from tests.mural_router.proxy.full_backlog import full_backlog
from tests.mural_router.proxy.scripted_answers import DONE_EVENT, EVENTS, USAGE_EVENT
from tests.mural_router.proxy.scripted_replica import BOUND_S, Received, lose, says, silence

pytestmark = pytest.mark.skipif(plain_request is None, reason="nothing native is built")

scenario = Scenarios()


@scenario("unfolded")
async def a_kept_connection_is_closed_just_when_it_is_used(here: Here) -> None:
    here.plays(lose)
    assert (await here.ask()).startswith(b"HTTP/1.1 200")
    assert here.metrics.retries.total() == 0
    assert not here.breakers.troubled


@scenario("unfolded")
async def a_fresh_connection_is_closed_before_its_answer(here: Here) -> None:
    here.plays(lose, lose)
    assert b"x-mural-replica: b\r\n" in await here.ask()
    assert here.metrics.retries["made"] == 1
    assert here.source.suspected == ["a"]


@scenario(warm=False)
async def the_first_connection_is_closed_before_its_answer(here: Here) -> None:
    here.plays(lose)
    assert b"x-mural-replica: b\r\n" in await here.ask()


@scenario("unfolded", http=HttpSettings(port=0, connect_timeout_s=0.1))
async def no_other_connection_comes_in_time(here: Here) -> None:
    here.plays(lose)
    here.replicas["a"].stop_listening()
    with full_backlog(here.source.endpoints["a"].port):
        assert b"x-mural-replica: b\r\n" in await here.ask()
    assert here.metrics.retries["made"] == 1
    assert here.source.suspected == ["a"]


@scenario("unfolded")
async def no_replica_answers(here: Here) -> None:
    here.plays(lose, lose)
    here.plays(lose, lose, replica="b")
    assert (await here.ask()).startswith(b"HTTP/1.1 502")


@scenario("unfolded")
async def a_body_breaks(here: Here) -> None:
    async def half(received: Received) -> None:
        await received.send(whole()[:-9])
        received.writer.close()

    here.plays(half)
    client = await here.client()
    client.send(request())
    await client.rest()


@scenario("unfolded")
async def a_stream_breaks(here: Here) -> None:
    async def half(received: Received) -> None:
        await received.send(EVENTS + chunk(b'data: {"choices":[{}]}\n\n') + b"ff\r\ndata")
        received.writer.close()

    here.plays(half)
    client = await here.client()
    client.send(request(stream=True))
    assert b'"code":"replica_failed"' in await client.rest()


@scenario(*["unfolded"] * 3)
async def garbage(here: Here) -> None:
    for data in (
        b"no answer\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\n\r\nforever",
    ):
        here.plays(says(data))
        assert (await here.ask()).startswith(b"HTTP/1.1 502")
        here.breakers.troubled.clear()
        here.breakers.keep(frozenset())
        await here.ask(n=2)


@scenario("unfolded", "whole")
async def bytes_after_the_end(here: Here) -> None:
    here.plays(says(whole() + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"))
    assert (await here.ask()).startswith(b"HTTP/1.1 502")
    here.breakers.troubled.clear()
    await here.ask(n=2)
    assert b"evil" not in await here.ask()


@scenario("whole", "whole")
async def bytes_that_nobody_asked_for(here: Here) -> None:
    async def twice(received: Received) -> None:
        await received.send(whole())
        await received.send(whole(b'{"evil":1}'))

    here.plays(twice)
    await here.ask()
    await here.until(lambda: here.proxy.state().idle_replica_connections == 0)
    await here.ask()  # On a new one, the slow way.
    assert b"evil" not in await here.ask()


@scenario("unfolded", http=HttpSettings(port=0, first_byte_timeout_s=0.05))
async def silence_before_the_answer(here: Here) -> None:
    here.plays(silence)
    assert (await here.ask()).startswith(b"HTTP/1.1 503")


@scenario("unfolded", http=HttpSettings(port=0, idle_timeout_s=0.05))
async def silence_amid_an_answer(here: Here) -> None:
    async def stops(received: Received) -> None:
        await received.send(whole()[:-9])
        await received.until_closed()

    here.plays(stops)
    client = await here.client()
    client.send(request())
    await client.rest()


@scenario("unfolded", "unfolded")
async def a_replica_that_answers_nobody(here: Here) -> None:
    async def begins(received: Received) -> None:
        await received.send(EVENTS + chunk(b"data: 1\n\n"))
        await here.until(lambda: here.metrics.retries["made"])
        await received.send(chunk(DONE_EVENT) + LAST_CHUNK)

    # A second kept connection: without one a request is not of the express way.
    go = asyncio.Event()
    two = [await here.client() for _ in range(2)]
    here.plays(answers_after(go))
    for client in two:
        client.send(request(key=ADMIN, n=2))
    await here.until(lambda: len(here.replicas["a"].requests) == 3)
    go.set()
    for client in two:
        await client.answer()
    here.plays(begins)
    two[0].send(request(stream=True))
    await two[0].reader.readuntil(b"data: 1\n\n")
    here.plays(silence)
    two[1].send(request())
    await here.until(lambda: len(here.replicas["a"].requests) == 5)
    here.replica("a", ready=False, stale=True, silent=True)
    assert b"x-mural-replica: b\r\n" in await two[1].answer()
    # What has begun may go on.
    await two[0].reader.readuntil(LAST_CHUNK)
    assert here.metrics.retries == {"made": 1}
    here.replica("a", ready=True, stale=False, silent=False)


@scenario("unfolded", engine="vllm", replicas=({},))
async def the_only_replica_answers_nobody(here: Here) -> None:
    here.plays(silence)
    client = await here.client()
    client.send(request())
    await here.until(lambda: len(here.replicas["a"].requests) == 2)
    here.replica("a", stale=True, silent=True)
    answer = await client.answer()
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 5\r\n" in answer
    assert here.metrics.retries == {"replicas": 1}


@scenario("whole", "whole", "unfolded", "unfolded", tls=True)
async def tls_on_both_sides(here: Here) -> None:
    client = await here.client()
    for _ in range(2):
        client.send(request())
        assert (await client.answer()).startswith(b"HTTP/1.1 200")
    events = [chunk(b'data: {"choices":[{"text":"%d"}]}\n\n' % at) for at in range(5)]
    here.plays(says(EVENTS, *events, chunk(USAGE_EVENT), chunk(DONE_EVENT), LAST_CHUNK))
    client.send(request(stream=True))
    assert b"prompt_tokens" not in await client.answer()
    # More than can be read at once, both there and back: not of the express way.
    here.plays(says(whole(b'{"text":"%b"}' % (b"y" * 600_000))))
    client.send(request(prompt="x" * 600_000))
    assert b"y" * 600_000 in await client.answer()
    here.plays(lose, lose)
    client.send(request())
    assert b"x-mural-replica: b\r\n" in await client.answer()
    assert here.metrics.retries["made"] == 1
    # The one to b was kept; a client that leaves ends its replica's work.
    ended = asyncio.Event()

    async def leaves(received: Received) -> None:
        client.leave()
        await received.until_closed()
        ended.set()

    here.plays(leaves)
    client.send(request(n=2))
    await asyncio.wait_for(ended.wait(), BOUND_S)


@scenario.each
async def test_all_is_seen_alike(played: Scenario, authorities: str) -> None:
    await played.is_seen_alike(authorities)
