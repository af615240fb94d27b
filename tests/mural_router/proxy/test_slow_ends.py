"""The end of an answer that its client takes slowly: it gets all of it, whatever ends meanwhile."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.client import ClientConnection
from tests.mural_router.proxy.express_stage import Here, Setting, request, whole
from tests.mural_router.proxy.scripted_answers import EVENTS
from tests.mural_router.proxy.scripted_replica import BOUND_S, Received, lose, says

SMALL = 16_384
BODY = b'{"text":"' + b"x" * 2_000_000 + b'"}'
PIECES = [EVENTS, *[chunk(b"data: " + b"x" * 100_000 + b"\n\n")] * 20]
STREAM = request(stream=True)
CLOSES = request("acme:v1", "connection: close")


@pytest.fixture(params=[False, True], ids=["plain", "tls"])
async def here(request: pytest.FixtureRequest, authorities: str) -> AsyncIterator[Here]:
    made = Here(Setting(tls=request.param), authorities, express=not request.param)
    await made.begin()
    made.send_clients_away()
    await made.until(lambda: made.proxy.state().connections == 0)
    yield made
    await made.close()


async def breaks(received: Received) -> None:
    await received.send(*PIECES)
    await lose(received)


class Slow:
    """A client that takes a little at a time, by small buffers of the kernel's."""

    def __init__(self, here: Here) -> None:
        self.here = here
        self.got = b""

    async def asks(self, data: bytes) -> ClientConnection:
        """Until all of the answer is with the router, and a part of it waits there."""
        here, end = self.here, socket.socket()
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
        end.connect(("127.0.0.1", here.proxy.port))
        self.reader, self.writer = await asyncio.open_connection(
            sock=end,
            limit=SMALL,
            ssl=here.client_context,
            server_hostname=None if here.client_context is None else "127.0.0.1",
        )
        await here.until(lambda: here.server._connections)
        (connection,) = here.server._connections
        near = connection.transport.get_extra_info("socket")
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)
        self.writer.write(data)
        await here.until(lambda: connection._unread_answers)
        async with asyncio.timeout(BOUND_S):
            while here.proxy.state().requests:
                if connection._unread_answers:
                    await self.takes_some()
                await asyncio.sleep(0)
        assert connection.transport.get_write_buffer_size() > 0
        return connection

    async def takes_some(self) -> None:
        self.got += await self.reader.read(SMALL)

    async def rest(self) -> bytes:
        async with asyncio.timeout(BOUND_S):
            self.got += await self.reader.read()
        self.writer.close()
        return self.got


ENDS = {"whole": b"xx" + b'"}', "stream": b"\n\n\r\n" + LAST_CHUNK, "lost": LAST_CHUNK}


async def asked(here: Here, kind: str) -> tuple[Slow, ClientConnection]:
    plays = {"stream": says(*PIECES, LAST_CHUNK), "whole": says(whole(BODY)), "lost": breaks}
    here.plays(plays[kind])
    slow = Slow(here)
    return slow, await slow.asks(CLOSES if kind == "whole" else STREAM)


@pytest.mark.parametrize("kind", ["whole", "lost"])
async def test_a_client_that_takes_the_last_of_its_answers_is_not_cut_off(
    here: Here, kind: str
) -> None:
    slow, connection = await asked(here, kind)
    while waits := connection.transport.get_write_buffer_size():
        async with asyncio.timeout(BOUND_S):
            while connection.transport.get_write_buffer_size() == waits:
                await slow.takes_some()
        connection.expired()
    got = await slow.rest()
    assert got.endswith(ENDS[kind])
    assert len(got) > 2_000_000
    assert (b'"error"' in got) is (kind == "lost")


@pytest.mark.parametrize("kind", ["whole", "stream"])
async def test_a_client_that_takes_nothing_of_it_is_let_go(here: Here, kind: str) -> None:
    slow, connection = await asked(here, kind)
    connection.deadline = connection._watch.now - 1
    connection.expired()
    connection.expired()
    await here.until(lambda: here.proxy.state().connections == 0)
    slow.writer.transport.abort()


@pytest.mark.parametrize("here", [False], ids=["plain"], indirect=True)
async def test_one_that_has_taken_all_and_does_not_close_has_a_moment(here: Here) -> None:
    slow, connection = await asked(here, "whole")
    while_taking = connection.deadline
    async with asyncio.timeout(BOUND_S):
        while connection._unread_answers:
            await slow.takes_some()
    assert connection.deadline < while_taking
    connection.expired()
    await here.until(lambda: here.proxy.state().connections == 0)
    assert (await slow.rest()).endswith(ENDS["whole"])


@pytest.mark.parametrize("kind", ["whole", "stream"])
async def test_a_drain_lets_clients_take_their_answers(here: Here, kind: str) -> None:
    slow, _ = await asked(here, kind)
    draining = asyncio.create_task(here.proxy.drain(BOUND_S))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not draining.done()
    rest = asyncio.create_task(slow.rest())
    assert await draining == 0
    await here.proxy.close()
    assert (await rest).endswith(ENDS[kind])


async def test_a_drain_waits_for_them_no_longer_than_it_may(here: Here) -> None:
    slow, _ = await asked(here, "stream")
    assert await here.proxy.drain(0.01) == 1
    await here.proxy.close()
    await here.until(lambda: here.proxy.state().connections == 0)
    assert here.server.taking == 0
    slow.writer.transport.abort()
