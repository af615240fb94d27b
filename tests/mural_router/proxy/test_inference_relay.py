"""Requests to replicas and their answers, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING

import pytest

from mural_resolvers.errors import RateLimited
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.exchange import Exchange
from mural_router.http.settings import HttpSettings
from mural_router.proxy.relay import InferenceRelay
from tests.mural_router.proxy.scripted_answers import (
    ANSWER,
    BODY,
    DONE_EVENT,
    EVENTS_UTF8,
    HEAD,
    STREAM,
    USAGE_EVENT,
    answer,
    event,
    stream,
)

if TYPE_CHECKING:
    from tests.mural_router.proxy.conftest import MakeStand
    from tests.mural_router.proxy.scripted_replica import Received


async def test_an_answer_comes_back_with_the_routers_headers(stand: MakeStand) -> None:
    here = await stand(answer)
    client = await here.client()
    client.post(BODY)
    status, fields, body = await client.answer()
    assert (status, body) == (200, ANSWER)
    assert fields["x-mural-replica"] == "r0"
    assert fields["x-request-id"] == "r-1"
    outcome = await here.routing.outcome()
    assert (outcome.status, outcome.prompt_tokens, outcome.completion_tokens) == (200, 7, 5)
    assert outcome.error is None
    assert outcome.first_byte_s is not None


async def test_a_replica_sees_the_routers_identity_and_nothing_of_the_clients(
    stand: MakeStand,
) -> None:
    here = await stand(answer)
    client = await here.client()
    client.post(
        BODY,
        "/v1/completions?a=b",
        "authorization: Bearer mural_secret",
        "x-mural-tenant: globex",
        "x-mural-weight: 99",
        "x-gateway-destination-endpoint: 10.0.0.1:80",
        "cookie: a=b",
        "x-session-id: s",
    )
    await client.answer()
    received = here.replicas[0].requests[0]
    assert received.head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert received.fields == {
        "host": here.routing.endpoints[0].authority,
        "content-type": "application/json",
        "content-length": str(len(BODY)),
        "x-mural-tenant": "acme",
        "authorization": "Bearer router",
    }
    ask = here.routing.asks[0]
    assert ask.authorization == ("Bearer mural_secret",)
    assert ask.headers == {"x-session-id": "s"}


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        (b"connection: x-hop\r\nX-Hop: 1\r\nx-end: 2\r\n", {"x-end": "2"}),
        (b"x-hop: 1\r\nx-hop-by: 2\r\nConnection: Keep-Alive,\tX-HOP\r\n", {"x-hop-by": "2"}),
        (
            b"connection: x-a\r\nx-a: 1\r\nx-b: 2\r\nconnection: ,x-b ,.*\r\nc: 3\r\n",
            {"c": "3"},
        ),
        (b"connection: keep-alive\r\nx-end: 2\r\n", {"x-end": "2"}),
        (b"connection: content-length\r\n", {}),
        (b"connection: close, x-hop\r\nx-hop: 1\r\n", {}),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/adapters"])
async def test_fields_that_an_answers_connection_names_end_here(
    stand: MakeStand, path: str, fields: bytes, passed: dict[str, str]
) -> None:
    async def hop(received: Received) -> None:
        await received.send(HEAD[:-2] % len(ANSWER) + fields + b"\r\n" + ANSWER)

    here = await stand(hop)
    client = await here.client()
    client.post(BODY, path)
    status, got, body = await client.answer()
    assert (status, body) == (200, ANSWER)
    ours = {"content-type", "content-length", "x-mural-replica", "x-request-id"}
    assert {name: value for name, value in got.items() if name not in ours} == passed


async def test_connections_are_kept_on_both_sides(stand: MakeStand) -> None:
    here = await stand(answer)
    clients = [await here.client() for _ in range(4)]
    for _ in range(50):
        for client in clients:
            client.post(BODY)
        for client in clients:
            assert (await client.answer())[0] == 200
    assert len(here.replicas[0].requests) == 200
    assert here.replicas[0].connections <= 4
    assert here.proxy.state().replica_connections_opened == here.replicas[0].connections


async def test_pipelined_requests_are_answered_in_order(stand: MakeStand) -> None:
    async def echo(received: Received) -> None:
        await received.send(HEAD % len(received.body) + received.body)

    here = await stand(echo)
    client = await here.client()
    for i in range(20):
        client.post(b"%d" % i)
        client.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    for i in range(20):
        assert (await client.answer())[2] == b"%d" % i
        assert (await client.answer())[2] == b""


async def test_a_stream_goes_on_as_it_comes_and_its_usage_is_noticed(stand: MakeStand) -> None:
    here = await stand(stream)
    client = await here.client()
    client.post(STREAM)
    _, fields, body = await client.answer()
    assert fields["content-type"].startswith("text/event-stream")
    assert body == b"".join(event(str(i)) for i in range(5)) + USAGE_EVENT + DONE_EVENT
    outcome = await here.routing.outcome()
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (7, 5)


async def test_a_usage_that_only_the_router_asked_for_is_read_and_not_passed_on(
    stand: MakeStand,
) -> None:
    here = await stand(stream)
    here.routing.hide_usage = True
    client = await here.client()
    client.post(STREAM)
    _, _, body = await client.answer()
    assert body == b"".join(event(str(i)) for i in range(5)) + DONE_EVENT
    assert (await here.routing.outcome()).completion_tokens == 5


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
async def test_a_stream_that_comes_in_odd_pieces_is_the_same(stand: MakeStand, size: int) -> None:
    async def torn(received: Received) -> None:
        whole = EVENTS_UTF8 + b"".join(
            chunk(part)
            for part in (event("a")[:9], event("a")[9:] + event("b"), USAGE_EVENT, DONE_EVENT)
        )
        whole += LAST_CHUNK
        await received.send(*(whole[i : i + size] for i in range(0, len(whole), size)))

    here = await stand(torn)
    here.routing.hide_usage = True
    client = await here.client()
    client.post(STREAM)
    _, _, body = await client.answer()
    assert body == event("a") + event("b") + DONE_EVENT
    assert (await here.routing.outcome()).completion_tokens == 5


@pytest.mark.parametrize(
    "fields",
    [
        ["content-type: text/plain"],
        ["content-type: application/x-www-form-urlencoded"],
        ["content-type: multipart/form-data; boundary=x"],
        ["content-type: application/json", "Content-Type: text/plain"],
        ["content-encoding: gzip"],
        ["content-type: application/json", "content-encoding: identity", "Content-Encoding: br"],
    ],
)
async def test_a_body_that_is_said_to_be_no_plain_json_is_refused(
    stand: MakeStand, fields: list[str]
) -> None:
    here = await stand(answer)
    client = await here.client()
    client.post(BODY, "/v1/completions", *fields)
    status, _, body = await client.answer()
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_input")
    assert here.routing.asks == []


@pytest.mark.parametrize(
    "fields",
    [
        [],
        ["content-type: Application/JSON; charset=utf-8"],
        ["content-type: application/vnd.api+json", "content-encoding: identity"],
    ],
)
async def test_a_body_that_is_said_to_be_json_is_taken(stand: MakeStand, fields: list[str]) -> None:
    here = await stand(answer)
    client = await here.client()
    client.post(BODY, "/v1/completions", *fields)
    assert (await client.answer())[0] == 200


async def test_a_client_that_goes_away_ends_the_replicas_work(stand: MakeStand) -> None:
    closed = asyncio.Event()

    async def endless(received: Received) -> None:
        await received.send(EVENTS_UTF8, chunk(event("a")))
        await received.until_closed()
        closed.set()

    here = await stand(endless)
    client = await here.client()
    client.post(STREAM)
    await client.until(b"\n\n\r\n")
    client.close()
    async with asyncio.timeout(20):
        await closed.wait()
    assert (await here.routing.outcome()).error == "the client went away"


async def test_a_client_that_goes_away_while_it_waits_is_not_routed(stand: MakeStand) -> None:
    here = await stand(answer)
    here.routing.gate = asyncio.Event()
    client = await here.client()
    client.post(BODY)
    await here.routing.asked()
    client.close()
    async with asyncio.timeout(20):
        await here.routing.ended.wait()
    assert here.routing.cancelled == 1
    assert here.replicas[0].requests == []


async def test_a_client_that_takes_nothing_holds_its_replica_back(stand: MakeStand) -> None:
    # The kernel's buffers on both sides take up to 20 MB; the answer has 39.
    pieces, sent = 600, 0
    stalled = asyncio.Event()
    piece = chunk(event("x" * 65536))

    async def flood(received: Received) -> None:
        nonlocal sent
        await received.send(EVENTS_UTF8)
        for _ in range(pieces):
            received.writer.write(piece)
            try:
                async with asyncio.timeout(1.0):
                    await received.writer.drain()
            except TimeoutError:
                stalled.set()
                await received.writer.drain()
            sent += 1
        await received.send(LAST_CHUNK)

    here = await stand(flood)
    client = await here.client()
    client.reader._limit = 1024  # type: ignore[attr-defined] # the stream's own buffer takes none
    client.post(STREAM)
    async with asyncio.timeout(20):
        await stalled.wait()
    assert sent < 400
    client.reader._limit = 1 << 20  # type: ignore[attr-defined] # and now it does
    assert (await client.answer())[2] == event("x" * 65536) * pieces


async def test_a_client_that_takes_nothing_for_too_long_is_let_go(stand: MakeStand) -> None:
    async def flood(received: Received) -> None:
        await received.send(EVENTS_UTF8)
        while True:
            await received.send(chunk(event("x" * 65536)))

    here = await stand(flood, settings=HttpSettings(port=0, stall_timeout_s=0.3))
    client = await here.client()
    client.reader._limit = 1024  # type: ignore[attr-defined] # the stream's own buffer takes none
    client.post(STREAM)
    assert (await here.routing.outcome()).error == "the client went away"


async def test_what_routing_refuses_is_told_and_the_connection_stays(stand: MakeStand) -> None:
    here = await stand(answer)
    here.routing.error = RateLimited("Too much.", retry_after_s=2.5)
    client = await here.client()
    for _ in range(2):
        client.post(BODY)
        status, fields, body = await client.answer()
        assert (status, fields["retry-after"]) == (429, "3")
        assert fields["x-request-id"] == here.routing.asks[-1].request_id
        assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        assert "connection" not in fields


async def test_interim_answers_are_not_passed_on(stand: MakeStand) -> None:
    async def interim(received: Received) -> None:
        await received.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\na: b\r\n")
        await received.send(b"\r\n" + HEAD % len(ANSWER) + ANSWER)

    here = await stand(interim)
    client = await here.client()
    client.post(BODY)
    assert (await client.answer())[2] == ANSWER


async def test_a_replicas_own_identity_headers_are_not_passed_on(stand: MakeStand) -> None:
    async def more(received: Received) -> None:
        await received.send(
            b"HTTP/1.1 200 OK\r\nserver: x\r\nx-mural-replica: me\r\nx-request-id: z\r\n"
            b"keep-alive: timeout=5\r\ncontent-length: 2\r\nx-other: y\r\n\r\n{}"
        )

    here = await stand(more)
    client = await here.client()
    client.post(BODY)
    _, fields, _ = await client.answer()
    assert fields == {
        "content-length": "2",
        "x-other": "y",
        "x-mural-replica": "r0",
        "x-request-id": "r-1",
    }


async def test_a_drained_proxy_finishes_what_is_in_flight(stand: MakeStand) -> None:
    go_on = asyncio.Event()

    async def wait(received: Received) -> None:
        await received.send(EVENTS_UTF8, chunk(event("a")))
        await go_on.wait()
        await received.send(chunk(DONE_EVENT), LAST_CHUNK)

    here = await stand(wait)
    client, idle = await here.client(), await here.client()
    client.post(STREAM)
    await client.until(b"\n\n\r\n")
    drained = asyncio.create_task(here.proxy.drain(20.0))
    assert await idle.rest() == b""
    with pytest.raises(ConnectionRefusedError):
        await here.client()
    go_on.set()
    assert (await client.rest()).endswith(LAST_CHUNK)
    assert await drained == 0


async def test_what_outlives_the_grace_ends_with_an_error_event(stand: MakeStand) -> None:
    async def wait(received: Received) -> None:
        await received.send(EVENTS_UTF8, chunk(event("a")))
        await received.until_closed()

    here = await stand(wait)
    client = await here.client()
    client.post(STREAM)
    await client.until(b"\n\n\r\n")
    assert await here.proxy.drain(0.05) == 1
    rest = await client.rest()
    assert b"shutting down" in rest
    assert rest.endswith(LAST_CHUNK)


async def test_a_request_that_was_answered_is_gone_without_the_collector(stand: MakeStand) -> None:
    here = await stand(answer)
    client = await here.client()
    kinds = (InferenceRelay, Exchange)
    gc.collect()
    gc.disable()
    try:
        client.post(BODY)
        assert (await client.answer())[0] == 200
        await here.routing.outcome()
        kept = [each for each in gc.get_objects() if type(each) in kinds]
        assert not kept
    finally:
        gc.enable()
