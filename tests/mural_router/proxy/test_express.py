"""With and without the express way a client, a replica and the router's own books see the same.

Each scenario is played twice over real sockets, and all that can be observed is compared.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest

from mural_resolvers.names import AdapterName
from mural_resolvers.tenants import KeyRing, Principal, TenantLimits
from mural_resolvers.versions import AliasTarget
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.scan import plain_request
from mural_router.http.settings import HttpSettings
from mural_router.limits.local import LocalLimiter
from mural_router.placement import Base, PlacementPolicy, Residency
from mural_router.proxy import express
from mural_router.proxy.express import _Express
from mural_router.proxy.relay import InferenceRelay
from mural_router.routing.dispatch import Attempt
from mural_router.routing.versions import AliasOverlay, KnownVersions, VersionSource
from tests.mural_router.proxy.express_stage import (
    ACME,
    ADMIN,
    ANSWER,
    CHUNKED,
    DIGEST,
    DONE_EVENT,
    EVENTS,
    GLOBEX,
    HEAD,
    TRACEPARENT,
    USAGE_EVENT,
    Here,
    Setting,
    answers_after,
    bearer,
    counts,
    held,
    request,
    whole,
)
from tests.mural_router.proxy.full_backlog import full_backlog
from tests.mural_router.proxy.scripted_replica import BOUND_S, Received, lose, says, silence

pytestmark = pytest.mark.skipif(plain_request is None, reason="nothing native is built")


Play = Callable[[Here], Awaitable[None]]
SCENARIOS: list[tuple[Play, list[str], Setting]] = []


def scenario(*used: str, **setting: object) -> Callable[[Play], Play]:
    """``used``: what becomes of its requests on the express way, of those that are taken there."""

    def keep(play: Play) -> Play:
        SCENARIOS.append((play, list(used), Setting(**setting)))  # type: ignore[arg-type] # fields by name
        return play

    return keep


async def play_once(
    play: Play, setting: Setting, authorities: str, *, express: bool
) -> tuple[object, list[str]]:
    here = Here(setting, authorities, express=express)
    await here.begin()
    await play(here)
    return await here.end(), here.used


# -- answers --------------------------------------------------------------------------------------


@scenario("whole")
async def a_whole_answer(here: Here) -> None:
    assert b"\r\nx-mural-digest: " + DIGEST.encode() in await here.ask()


@scenario("whole", "whole")
async def a_chat_and_a_completion(here: Here) -> None:
    await here.ask(path="/v1/chat/completions", messages=[{"role": "user", "content": "hé\n"}])
    await here.ask(prompt="hé", temperature=0.5, stop=["a", "b"])


@scenario("whole", "whole")
async def a_head_and_a_body_apart(here: Here) -> None:
    """As nearly all servers write them, vLLM's and Mural's among them."""
    for _ in range(2):
        here.plays(says(HEAD % len(ANSWER), ANSWER))
        await here.ask()


@scenario("unfolded", "whole")
async def a_head_and_a_body_in_pieces(here: Here) -> None:
    here.plays(says(HEAD % len(ANSWER), ANSWER[:9], ANSWER[9:]))
    await here.ask()
    await here.ask()


@scenario("unfolded")
async def a_head_and_a_break(here: Here) -> None:
    async def half(received: Received) -> None:
        await received.send(HEAD % len(ANSWER))
        received.writer.close()

    here.plays(half)
    assert (await here.ask()).startswith(b"HTTP/1.1 200")


@scenario("unfolded")
async def a_head_and_more_than_its_body(here: Here) -> None:
    here.plays(says(HEAD % len(ANSWER), ANSWER + b"evil"))
    assert (await here.ask()).startswith(b"HTTP/1.1 502")


@scenario("unfolded", http=HttpSettings(port=0, idle_timeout_s=0.05))
async def a_head_and_silence(here: Here) -> None:
    async def stops(received: Received) -> None:
        await received.send(HEAD % len(ANSWER))
        await received.until_closed()

    here.plays(stops)
    assert (await here.ask()).startswith(b"HTTP/1.1 503")


@scenario("unfolded")
async def a_head_and_a_client_that_leaves(here: Here) -> None:
    ended = asyncio.Event()
    client = await here.client()

    async def leaves(received: Received) -> None:
        await received.send(HEAD % len(ANSWER))
        client.leave()
        await received.until_closed()
        ended.set()

    here.plays(leaves)
    client.send(request())
    await asyncio.wait_for(ended.wait(), BOUND_S)


@scenario("unfolded")
async def a_head_and_a_drain(here: Here) -> None:
    began, go = asyncio.Event(), asyncio.Event()

    async def waits(received: Received) -> None:
        await received.send(HEAD % len(ANSWER))
        began.set()
        await go.wait()
        await received.send(ANSWER)

    here.plays(waits)
    client = await here.client()
    client.send(request())
    await asyncio.wait_for(began.wait(), BOUND_S)
    draining = asyncio.create_task(here.proxy.drain(BOUND_S))
    await here.until(lambda: here.server.draining)
    go.set()
    assert await draining == 0
    assert b"\r\nconnection: close\r\n" in await client.rest()


@scenario("unfolded")
async def a_head_and_a_drain_that_ends_it(here: Here) -> None:
    began = asyncio.Event()

    async def stops(received: Received) -> None:
        await received.send(HEAD % len(ANSWER))
        began.set()
        await received.until_closed()

    here.plays(stops)
    client = await here.client()
    client.send(request())
    await asyncio.wait_for(began.wait(), BOUND_S)
    assert await here.proxy.drain(0.0) == 1
    assert b"shutting down" in await client.rest()


@scenario("unfolded")
async def a_head_that_is_cut(here: Here) -> None:
    answer = whole()
    here.plays(says(answer[:40], answer[40:]))
    await here.ask()


@scenario("unfolded")
async def an_answer_byte_by_byte(here: Here) -> None:
    here.plays(says(*(bytes([byte]) for byte in whole(b'{"usage":{"prompt_tokens":3}}'))))
    await here.ask()


@scenario("unfolded")
async def a_chunked_answer(here: Here) -> None:
    head = CHUNKED % b"application/json"
    here.plays(says(head + chunk(ANSWER[:9]) + chunk(ANSWER[9:]) + LAST_CHUNK))
    await here.ask()


@scenario("unfolded")
async def a_stream_with_its_usage(here: Here) -> None:
    events = [chunk(b'data: {"choices":[{"text":"%d"}]}\n\n' % at) for at in range(5)]
    here.plays(says(EVENTS, *events, chunk(USAGE_EVENT), chunk(DONE_EVENT), LAST_CHUNK))
    assert b"prompt_tokens" not in await here.ask(stream=True)


@scenario("unfolded")
async def a_stream_without_usage(here: Here) -> None:
    here.plays(says(EVENTS + chunk(b'data: {"choices":[{}]}\n\n') + chunk(DONE_EVENT) + LAST_CHUNK))
    await here.ask(stream=True)


@scenario("unfolded", "whole", engine="vllm", replicas=({}, {}))
async def a_stream_whose_client_wants_the_usage(here: Here) -> None:
    here.plays(says(EVENTS + chunk(USAGE_EVENT) + chunk(DONE_EVENT) + LAST_CHUNK))
    assert b"prompt_tokens" in await here.ask(stream=True, stream_options={"include_usage": True})
    await here.ask(stream=False, stream_options={"include_usage": True})
    assert b"prompt_tokens" in await here.ask(stream=True, stream_options={"include_usage": False})


@scenario("whole")
async def a_stream_that_is_answered_whole(here: Here) -> None:
    here.plays(says(whole(b'data: {"choices":[]}\n\n')))
    await here.ask(stream=True)


@scenario("unfolded")
async def a_large_answer(here: Here) -> None:
    text = b"x" * (1 << 20)
    here.plays(
        says(whole(b'{"text":"%b","usage":{"prompt_tokens":1,"completion_tokens":2}}' % text))
    )
    assert len(await here.ask()) > 1 << 20


@scenario("unfolded")
async def an_answer_without_a_body(here: Here) -> None:
    here.plays(says(whole(b"")))
    await here.ask()


@scenario(*["unfolded"] * 6)
async def answers_that_refuse(here: Here) -> None:
    for status in ("400 Bad Request", "404 Not Found", "422 No", "429 Too Many Requests"):
        here.plays(says(whole(b'{"error":{}}', status, "retry-after: 3")))
        await here.ask()
    for status in ("204 No Content", "304 Not Modified"):
        here.plays(says(f"HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n".encode()))
        await here.ask()


@scenario("unfolded")
async def a_replica_that_fails(here: Here) -> None:
    here.plays(says(whole(b'{"error":{}}', "500 Oh")))
    await here.ask()
    here.plays(says(whole()))
    await here.ask()  # A breaker is in trouble: the slow way.


@scenario("unfolded")
async def a_replica_that_does_not_know_the_router(here: Here) -> None:
    here.plays(says(whole(b"{}", "401 Unauthorized")))
    await here.ask()
    assert len(here.replicas["b"].requests) == 1


@scenario("unfolded")
async def both_replicas_do_not_know_the_router(here: Here) -> None:
    here.plays(says(whole(b"{}", "401 Unauthorized")))
    here.plays(says(whole(b"{}", "401 Unauthorized")), replica="b")
    assert (await here.ask()).startswith(b"HTTP/1.1 502")


@scenario("unfolded", "unfolded")
async def an_overloaded_replica_marked_and_not(here: Here) -> None:
    here.plays(says(whole(b"{}", "503 Busy", "x-mural-retry: elsewhere", "retry-after: 1")))
    assert b"x-mural-replica: b\r\n" in await here.ask()
    await here.ask(n=2)  # Its connection was given up: another one.
    here.plays(says(whole(b"{}", "503 Busy", "retry-after: 1")))
    assert (await here.ask()).startswith(b"HTTP/1.1 503")


@scenario("unfolded", engine="vllm", replicas=({}, {}))
async def an_overloaded_vllm(here: Here) -> None:
    home = next(name for name, each in here.replicas.items() if each.requests)
    here.plays(says(whole(b"{}", "503 Busy")), replica=home)
    assert (await here.ask()).startswith(b"HTTP/1.1 200")


@scenario("unfolded")
async def a_bad_gateway_in_front_of_a_replica(here: Here) -> None:
    here.plays(says(whole(b"{}", "502 Bad Gateway")))
    assert (await here.ask()).startswith(b"HTTP/1.1 200")


@scenario("unfolded", "unfolded")
async def an_interim_answer_first(here: Here) -> None:
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    here.plays(says(interim + whole()), says(interim, whole()))
    await here.ask()
    await here.ask()


@scenario("whole", *["unfolded"] * 5)
async def fields_that_are_not_passed_on(here: Here) -> None:
    ours = ("Server: x", "X-Mural-Cost: 1", "x-request-id: theirs", "keep-alive: timeout=5")
    for answer in (
        whole(ANSWER, "200 OK", *ours, "Connection: keep-alive", "x-a: b ", "X-A:"),
        whole(ANSWER, "200 OK", *(f"x-{at}: {'y' * 60}" for at in range(40))),
        whole(ANSWER).replace(b"HTTP/1.1", b"HTTP/1.0"),
        whole(ANSWER, "200 OK", "connection: close"),
        whole(ANSWER, "200 OK", "connection: keep-alive, x-hop", "x-hop: 1", "x-end: 2"),
        whole(ANSWER, "200 OK", "connection: keep-alive", "Connection: x-hop", "x-hop: 1"),
    ):
        here.plays(says(answer))
        await here.ask()
        await here.ask(n=2)  # So that there is a kept connection.


# -- replicas' connections ------------------------------------------------------------------------


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


# -- clients --------------------------------------------------------------------------------------


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
    client.writer.transport.pause_reading()
    client.send(request(stream=True))
    await here.until(lambda: any(each._unread_answers for each in here.server._connections))
    client.writer.transport.resume_reading()
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
        await here.until(lambda before=before: here.proxy.state().requests_total == before + 1)
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


# -- what serves ----------------------------------------------------------------------------------


@scenario("whole", replicas=(held("acme:v1", digest=""), {}))
async def a_digest_that_nobody_knows(here: Here) -> None:
    assert b"x-mural-digest" not in await here.ask()


@scenario("unfolded", "whole", replicas=(held("acme:v1", digest=""), {}))
async def a_digest_that_the_replica_tells(here: Here) -> None:
    here.plays(says(whole(ANSWER, "200 OK", "x-mural-digest: " + "e" * 64)))
    assert b"\r\nx-mural-digest: " + b"e" * 64 in await here.ask()
    here.replica("a", adapters=held("acme:v1"))
    here.plays(says(whole(ANSWER, "200 OK", "x-mural-digest: " + "e" * 64)))
    assert b"\r\nx-mural-digest: " + DIGEST.encode() in await here.ask()


class Digests(VersionSource):
    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        return KnownVersions({"stable": (AliasTarget("v1", 1),)}, {"v1": "f" * 64, "v2": None})


@scenario("whole", "whole", source=Digests())
async def a_digest_that_the_store_knows(here: Here) -> None:
    await here.ask()
    assert b"x-mural-digest: " + b"f" * 64 in here.replicas["a"].requests[-1].raw
    here.now += 6.0  # It has to be looked up anew, by the slow way.
    await here.ask()
    await here.until(lambda: not here.versions._flights)
    await here.ask()


@scenario(source=Digests())
async def an_alias_of_the_store(here: Here) -> None:
    for _ in range(2):
        assert b"x-mural-adapter: acme:v1\r\n" in await here.ask("acme:stable")


class Overlay(AliasOverlay):
    def targets(self, name: AdapterName) -> list[AliasTarget] | None:
        return [AliasTarget("v2", 1)] if name.version == "v1" else None


@scenario("whole", "whole")
async def an_exact_name_becomes_an_alias_and_is_none_again(here: Here) -> None:
    await here.ask()
    here.versions.overlay = Overlay()
    for _ in range(2):
        assert b"x-mural-adapter: acme:v2\r\n" in await here.ask()
    here.versions.overlay = None
    here.replica("a")
    assert b"x-mural-adapter: acme:v1\r\n" in await here.ask()


@scenario("whole", "whole")
async def two_names_of_one_version(here: Here) -> None:
    await here.ask("acme:v1")
    await here.ask("acme/default:v1")
    assert b'"model": "acme:v1"' in here.replicas["a"].requests[-1].raw


@scenario()
async def names_that_are_no_exact_version(here: Here) -> None:
    here.replica("b", adapters={"sql-expert": Residency("slot")})
    for model in ("tiny", "sql-expert", "acme", "acme:latest", "acme:", ":v1", "acme:..", "a b:c"):
        await here.ask(model)
    here.routing.options = replace(here.routing.options, shared_names=frozenset({"sql-expert"}))
    await here.ask("sql-expert")


@scenario()
async def a_base_that_is_named_like_a_version(here: Here) -> None:
    here.source.base = Base(("acme:v1",), "")
    assert b"x-mural-adapter" not in await here.ask()


@scenario("whole")
async def a_base_that_comes_to_be_named_like_a_version(here: Here) -> None:
    await here.ask()
    here.source.base = Base(("tiny", "acme:v1"), "")
    assert b"x-mural-adapter" not in await here.ask()


@scenario(*["whole"] * 3)
async def bounds_of_tokens(here: Here) -> None:
    await here.ask(max_tokens=5)
    await here.ask(max_completion_tokens=7)
    await here.ask(max_tokens=0)
    for odd in (None, -1, 10**12, 1.5, "5", True):
        await here.ask(max_tokens=odd)
    await here.ask(n=2)
    await here.ask(prompt=["a", "b"])
    await here.ask(prompt=[1, 2])


@scenario("whole", engine="vllm", replicas=({}, {}))
async def a_vllm_replica(here: Here) -> None:
    await here.ask()
    got = next(each.requests[-1].raw for each in here.replicas.values() if each.requests)
    assert b"authorization: Bearer pod-1\r\n" in got
    assert b"cache_salt" in got
    assert b"x-mural-tenant" not in got


@scenario("unfolded", engine="vllm", replicas=({}, {}))
async def a_vllm_stream(here: Here) -> None:
    home = next(name for name, each in here.replicas.items() if each.requests)
    here.plays(says(EVENTS, chunk(USAGE_EVENT), chunk(DONE_EVENT), LAST_CHUNK), replica=home)
    assert b"prompt_tokens" not in await here.ask(stream=True)
    assert b"include_usage" in here.replicas[home].requests[-1].raw


# -- who asks -------------------------------------------------------------------------------------


@scenario("whole", "whole")
async def other_tenants_adapters_and_bad_keys(here: Here) -> None:
    await here.ask("globex:v4", key=bearer(GLOBEX))
    for _ in range(2):
        assert (await here.ask("globex:v4")).startswith(b"HTTP/1.1 403")
        assert (await here.ask("acme:v1", key=bearer(GLOBEX))).startswith(b"HTTP/1.1 403")
        for key in (
            None,
            bearer("nobody00"),
            bearer(ACME) + "x",
            "authorization: Basic a",
            "authorization:",
        ):
            assert (await here.ask(key=key)).startswith(b"HTTP/1.1 401")
    await here.ask()


@scenario("whole")
async def a_key_that_is_revoked(here: Here) -> None:
    await here.ask()
    here.keys.without(ACME)
    for _ in range(2):
        assert (await here.ask()).startswith(b"HTTP/1.1 401")


@scenario("whole", "whole", "refused")
async def a_key_whose_limits_are_changed(here: Here) -> None:
    await here.ask()
    stored = here.keys.ring[ACME]
    limited = replace(stored.principal, limits=TenantLimits(requests_per_minute=1), weight=3.0)
    here.keys.ring = KeyRing([replace(stored, principal=limited)])
    await here.ask()
    assert (await here.ask()).startswith(b"HTTP/1.1 429")
    assert b"x-mural-weight: 3\r\n" in here.replicas["a"].requests[-1].raw


@scenario()
async def a_key_that_expires(here: Here) -> None:
    for _ in range(2):
        assert (await here.ask(key=bearer("acmeexpires"))).startswith(b"HTTP/1.1 200")
    here.today += timedelta(days=2)
    assert (await here.ask(key=bearer("acmeexpires"))).startswith(b"HTTP/1.1 401")


@scenario("whole", "whole")
async def an_admin_key(here: Here) -> None:
    await here.ask(key=ADMIN)
    await here.ask("globex:v4", key=ADMIN)
    assert (await here.ask(key=ADMIN + "x")).startswith(b"HTTP/1.1 401")


@scenario("whole", "whole", auth="open")
async def nobody_is_asked_who_they_are(here: Here) -> None:
    await here.ask(key=None)
    await here.ask("globex:v4")


# -- limits ---------------------------------------------------------------------------------------


@scenario(
    "whole", "whole", "refused", "refused", "refused", limits=TenantLimits(requests_per_minute=2)
)
async def a_limit_of_requests(here: Here) -> None:
    for _ in range(2):
        await here.ask()
    client = await here.client()
    for stream in (False, True, False):
        client.send(request(stream=stream))
        assert (await client.answer()).startswith(b"HTTP/1.1 429")
    assert here.limiter.snapshot().refused == {"requests": 3}
    here.now += 61
    await here.ask(n=2)


@scenario("whole", "refused", "whole", limits=TenantLimits(tokens_per_minute=100))
async def a_limit_of_tokens(here: Here) -> None:
    await here.ask(max_tokens=50)
    assert (await here.ask(max_tokens=95)).startswith(b"HTTP/1.1 429")
    await here.ask(max_tokens=80)


@scenario("refused", "whole", "whole", limits=TenantLimits(concurrency=1))
async def a_limit_of_sequences(here: Here) -> None:
    go = asyncio.Event()
    here.plays(answers_after(go))
    # A second kept connection: without one a request is not of the express way.
    two = [await here.client() for _ in range(2)]
    for client in two:
        client.send(request(key=ADMIN, n=2))
    await here.until(lambda: len(here.replicas["a"].requests) == 3)
    go.set()
    for client in two:
        await client.answer()
    go.clear()
    here.plays(answers_after(go))
    two[0].send(request())
    await here.until(lambda: len(here.replicas["a"].requests) == 4)
    assert (await here.ask()).startswith(b"HTTP/1.1 429")
    go.set()
    await two[0].answer()
    await here.ask()


@scenario("whole", "whole", "whole", "unfolded", limits=TenantLimits(tokens_per_minute=10_000))
async def usage_is_settled(here: Here) -> None:
    usages = (b'"prompt_tokens":1', b'"prompt_tokens":900,"completion_tokens":800', None)
    for usage in usages:
        body = b"{}" if usage is None else b'{"usage":{%b}}' % usage
        here.plays(says(whole(body)))
        await here.ask(max_tokens=100)
    here.plays(says(whole(b"{}", "400 Bad Request")))
    await here.ask(max_tokens=100)
    (tenant,) = here.limiter.snapshot().tenants
    assert (tenant.tokens, tenant.sequences) == (1 + 1700 + 101, 0)


class Asking(LocalLimiter):
    """As one that shares its count: it has to ask, now and then."""

    asks = 0

    def enter_now(self, principal: Principal, sequences: int, tokens: int) -> object:
        if principal.tenant is None:
            return super().enter_now(principal, sequences, tokens)
        return None

    async def enter(self, principal: Principal, sequences: int, tokens: int) -> object:
        self.asks += 1
        return super().enter_now(principal, sequences, tokens)


@scenario(limiter=lambda: Asking(lambda: 1000.0), limits=TenantLimits(requests_per_minute=2))
async def a_limiter_that_has_to_ask(here: Here) -> None:
    for _ in range(3):
        await here.ask()
    assert here.limiter.asks == 3
    assert here.limiter.snapshot().refused == {"requests": 1}


class Broken(LocalLimiter):
    def enter_now(self, principal: Principal, sequences: int, tokens: int) -> object:
        if principal.tenant is None:
            return super().enter_now(principal, sequences, tokens)
        raise RuntimeError("a fault of the limiter's")


@scenario("refused", "refused", limiter=lambda: Broken(lambda: 1000.0))
async def a_limiter_with_a_fault(here: Here) -> None:
    client = await here.client()
    for _ in range(2):
        client.send(request())
        assert (await client.answer()).startswith(b"HTTP/1.1 500")


# -- where to -------------------------------------------------------------------------------------


@scenario("whole", "whole", "whole")
async def the_adapter_goes_and_comes_elsewhere(here: Here) -> None:
    await here.ask()
    here.replica("a", adapters={})
    await here.ask()  # At home still, and to be loaded there.
    here.replica("a", adapters=held("acme:v1", level="disk"))
    await here.ask()
    here.replica("a", adapters=held("acme:v1", digest="e" * 64))
    assert b"x-mural-digest: " + b"e" * 64 in await here.ask()
    here.replica("b", adapters=held("acme:v1"))
    here.replica("a", slots=0)
    await here.ask()  # On a new connection.
    assert b"x-mural-replica: b\r\n" in await here.ask()


@scenario("whole", "whole")
async def the_replica_drains(here: Here) -> None:
    await here.ask()
    here.replica("a", ready=False)
    await here.ask()
    here.replica("a", ready=True)
    await here.ask()


@scenario("whole")
async def the_replica_is_gone(here: Here) -> None:
    await here.ask()
    here.source.set(*(each for each in here.source.fleet.replicas if each.name != "a"))
    assert b"x-mural-replica: b\r\n" in await here.ask()


@scenario("whole", "whole")
async def the_replica_leaves_while_it_answers(here: Here) -> None:
    await here.ask()

    async def leaves(received: Received) -> None:
        here.source.set(*(each for each in here.source.fleet.replicas if each.name != "a"))
        await received.send(whole())

    here.plays(leaves)
    await here.ask()
    assert "a" not in here.metrics.replicas


@scenario("whole")
async def the_replica_is_gone_before_a_fleet_says_so(here: Here) -> None:
    await here.ask()
    endpoint = here.source.endpoints.pop("a")
    assert (await here.ask()).startswith(b"HTTP/1.1 503")
    here.source.endpoints["a"] = endpoint


@scenario("whole")
async def the_replica_moves_before_a_fleet_says_so(here: Here) -> None:
    await here.ask()
    here.source.endpoints["a"] = here.source.endpoints["b"]
    assert b"x-mural-replica: b\r\n" in await here.ask()


@scenario("whole", "whole")
async def an_adapter_is_declared_to_have_two_homes(here: Here) -> None:
    await here.ask()
    here.replica("b", adapters=held("acme:v1"))
    await here.ask()
    here.declared["acme/default:v1"] = 2
    await here.ask()
    await here.ask(prompt="another")


@scenario("whole")
async def the_policy_is_changed(here: Here) -> None:
    await here.ask()
    here.dispatch.policy = PlacementPolicy(overcommit=1.0, light=0.0)
    here.replica("a", running=4)
    await here.ask()


@scenario("whole", "whole")
async def the_routers_token_is_another(here: Here) -> None:
    await here.ask()
    here.routing.options = replace(here.routing.options, router_token="token-2")
    await here.ask()
    assert b"authorization: Bearer token-2\r\n" in here.replicas["a"].requests[-1].raw


@scenario("whole", "unfolded")
async def a_replica_in_trouble(here: Here) -> None:
    await here.ask()
    here.plays(*[says(whole(b"{}", "500 Oh"))] * 2)
    await here.ask()
    await here.ask()
    assert here.breakers.states(here.now)["a"] == "open"
    await here.ask()
    here.now += 60
    await here.ask()
    assert not here.breakers.troubled


@scenario("whole", "whole")
async def the_loads_end_trouble(here: Here) -> None:
    """One that was sent before another failed ends the trouble, by whichever way it went."""
    go = asyncio.Event()

    async def waits(received: Received) -> None:
        await go.wait()
        await received.send(whole())

    await here.ask()
    here.plays(waits)
    client = await here.client()
    client.send(request())
    await here.until(lambda: len(here.replicas["a"].requests) == 3)
    here.plays(says(whole(b"{}", "500 Oh")))
    await here.ask(n=2)
    assert here.breakers.troubled
    go.set()
    await client.answer()
    assert not here.breakers.troubled


@scenario("whole", "whole", queue_wait_s=BOUND_S)
async def nobody_is_overtaken(here: Here) -> None:
    """While one waits for a place nobody else is given one, whatever he asks for."""
    go = asyncio.Event()

    async def waits(received: Received) -> None:
        await go.wait()
        await received.send(whole())

    await here.ask()
    here.replica("b", ready=False)
    here.plays(waits)
    first = await here.client()
    first.send(request(n=6, key=ADMIN))
    await here.until(lambda: len(here.replicas["a"].requests) == 3)
    waiting, after = await here.client(), await here.client()
    waiting.send(request("globex:v4", key=bearer(GLOBEX), prompt="waits", n=5))
    await here.until(lambda: here.queue.waiting == 1)
    here.replica("b", ready=True, max_num_seqs=1)
    after.send(request())
    await here.until(lambda: here.proxy.state().requests_total == 4)
    go.set()
    for client in (first, waiting, after):
        await client.answer()
    await here.ask()


@scenario("whole", "unfolded")
async def an_attempt_is_counted_while_it_is_on_its_way(here: Here) -> None:
    for answer in ([whole()], [HEAD % len(ANSWER), ANSWER[:9], ANSWER[9:]]):
        go, before = asyncio.Event(), len(here.replicas["a"].requests)
        here.plays(answers_after(go, *answer))
        client = await here.client()
        client.send(request())
        await here.until(lambda before=before: len(here.replicas["a"].requests) == before + 1)
        here.seen.append("\n".join(counts(here.metrics.exposition().decode())).encode())
        assert here.dispatch.ledger.in_flight("a") == 1
        assert here.limiter.snapshot().tenants == ()
        go.set()
        await client.answer()


@pytest.mark.parametrize(
    ("play", "used", "setting"), SCENARIOS, ids=[play.__name__ for play, _, _ in SCENARIOS]
)
async def test_all_is_seen_alike(
    play: Play, used: list[str], setting: Setting, authorities: str
) -> None:
    (fast, ways), (slow, none) = await asyncio.gather(
        play_once(play, setting, authorities, express=True),
        play_once(play, setting, authorities, express=False),
    )
    assert none == []
    assert fast == slow
    assert ways == used


@pytest.fixture
async def here(authorities: str) -> AsyncIterator[Here]:
    here = Here(Setting(limits=TenantLimits(requests_per_minute=5)), authorities, express=True)
    await here.begin()
    yield here
    await here.close()


async def test_nothing_of_a_request_stays_until_the_collector_comes(here: Here) -> None:
    kinds = (_Express, Attempt, InferenceRelay)

    def left() -> list[object]:
        return [each for each in gc.get_objects() if isinstance(each, kinds)]

    gc.collect()
    gc.disable()
    try:
        client = await here.client()
        in_pieces = says(HEAD % len(ANSWER), ANSWER[:9], ANSWER[9:])
        for script in (says(whole()), in_pieces, lose):
            here.plays(script)
            client.send(request())
            await client.answer()
        gone = await here.client()
        here.plays(silence)
        gone.send(request())
        await here.until(lambda: here.proxy.state().requests == 1)
        gone.leave()
        await here.at_rest()
        await here.ask(n=2)
        client.send(request())
        await client.answer()
        assert here.used == ["whole", "unfolded", "unfolded", "unfolded", "refused"]
        await here.until(lambda: not left())
    finally:
        gc.enable()


async def test_who_takes_no_answers_is_asked_for_no_more_requests(here: Here) -> None:
    here.replicas["a"].usual = says(whole(b'{"text":"%b"}' % (b"x" * 50_000)))
    client = await here.client()
    client.writer.transport.pause_reading()
    sent = 0
    while not any(each._unread_answers for each in here.server._connections):
        client.send(request(key=ADMIN))
        sent += 1
        await here.until(lambda all=1 + sent: here.proxy.state().requests_total == all)
        await here.at_rest()
    client.send(request(key=ADMIN, prompt="later"))
    await here.ask(key=ADMIN)
    assert here.proxy.state().requests_total == 2 + sent
    client.writer.transport.resume_reading()
    for _ in range(sent + 1):
        await client.answer()
    assert here.used.count("whole") > 1


async def test_what_is_in_flight_is_counted_and_bounded(here: Here) -> None:
    go = asyncio.Event()
    here.plays(answers_after(go))
    client = await here.client()
    client.send(request())
    await here.until(lambda: here.proxy.state().requests == 1)
    assert here.proxy.state().buffered_bytes == len(request())
    go.set()
    await client.answer()
    assert here.proxy.state().buffered_bytes == 0
    # Where no more may be held, the slow way says so.
    here.server.buffered_bytes = here.http.max_buffered_bytes
    client.send(request())
    assert (await client.answer()).startswith(b"HTTP/1.1 503")
    assert here.used == ["whole"]
    here.server.buffered_bytes = 0


async def test_a_body_is_kept_once_when_its_answer_comes_in_pieces(here: Here) -> None:
    go = asyncio.Event()

    async def stream(received: Received) -> None:
        await received.send(EVENTS + chunk(b"data: 1\n\n"))
        await go.wait()
        await received.send(LAST_CHUNK)

    here.plays(stream)
    client = await here.client()
    client.send(request(stream=True))
    await client.reader.readuntil(b"data: 1\n\n")
    (exchange,) = (each._exchange for each in here.server._connections if each._exchange)
    assert isinstance(exchange, _Express)
    assert (exchange._data, exchange.body) == (b"", request(stream=True).partition(b"\r\n\r\n")[2])
    go.set()
    await client.reader.readuntil(LAST_CHUNK)


def test_a_router_without_the_native_reader_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(express, "plain_request", None)
    routing = SimpleNamespace(express=object())
    assert express.open_express_lane(HttpSettings(), routing, None) is None  # type: ignore[arg-type] # not asked
    assert "the native reader was not built" in caplog.text
