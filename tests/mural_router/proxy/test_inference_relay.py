"""Requests to replicas and their answers, over real sockets."""

from __future__ import annotations

import asyncio
import gc
import json
from typing import TYPE_CHECKING

import pytest

from mural_resolvers.errors import RateLimited
from mural_router.fleet.endpoint import Endpoint
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.exchange import Exchange
from mural_router.http.settings import HttpSettings
from mural_router.proxy.relay import InferenceRelay
from tests.mural_router.proxy.scripted_replica import lose, silence

if TYPE_CHECKING:
    from tests.mural_router.proxy.conftest import MakeStand
    from tests.mural_router.proxy.scripted_replica import Received, Script

BODY = b'{"model":"acme:v1","prompt":"hi"}'
STREAM = b'{"model":"acme:v1","prompt":"hi","stream":true}'
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
EVENTS_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
ANSWER = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}'
USAGE_EVENT = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE_EVENT = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"text":"%b"}]}\n\n' % text.encode()


async def answer(received: Received) -> None:
    await received.send(JSON_HEAD % len(ANSWER) + ANSWER)


async def stream(received: Received) -> None:
    await received.send(EVENTS_HEAD)
    await received.send(*(chunk(event(str(i))) for i in range(5)))
    await received.send(chunk(USAGE_EVENT), chunk(DONE_EVENT), LAST_CHUNK)


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
        await received.send(JSON_HEAD[:-2] % len(ANSWER) + fields + b"\r\n" + ANSWER)

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
        await received.send(JSON_HEAD % len(received.body) + received.body)

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
        whole = EVENTS_HEAD + b"".join(
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


async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(
    stand: MakeStand,
) -> None:
    async def break_off(received: Received) -> None:
        await received.send(EVENTS_HEAD, chunk(event("a")), chunk(event("b"))[:-9])
        await received.send(b"")
        received.writer.transport.abort()

    here = await stand(break_off)
    client = await here.client()
    client.post(STREAM)
    _, _, body = await client.answer()
    first, last = body.removesuffix(b"\n\n").split(b"\n\n")
    assert first + b"\n\n" == event("a")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_failed"
    assert await client.rest() == b""
    outcome = await here.routing.outcome()
    assert outcome.error
    assert outcome.replica_failed


async def test_an_answer_that_breaks_cannot_be_taken_for_a_whole_one(stand: MakeStand) -> None:
    async def break_off(received: Received) -> None:
        await received.send(JSON_HEAD % 100 + b"half")
        received.writer.transport.abort()

    here = await stand(break_off)
    client = await here.client()
    client.post(BODY)
    whole = await client.rest()
    assert whole.endswith(b"\r\n\r\nhalf")
    assert b"content-length: 100\r\n" in whole


async def test_a_replica_that_is_lost_before_its_answer_is_replaced(stand: MakeStand) -> None:
    here = await stand(lose, answer)
    client = await here.client()
    client.post(BODY)
    status, fields, _ = await client.answer()
    assert (status, fields["x-mural-replica"]) == (200, "r1")
    assert len(here.routing.retries) == 1
    assert here.routing.retries[0].startswith("lost")


async def test_a_replica_lost_between_head_and_body_is_replaced(stand: MakeStand) -> None:
    async def head_alone(received: Received) -> None:
        await received.send(EVENTS_HEAD)
        received.writer.transport.abort()

    here = await stand(head_alone, stream)
    client = await here.client()
    client.post(STREAM)
    assert (await client.answer())[2].endswith(DONE_EVENT)


async def test_a_replica_that_takes_no_connection_is_replaced(stand: MakeStand) -> None:
    here = await stand(answer, answer)
    here.replicas[0].close()
    client = await here.client()
    client.post(BODY)
    status, fields, _ = await client.answer()
    assert (status, fields["x-mural-replica"]) == (200, "r1")
    assert here.routing.retries[0].startswith("connect")


async def test_a_replica_that_takes_no_connection_in_time_is_replaced(
    stand: MakeStand, full_port: int
) -> None:
    here = await stand(answer, settings=HttpSettings(port=0, connect_timeout_s=0.1))
    here.routing.endpoints.insert(0, Endpoint("full", "127.0.0.1", full_port))
    client = await here.client()
    client.post(BODY)
    status, fields, _ = await client.answer()
    assert (status, fields["x-mural-replica"]) == (200, "r0")
    assert here.routing.retries == ["connect: no connection in time"]


async def test_a_replica_that_never_shakes_hands_is_replaced_and_left(stand: MakeStand) -> None:
    left = asyncio.Event()

    async def says_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        left.set()
        writer.close()

    async with await asyncio.start_server(says_nothing, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        here = await stand(answer, settings=HttpSettings(port=0, connect_timeout_s=0.1))
        here.routing.endpoints.insert(0, Endpoint("mute", "127.0.0.1", port, tls=True))
        client = await here.client()
        client.post(BODY)
        status, fields, _ = await client.answer()
        assert (status, fields["x-mural-replica"]) == (200, "r0")
        assert here.routing.retries == ["connect: no connection in time"]
        await asyncio.wait_for(left.wait(), 20)


async def test_with_no_replica_that_takes_a_connection_in_time_the_client_is_told(
    stand: MakeStand, full_port: int
) -> None:
    here = await stand(settings=HttpSettings(port=0, connect_timeout_s=0.1))
    here.routing.endpoints = [Endpoint("full", "127.0.0.1", full_port)]
    client = await here.client()
    client.post(BODY)
    status, fields, _ = await client.answer()
    assert (status, fields["retry-after"]) == (503, "1")
    assert (await here.routing.outcome()).replica_failed


async def test_without_another_replica_the_client_is_told(stand: MakeStand) -> None:
    here = await stand(lose)
    client = await here.client()
    client.post(BODY)
    status, _, body = await client.answer()
    assert status == 502
    assert json.loads(body)["error"]["code"] == "replica_failed"
    here.replicas[0].close()
    client.post(BODY)
    status, fields, _ = await client.answer()
    assert status == 503
    assert fields["retry-after"] == "1"
    assert [outcome.status for outcome in here.routing.outcomes] == [502, 503]


async def test_a_kept_connection_that_was_closed_meanwhile_is_no_failed_attempt(
    stand: MakeStand,
) -> None:
    seen = 0

    async def once(received: Received) -> None:
        nonlocal seen
        seen += 1
        if seen == 2:
            received.writer.transport.abort()
        else:
            await answer(received)

    here = await stand(once)
    client = await here.client()
    for _ in range(2):
        client.post(BODY)
        assert (await client.answer())[0] == 200
    assert here.routing.retries == []
    assert here.replicas[0].connections == 2


async def test_a_refusal_before_any_work_is_asked_elsewhere(stand: MakeStand) -> None:
    async def full(received: Received) -> None:
        await received.send(
            b"HTTP/1.1 503 Busy\r\nx-mural-retry: elsewhere\r\ncontent-length: 2\r\n\r\n{}"
        )

    here = await stand(full, answer)
    client = await here.client()
    client.post(BODY)
    assert (await client.answer())[1]["x-mural-replica"] == "r1"
    assert here.routing.statuses == [503, 200]


async def unknown(received: Received) -> None:
    await received.send(
        b"HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Bearer\r\ncontent-length: 2\r\n\r\n{}"
    )


async def test_a_replica_that_does_not_know_the_router_is_replaced_and_named_in_the_log(
    stand: MakeStand, caplog: pytest.LogCaptureFixture
) -> None:
    here = await stand(unknown, answer)
    client = await here.client()
    client.post(BODY)
    assert (await client.answer())[1]["x-mural-replica"] == "r1"
    assert here.routing.statuses == [401, 200]
    assert "replica r0 answers 401" in caplog.text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/adapters"])
async def test_a_client_is_not_told_that_its_key_is_wrong_where_the_routers_is(
    stand: MakeStand, path: str
) -> None:
    here = await stand(unknown)
    client = await here.client()
    client.post(BODY, path)
    status, fields, body = await client.answer()
    assert (status, json.loads(body)["error"]["code"]) == (502, "replica_failed")
    assert "www-authenticate" not in fields
    outcome = await here.routing.outcome()
    # Its status was told already: to count it again would be one failure too many.
    assert (outcome.status, outcome.replica_failed) == (502, False)
    client.post(BODY, path)
    assert (await client.answer())[0] == 502


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


async def test_a_cold_load_that_took_too_long_is_passed_on(stand: MakeStand) -> None:
    async def slow(received: Received) -> None:
        await received.send(b"HTTP/1.1 503 Slow\r\nretry-after: 5\r\ncontent-length: 2\r\n\r\n{}")

    here = await stand(slow, answer)
    client = await here.client()
    client.post(BODY)
    status, fields, _ = await client.answer()
    assert (status, fields["retry-after"]) == (503, "5")
    assert here.routing.retries == []


async def test_a_silent_replica_is_given_up_and_not_asked_for_again(stand: MakeStand) -> None:
    silence = asyncio.Event()

    async def silent(received: Received) -> None:
        silence.set()
        await received.until_closed()

    here = await stand(silent, answer, settings=HttpSettings(port=0, first_byte_timeout_s=0.3))
    client = await here.client()
    client.post(BODY)
    status, fields, _ = await client.answer()
    assert (status, "retry-after" in fields) == (503, True)
    assert here.routing.retries == []
    assert (await here.routing.outcome()).replica_failed


async def head_and_silence(received: Received) -> None:
    await received.send(EVENTS_HEAD)
    await received.until_closed()


@pytest.mark.parametrize("script", [silence, head_and_silence])
async def test_what_waits_for_a_replica_that_answers_nobody_is_asked_elsewhere(
    stand: MakeStand, script: Script
) -> None:
    ended = asyncio.Event()

    async def until_closed(received: Received) -> None:
        await script(received)
        ended.set()

    here = await stand(until_closed, stream)
    frozen, other = here.routing.endpoints
    client = await here.client()
    client.post(STREAM)
    await here.until(lambda: here.replicas[0].requests)
    for endpoint in (other, frozen, frozen):
        here.routing.fell_silent(endpoint)
    status, fields, body = await client.answer()
    assert (status, fields["x-mural-replica"]) == (200, "r1")
    assert body.endswith(DONE_EVENT)
    assert here.routing.retries == ["lost: the replica answers nothing any more"]
    # Should it go on after all, its work is aborted.
    await asyncio.wait_for(ended.wait(), 20)


@pytest.mark.parametrize("script", [silence, head_and_silence])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/adapters"])
async def test_what_cannot_be_asked_elsewhere_is_answered_at_once_with_the_time_to_come_back(
    stand: MakeStand, path: str, script: Script
) -> None:
    here = await stand(script)
    client = await here.client()
    client.post(BODY, path)
    await here.until(lambda: here.replicas[0].requests)
    if script is head_and_silence:
        await here.until(lambda: here.routing.statuses)
    here.routing.fell_silent(here.routing.endpoints[0])
    status, fields, body = await client.answer()
    assert (status, fields["retry-after"]) == (503, "5")
    assert json.loads(body)["error"]["code"] == "unavailable"
    outcome = await here.routing.outcome()
    assert (outcome.status, outcome.replica_failed) == (503, True)
    assert len(here.routing.retries) == (path == "/v1/completions")


async def test_a_stream_that_has_begun_may_go_on_once_its_replica_does(stand: MakeStand) -> None:
    go = asyncio.Event()

    async def pause(received: Received) -> None:
        await received.send(EVENTS_HEAD, chunk(event("a")))
        await go.wait()
        await received.send(chunk(DONE_EVENT), LAST_CHUNK)

    here = await stand(pause)
    client = await here.client()
    client.post(STREAM)
    await client.until(b"\n\n\r\n")
    here.routing.fell_silent(here.routing.endpoints[0])
    go.set()
    assert DONE_EVENT in await client.until(LAST_CHUNK)
    assert here.routing.retries == []


async def test_a_stream_that_falls_silent_ends_with_an_error_event(stand: MakeStand) -> None:
    async def silent(received: Received) -> None:
        await received.send(EVENTS_HEAD, chunk(event("a")))
        await received.until_closed()

    here = await stand(silent, settings=HttpSettings(port=0, idle_timeout_s=0.3))
    client = await here.client()
    client.post(STREAM)
    body = (await client.answer())[2]
    assert b'"code":"unavailable"' in body
    assert b"[DONE]" not in body


async def test_a_client_that_goes_away_ends_the_replicas_work(stand: MakeStand) -> None:
    closed = asyncio.Event()

    async def endless(received: Received) -> None:
        await received.send(EVENTS_HEAD, chunk(event("a")))
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
        await received.send(EVENTS_HEAD)
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
        await received.send(EVENTS_HEAD)
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


@pytest.mark.parametrize(
    "lie",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2;a=b\r\n{}\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nuntil I close",
        b"HTTP/1.1 200 OK\ncontent-length: 2\n\n{}\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: b\r\n c\r\ncontent-length: 2\r\n\r\n{}",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\na: " + b"x" * 70_000,
        b"HTTP/1.1 100 Continue\r\n\r\n" * 9,
        b"SSH-2.0-OpenSSH\r\n\r\n",
    ],
)
async def test_an_improper_answer_is_told_as_a_failed_replica(stand: MakeStand, lie: bytes) -> None:
    async def liar(received: Received) -> None:
        await received.send(lie)

    here = await stand(liar)
    client = await here.client()
    client.post(BODY)
    status, _, _ = await client.answer()
    assert status == 502
    client.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await client.answer())[0] == 200


async def test_bytes_that_nobody_asked_for_are_no_answer_to_the_next(stand: MakeStand) -> None:
    closed = asyncio.Event()

    async def twice(received: Received) -> None:
        await answer(received)
        await given_back.wait()
        await received.send(JSON_HEAD % 4 + b"evil")
        await received.until_closed()
        closed.set()

    here = await stand(twice)
    for _ in range(3):
        given_back = asyncio.Event()
        closed.clear()
        client = await here.client()
        client.post(BODY)
        assert (await client.answer())[2] == ANSWER
        given_back.set()
        async with asyncio.timeout(20):
            await closed.wait()
    assert here.replicas[0].connections == 3


async def test_interim_answers_are_not_passed_on(stand: MakeStand) -> None:
    async def interim(received: Received) -> None:
        await received.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\na: b\r\n")
        await received.send(b"\r\n" + JSON_HEAD % len(ANSWER) + ANSWER)

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
        await received.send(EVENTS_HEAD, chunk(event("a")))
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
        await received.send(EVENTS_HEAD, chunk(event("a")))
        await received.until_closed()

    here = await stand(wait)
    client = await here.client()
    client.post(STREAM)
    await client.until(b"\n\n\r\n")
    assert await here.proxy.drain(0.05) == 1
    rest = await client.rest()
    assert b"shutting down" in rest
    assert rest.endswith(LAST_CHUNK)


async def test_a_name_that_is_nowhere_is_a_failed_connection(stand: MakeStand) -> None:
    here = await stand(answer)
    here.routing.endpoints = [
        Endpoint("gone", "does-not-exist.invalid", 1),
        *here.routing.endpoints,
    ]
    client = await here.client()
    client.post(BODY)
    assert (await client.answer())[1]["x-mural-replica"] == "r0"


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
