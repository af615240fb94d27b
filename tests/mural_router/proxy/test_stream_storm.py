"""Thousands of short lives at once: no byte of one tenant's stream ever reaches another client.

A socket's number is given to the next connection as soon as it is closed, and streams are sent past
the loop's transports: every stream says whose it is, and everybody looks at every byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
from typing import Any

import pytest

from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.scan import plain_events
from mural_router.http.settings import HttpSettings
from mural_router.routing.breaker import BreakerSettings
from tests.mural_router.proxy.express_stage import Here, Setting, request, whole
from tests.mural_router.proxy.scripted_answers import EVENTS, USAGE_EVENT
from tests.mural_router.proxy.scripted_replica import BOUND_S, Received

DONE = b"data: [DONE]\n\n"
ENDLESS = 100_000
MUCH = 200_000
HOW = ("whole", "error", "sent away", "fin", "rst", "at once", "half", "stalls")
_SIZE = re.compile(rb"([0-9a-f]+)\r\n")


def event(whose: str, number: int, size: int) -> bytes:
    text = whose * (size // len(whose) + 1)
    return b'data: {"id":"%b","text":"%d %b"}\n\n' % (whose.encode(), number, text.encode())


async def tells_whose(received: Received) -> None:
    """Streams events of whose request it is, in pieces of any kind; the end may be any."""
    whose, events, size, end = json.loads(received.body)["prompt"].split(":")
    draw = random.Random(whose)
    if b'"stream": true' not in received.body:
        await received.send(whole(b'{"id":"%b"}' % whose.encode()))
        return
    await received.send(EVENTS)
    number = 0
    while number < int(events):
        together = range(number, min(number + draw.choice((1, 1, 3)), int(events)))
        number = together.stop
        data = b"".join([chunk(event(whose, each, int(size))) for each in together])
        cut = draw.randrange(len(data)) if draw.random() < 0.2 else 0
        for piece in (data[:cut], data[cut:]):
            if received.writer.is_closing():
                raise ConnectionResetError
            received.writer.write(piece)
            await received.writer.drain()
            await asyncio.sleep(0)
    if end == "dies":
        received.writer.transport.abort()
        return
    if not received.writer.is_closing():
        received.writer.write(chunk(USAGE_EVENT) + chunk(DONE) + LAST_CHUNK)


class Life:
    """A client's: asks for streams that say whose they are, and leaves in one of many ways."""

    def __init__(self, here: Here, draw: random.Random) -> None:
        self.here, self.draw = here, draw
        self.whose = f"{draw.getrandbits(48):012x}"
        self.ends = draw.choice(("ends", "ends", "dies"))
        self.events = draw.choice((3, 20, ENDLESS))
        self.size = draw.choice((20, 1_000, 8_000))
        self.got = b""

    async def live(self) -> str:
        """Give how it went."""
        end = socket.socket()
        if self.draw.random() < 0.3:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
        end.setblocking(False)
        try:
            await self.here.server.loop.sock_connect(end, ("127.0.0.1", self.here.proxy.port))
            self.reader, self.writer = await asyncio.open_connection(sock=end, limit=65_536)
        except ConnectionError:
            end.close()
            return "refused"
        try:
            return await self._asks(end)
        except ConnectionError:
            return "reset"
        finally:
            self.writer.transport.abort()
            self._look()

    async def _asks(self, end: socket.socket) -> str:
        how = self.draw.choice(("all", "all", "fin", "rst", "at once", "half", "stalls"))
        if how == "all" and self.events == ENDLESS:
            self.events = 30
        prompt = f"{self.whose}:{self.events}:{self.size}:{self.ends}"
        self.writer.write(request(prompt=prompt, stream=True))
        if how == "all":
            while not self.got.endswith(LAST_CHUNK) and await self._reads(65_536):
                pass
            if not self.got.endswith(LAST_CHUNK):
                return "sent away"
            assert (DONE in self.got) is (self.ends == "ends")
            return "error" if b'{"error":' in self.got else "whole"
        if how == "stalls":
            reading: Any = self.writer.transport
            reading.pause_reading()
            # The router's bound of it, and more.
            await asyncio.sleep(0.8)
            reading.resume_reading()
            while len(self.got) < MUCH and await self._reads(65_536):
                if self.got.endswith(LAST_CHUNK):
                    break
            return how
        if how != "at once":
            for _ in range(self.draw.randrange(1, 5)):
                if self.got.endswith(LAST_CHUNK) or not await self._reads(5_000):
                    break
        if how == "half":
            with contextlib.suppress(OSError):  # asyncio's own loop says so of one sent away
                self.writer.write_eof()
            while len(self.got) < MUCH and await self._reads(65_536):
                pass
        elif how != "fin":
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return how

    async def _reads(self, most: int) -> bool:
        async with asyncio.timeout(BOUND_S):
            data = await self.reader.read(most)
        self.got += data
        return bool(data)

    def _look(self) -> None:
        """All that came is the beginning of its own stream, whole events but for a cut."""
        if not self.got:
            return
        head, _, body = self.got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        text, ended = _payload(body)
        at = 0
        for number in range(self.events):
            if at == len(text):
                return
            expected = event(self.whose, number, self.size)
            found = text[at : at + len(expected)]
            if found != expected[: len(found)]:
                break
            at += len(found)
        rest = text[at:]
        if rest.startswith(b'data: {"error":'):
            assert ended
        else:
            assert DONE.startswith(rest), rest[:200]


def _payload(body: bytes) -> tuple[bytes, bool]:
    """What chunks hold, the last as far as it came, and whether the body's end did."""
    text, at = b"", 0
    while (size := _SIZE.match(body, at)) is not None:
        length = int(size[1], 16)
        if not length:
            assert body[at:] == LAST_CHUNK[: len(body) - at]
            return text, True
        text += body[size.end() : size.end() + length]
        at = size.end() + length + 2
        assert body[at - 2 : at] == b"\r\n"[: max(0, len(body) - at + 2)]
    assert len(body) - at < 8, body[at : at + 80]
    return text, False


async def storm(here: Here, seconds: float, at_once: int) -> dict[str, int]:
    draw, counts = random.Random(5), dict[str, int]()
    until = here.server.loop.time() + seconds

    async def lives() -> None:
        while here.server.loop.time() < until:
            how = await Life(here, draw).live()
            counts[how] = counts.get(how, 0) + 1

    async def sends_away() -> None:
        """The router has enough of some, too."""
        while here.server.loop.time() < until:
            await asyncio.sleep(0.01)
            if connections := list(here.server._connections):
                draw.choice(connections).abort()

    async with asyncio.TaskGroup() as tasks:
        for _ in range(at_once):
            tasks.create_task(lives())
        tasks.create_task(sends_away())
    return counts


@pytest.mark.parametrize("seconds", [0.5, pytest.param(8.0, marks=pytest.mark.slow)])
@pytest.mark.skipif(plain_events is None, reason="nothing native is built")
async def test_no_stream_reaches_anybody_else(authorities: str, seconds: float) -> None:
    http = HttpSettings(port=0, stall_timeout_s=0.3)
    here = Here(Setting(http=http), authorities, express=True)
    await here.begin()
    try:
        here.breakers.settings = BreakerSettings(failures=1_000_000)
        for name, replica in here.replicas.items():
            here.replica(name, max_num_seqs=1_000)
            replica.usual = tells_whose
        counts = await storm(here, seconds, at_once=30)
        assert min(counts.get(how, 0) for how in HOW) > 0, counts
        observed = await here.end()
        assert isinstance(log := observed["log"], list)
        assert len(log) == here.proxy.state().requests_total
    finally:
        await here.close()
