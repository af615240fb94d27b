"""What clients do, seen alike with and without the express way."""

from __future__ import annotations

import asyncio

import pytest

from mural_resolvers.tenants import TenantLimits
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.scan import plain_request
from mural_router.http.settings import HttpSettings
from tests.mural_router.proxy.express_scenarios import Scenario, Scenarios
from tests.mural_router.proxy.express_stage import (
    ADMIN,
    GLOBEX,
    TRACEPARENT,
    Here,
    answers_after,
    bearer,
    request,
    whole,
)
from tests.mural_router.proxy.scripted_answers import DONE_EVENT, EVENTS, USAGE_EVENT
from tests.mural_router.proxy.scripted_replica import BOUND_S, Received, lose, says, silence

pytestmark = pytest.mark.skipif(plain_request is None, reason="nothing native is built")

scenario = Scenarios()


@scenario("unfolded")
async def a_client_leaves_before_the_answer(here: Here) -> None:
    client = await here.client()
    ended = asyncio.Event()

    async def leaves(received: Received) -> None:
        client.leave()
        await received.until_closed()
        ended.set()

    here.plays(leaves)
    client.send(request())
    await asyncio.wait_for(ended.wait(), BOUND_S)


@scenario("unfolded")
async def a_client_leaves_amid_a_stream(here: Here) -> None:
    client = await here.client()
    ended = asyncio.Event()

    async def leaves(received: Received) -> None:
        await received.send(EVENTS + chunk(b'data: {"choices":[{}]}\n\n'))
        await client.reader.readuntil(b"{}]}\n\n")
        client.leave()
        await received.until_closed()
        ended.set()

    here.plays(leaves)
    client.send(request(stream=True))
    await asyncio.wait_for(ended.wait(), BOUND_S)


@scenario("unfolded")
async def a_client_closes_its_half(here: Here) -> None:
    here.plays(silence)
    client = await here.client()
    client.send(request())
    await here.until(lambda: here.proxy.state().requests == 1)
    client.writer.write_eof()
    await client.rest()


@scenario()
async def a_client_closes_its_half_with_its_request(here: Here) -> None:
    client = await here.client()
    client.send(request()[:-5])
    client.writer.write_eof()
    await client.rest()


@scenario("unfolded")
async def a_client_reads_slowly(here: Here) -> None:
    event = chunk(b"data: " + b"x" * 500_000 + b"\n\n")
    here.plays(says(EVENTS, *[event] * 16, LAST_CHUNK))
    client = await here.client()
    client.reading.pause_reading()
    client.send(request(stream=True))
    await here.until(lambda: any(each._unread_answers for each in here.server._connections))
    client.reading.resume_reading()
    assert len(await client.answer()) > 500_000 * 16


@scenario("whole", "whole", "whole")
async def requests_on_one_connection(here: Here) -> None:
    client = await here.client()
    for _ in range(3):
        client.send(request())
        await client.answer()


@scenario("whole", "whole")
async def requests_ahead_of_their_answers(here: Here) -> None:
    client = await here.client()
    for _ in range(2):
        go = asyncio.Event()
        here.plays(answers_after(go))
        # The first is taken whole; what lies behind it is read one by one.
        client.send(request())
        await here.until(lambda: here.proxy.state().requests == 1)
        client.send(request(prompt="2"), request(prompt="3"), b"POST /v1/comp")
        go.set()
        for _ in range(3):
            await client.answer()
        client.send(request(prompt="4").removeprefix(b"POST /v1/comp"))
        await client.answer()


@scenario()
async def two_requests_in_one_piece(here: Here) -> None:
    client = await here.client()
    client.send(request(prompt="1") + request(prompt="2"))
    await client.answer()
    await client.answer()


@scenario("whole", "whole")
async def a_body_that_comes_after_its_head(here: Here) -> None:
    client = await here.client()
    for number in range(1, 3):
        head, body = request(prompt=f"{number}").split(b"\r\n\r\n")
        before = here.proxy.state().requests_total
        client.send(head + b"\r\n\r\n")
        await here.has_had(before + 1)
        client.send(body)
        await client.answer()


@scenario()
async def a_head_that_was_refused_is_nobody_elses(here: Here) -> None:
    """A body that was no longer taken leaves nothing behind for the next, which has another key."""
    client, most = await here.client(), here.http.max_buffered_bytes
    head, body = request(key=ADMIN).split(b"\r\n\r\n")
    client.send(head + b"\r\n\r\n")
    await here.until(lambda: here.proxy.state().requests_total == 2)
    here.server.buffered_bytes += most
    client.send(body)
    assert (await client.answer()).startswith(b"HTTP/1.1 503")
    here.server.buffered_bytes -= most
    lines = f"host: a\r\n{bearer('nobody00')}\r\ntransfer-encoding: chunked\r\n\r\n"
    client.send(b"POST /v1/completions HTTP/1.1\r\n" + lines.encode() + chunk(body) + LAST_CHUNK)
    assert (await client.answer()).startswith(b"HTTP/1.1 401")


@scenario()
async def a_body_that_comes_in_two_pieces(here: Here) -> None:
    client = await here.client()
    text = request()
    client.send(text[:-20])
    await here.until(lambda: here.proxy.state().buffered_bytes > 0)
    client.send(text[-20:])
    await client.answer()


@scenario("whole")
async def what_follows_is_no_request(here: Here) -> None:
    go = asyncio.Event()
    here.plays(answers_after(go))
    client = await here.client()
    client.send(request())
    await here.until(lambda: here.proxy.state().requests == 1)
    client.send(b"\0\0 no request\r\n\r\n")
    go.set()
    await client.answer()
    await client.rest()


@scenario()
async def a_client_that_asks_to_close(here: Here) -> None:
    client = await here.client()
    client.send(request("acme:v1", "connection: close"))
    assert b"\r\nconnection: close\r\n" in await client.rest()


@scenario(*["whole"] * 5)
async def heads_that_an_ingress_adds_to(here: Here) -> None:
    for fields in (
        ("x-request-id: mine",),
        ("x-session-id: s", "x-session-id: t"),
        (f"traceparent: {TRACEPARENT}",),
        ("tracestate: a=b", "X-Request-ID: ~", f"TraceParent: {TRACEPARENT}"),
        ("tracestate:", "x-session-id:", "x-forwarded-for: 10.0.0.1"),
    ):
        client = await here.client()
        client.send(request("acme:v1", *fields))
        await client.answer()


@scenario("unfolded", "unfolded")
async def an_ingress_request_that_is_asked_again(here: Here) -> None:
    here.plays(lose)
    fields = ("x-request-id: mine", f"traceparent: {TRACEPARENT}", "tracestate: a=b")
    client = await here.client()
    client.send(request("acme:v1", *fields))
    await client.answer()
    here.plays(says(EVENTS + chunk(USAGE_EVENT) + chunk(DONE_EVENT) + LAST_CHUNK))
    client.send(request("acme:v1", *fields, stream=True))
    await client.answer()


@scenario("whole", "whole", "refused", limits=TenantLimits(requests_per_minute=2))
async def an_ingress_request_over_the_limit(here: Here) -> None:
    client = await here.client()
    for _ in range(3):
        client.send(request("acme:v1", "x-request-id: mine"))
        await client.answer()


@scenario()
async def heads_that_need_a_look(here: Here) -> None:
    for fields in (
        ("x-request-id: mine", "x-request-id: mine"),
        ("x-request-id: not one",),
        ("traceparent: 00-1", "traceparent: 00-2"),
        ("content-encoding: gzip",),
        ("expect: 100-continue",),
        (bearer(GLOBEX),),
        ("host: b",),
    ):
        client = await here.client()
        client.send(request("acme:v1", *fields))
        await client.answer()


@scenario("unfolded")
async def a_drain_with_one_in_flight(here: Here) -> None:
    go = asyncio.Event()

    async def waits(received: Received) -> None:
        await go.wait()
        await received.send(whole())

    here.plays(waits)
    client = await here.client()
    client.send(request())
    await here.until(lambda: len(here.replicas["a"].requests) == 2)
    draining = asyncio.create_task(here.proxy.drain(BOUND_S))
    await here.until(lambda: here.server.draining)
    go.set()
    assert await draining == 0
    assert b"\r\nconnection: close\r\n" in await client.rest()


@scenario("unfolded")
async def a_drain_that_ends_one_in_flight(here: Here) -> None:
    here.plays(silence)
    client = await here.client()
    client.send(request())
    await here.until(lambda: len(here.replicas["a"].requests) == 2)
    assert await here.proxy.drain(0.0) == 1
    assert b"shutting down" in await client.rest()


@scenario(http=HttpSettings(port=0, max_body_bytes=100))
async def a_body_above_the_limit(here: Here) -> None:
    client = await here.client()
    client.send(request(prompt="x" * 200))
    assert (await client.rest()).startswith(b"HTTP/1.1 413")


@scenario(http=HttpSettings(port=0, max_head_fields=5))
async def more_fields_than_may_be(here: Here) -> None:
    client = await here.client()
    client.send(request("acme:v1", *(f"x-{at}: 1" for at in range(5))))
    assert (await client.rest()).startswith(b"HTTP/1.1 431")


@scenario("whole")
async def a_close_while_one_is_in_flight(here: Here) -> None:
    await here.ask()
    here.plays(silence)
    client = await here.client()
    client.send(request(n=2))
    await here.until(lambda: len(here.replicas["a"].requests) == 3)
    client.leave()


@scenario.each
async def test_all_is_seen_alike(played: Scenario, authorities: str) -> None:
    await played.is_seen_alike(authorities)
