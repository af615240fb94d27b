"""Replicas that are lost, refuse, fall silent or answer nonsense, over real sockets."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from mural_router.fleet.endpoint import Endpoint
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.settings import HttpSettings
from tests.mural_router.proxy.scripted_answers import (
    ANSWER,
    BODY,
    DONE_EVENT,
    EVENTS_UTF8,
    HEAD,
    STREAM,
    answer,
    event,
    stream,
)
from tests.mural_router.proxy.scripted_replica import lose, silence

if TYPE_CHECKING:
    from tests.mural_router.proxy.conftest import MakeStand
    from tests.mural_router.proxy.scripted_replica import Received, Script


async def test_a_stream_that_breaks_ends_with_an_error_event_and_no_done(
    stand: MakeStand,
) -> None:
    async def break_off(received: Received) -> None:
        await received.send(EVENTS_UTF8, chunk(event("a")), chunk(event("b"))[:-9])
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
        await received.send(HEAD % 100 + b"half")
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
        await received.send(EVENTS_UTF8)
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
    await received.send(EVENTS_UTF8)
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
        await received.send(EVENTS_UTF8, chunk(event("a")))
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
        await received.send(EVENTS_UTF8, chunk(event("a")))
        await received.until_closed()

    here = await stand(silent, settings=HttpSettings(port=0, idle_timeout_s=0.3))
    client = await here.client()
    client.post(STREAM)
    body = (await client.answer())[2]
    assert b'"code":"unavailable"' in body
    assert b"[DONE]" not in body


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
        await received.send(HEAD % 4 + b"evil")
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


async def test_a_name_that_is_nowhere_is_a_failed_connection(stand: MakeStand) -> None:
    here = await stand(answer)
    here.routing.endpoints = [
        Endpoint("gone", "does-not-exist.invalid", 1),
        *here.routing.endpoints,
    ]
    client = await here.client()
    client.post(BODY)
    assert (await client.answer())[1]["x-mural-replica"] == "r0"
