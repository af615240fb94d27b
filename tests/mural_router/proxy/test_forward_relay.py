"""Requests about a tenant's own adapters: nothing of a body is kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.settings import HttpSettings
from tests.mural_router.proxy.scripted_replica import lose

if TYPE_CHECKING:
    from tests.mural_router.proxy.conftest import MakeStand
    from tests.mural_router.proxy.scripted_replica import Received

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


async def take(received: Received) -> None:
    """Read a body that was announced, and answer."""
    left = int(received.fields["content-length"])
    while left:
        left -= len(await received.reader.read(min(left, 65536)))
    await received.send(OK)


async def test_an_upload_larger_than_any_buffer_is_passed_on(stand: MakeStand) -> None:
    sent = 30_000_000

    async def count(received: Received) -> None:
        assert len(received.body) == sent
        await received.send(OK)

    here = await stand(count, settings=HttpSettings(port=0, max_body_bytes=10))
    client = await here.client()
    client.send(
        b"POST /v1/adapters/acme:v1?a=b HTTP/1.1\r\nhost: a\r\nauthorization: Bearer k\r\n"
        b"content-type: multipart/form-data; boundary=x\r\nx-mural-tenant: globex\r\n"
        b"content-length: %d\r\n\r\n" % sent
    )
    for _ in range(sent // 100_000):
        client.send(b"x" * 100_000)
        await client.writer.drain()
    assert (await client.answer())[0] == 200
    received = here.replicas[0].requests[0]
    assert received.head.startswith(b"POST /v1/adapters/acme:v1?a=b HTTP/1.1\r\n")
    assert received.fields["content-type"] == "multipart/form-data; boundary=x"
    assert received.fields["x-mural-tenant"] == "acme"
    assert received.fields["authorization"] == "Bearer router"
    assert here.routing.asks[0].body == b""
    assert here.proxy.state().buffered_bytes == 0


async def test_a_chunked_upload_is_framed_anew(stand: MakeStand) -> None:
    async def read_chunked(received: Received) -> None:
        await received.reader.readuntil(b"\r\n0\r\n\r\n")
        await received.send(OK)

    here = await stand(read_chunked)
    client = await here.client()
    client.send(
        b"PUT /v1/adapters/a/b/aliases/c HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    await client.until(b"100 Continue\r\n\r\n")
    client.send(chunk(b"abc")[:4])
    client.send(chunk(b"abc")[4:] + LAST_CHUNK)
    assert (await client.answer())[0] == 200
    assert here.replicas[0].requests[0].fields["transfer-encoding"] == "chunked"


async def test_a_slow_replica_holds_the_client_back(stand: MakeStand) -> None:
    go_on = asyncio.Event()

    async def wait(received: Received) -> None:
        await go_on.wait()
        await take(received)

    here = await stand(wait)
    here.replicas[0].leave_bodies = True
    client = await here.client()
    total = 40_000_000
    client.send(
        b"POST /v1/adapters/acme:v1 HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % total
    )
    sent = 0
    stalled = False
    while sent < total:
        client.send(b"x" * 100_000)
        sent += 100_000
        try:
            async with asyncio.timeout(0.5):
                await client.writer.drain()
        except TimeoutError:
            stalled = True
            go_on.set()
            await client.writer.drain()
    assert stalled
    assert (await client.answer())[0] == 200


async def test_a_refusal_before_the_end_of_the_body_reaches_the_client(stand: MakeStand) -> None:
    async def refuse(received: Received) -> None:
        await received.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}")

    here = await stand(refuse)
    here.replicas[0].leave_bodies = True
    client = await here.client()
    client.send(b"POST /v1/adapters/a:b HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\nab")
    assert (await client.answer())[0] == 413
    assert await client.rest() == b""


async def test_an_upload_that_the_client_breaks_off_never_looks_complete(stand: MakeStand) -> None:
    broke = asyncio.Event()

    async def read(received: Received) -> None:
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await received.reader.readuntil(LAST_CHUNK)
        broke.set()

    here = await stand(read)
    for end in (b"", b"zz\r\nno chunk"):
        broke.clear()
        client = await here.client()
        client.send(
            b"POST /v1/adapters/a:b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
            + chunk(b"abc")
        )
        await here.routing.asked()
        client.send(end)
        if end:
            assert (await client.answer())[0] == 400
        else:
            client.close()
        async with asyncio.timeout(20):
            await broke.wait()
        outcome = await here.routing.outcome()
        assert outcome.error


async def test_a_body_that_goes_wrong_amid_its_answer_ends_the_connection(
    stand: MakeStand,
) -> None:
    async def answer_early(received: Received) -> None:
        await received.send(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n12345")
        await received.until_closed()

    here = await stand(answer_early)
    client = await here.client()
    client.send(
        b"POST /v1/adapters/a:b HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n"
        + chunk(b"abc")
    )
    await client.until(b"12345")
    client.send(b"no chunk\r\n")
    assert await client.rest() == b""
    assert (await here.routing.outcome()).error


async def test_a_read_is_asked_again_and_a_write_is_not(stand: MakeStand) -> None:
    async def answer(received: Received) -> None:
        await received.send(OK)

    here = await stand(lose, answer)
    client = await here.client()
    client.send(b"GET /v1/adapters HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await client.answer())[1]["x-mural-replica"] == "r1"
    client.send(b"DELETE /v1/adapters/a:b HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await client.answer())[0] == 502
    assert len(here.routing.retries) == 1


async def test_a_large_download_is_passed_on(stand: MakeStand) -> None:
    size = 20_000_000

    async def give(received: Received) -> None:
        await received.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        await received.send(b"x" * size)

    here = await stand(give)
    client = await here.client()
    client.send(b"GET /v1/adapters/a:b/files/w.bin HTTP/1.1\r\nhost: a\r\n\r\n")
    assert (await client.answer())[2] == b"x" * size
