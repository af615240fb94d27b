"""Answers of every form, seen alike with and without the express way."""

from __future__ import annotations

import asyncio

import pytest

from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.scan import plain_request
from mural_router.http.settings import HttpSettings
from tests.mural_router.proxy.express_scenarios import Scenario, Scenarios
from tests.mural_router.proxy.express_stage import DIGEST, Here, request, whole
from tests.mural_router.proxy.scripted_answers import (
    ANSWER,
    CHUNKED,
    DONE_EVENT,
    EVENTS,
    HEAD,
    USAGE_EVENT,
)
from tests.mural_router.proxy.scripted_replica import BOUND_S, Received, says

pytestmark = pytest.mark.skipif(plain_request is None, reason="nothing native is built")

scenario = Scenarios()


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


@scenario.each
async def test_all_is_seen_alike(played: Scenario, authorities: str) -> None:
    await played.is_seen_alike(authorities)
