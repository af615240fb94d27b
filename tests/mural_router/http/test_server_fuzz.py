"""The port under any bytes in any pieces: nothing is raised, nothing is taken that was not sent."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import cast

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mural_router.http.exchange import Exchange, Plan
from mural_router.http.head import RequestHead
from mural_router.http.server import Server
from mural_router.http.settings import HttpSettings
from mural_router.http.watch import Watch

PIECES = st.lists(
    st.sampled_from(
        [
            b"POST / HTTP/1.1\r\nhost: a\r\n",
            b"GET / HTTP/1.1\r\nhost: a\r\n",
            b"content-length: 3\r\n",
            b"transfer-encoding: chunked\r\n",
            b"connection: close\r\n",
            b"expect: 100-continue\r\n",
            b"\r\n",
            b"\r\n\r\n",
            b"abc",
            b"3\r\nabc\r\n",
            b"0\r\n\r\n",
            b"\n",
            b"\0",
            b" ",
        ]
    )
    | st.binary(max_size=5),
    max_size=14,
)


class Recorder(asyncio.Transport):
    """A transport that keeps what is written; closing is told at once."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.ended = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.ended
        self.written += bytes(data)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Keeper:
    """Answers each request at once; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []

    def plan(self, head: RequestHead) -> Plan:
        return Plan(100, self.handle)

    def handle(self, exchange: Exchange) -> None:
        self.asked.append((exchange.head.method, exchange.body))
        exchange.answer(200, b"")


def played(pieces: list[bytes]) -> tuple[list[tuple[str, bytes]], bytes, bool]:
    """What was asked, what was answered, and whether the connection ended."""

    async def play() -> tuple[list[tuple[str, bytes]], bytes, bool]:
        watch = Watch(asyncio.get_running_loop())
        keeper = Keeper()
        server = Server(HttpSettings(), keeper, watch)
        connection = cast("asyncio.Protocol", server.connection())
        transport = Recorder()
        connection.connection_made(transport)
        for piece in pieces:
            connection.data_received(piece)
        connection.connection_lost(None)
        watch.close()
        assert server.in_flight == 0
        assert server.buffered_bytes == 0
        assert server.connections == 0
        return keeper.asked, transport.written.replace(CONTINUE, b""), transport.ended

    return asyncio.run(play())


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@settings(max_examples=300, deadline=None)
@given(PIECES, st.lists(st.integers(0, 1000), max_size=6))
@example([b"POST / HTTP/1.1\r\nhost: a\r\n", b"\n", b"x: a\r\n", b"\r\n"], [27])
def test_the_pieces_in_which_bytes_come_make_no_difference(
    pieces: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(pieces)
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    torn = [data[a:b] for a, b in pairwise(places)]
    at_once = played([data] if data else [])
    assert played(torn)[0] == at_once[0]
    # An error may be seen earlier, before what made it hopeless is followed by worse.
    assert played(torn)[1][:12] == at_once[1][:12]
    assert played([bytes([byte]) for byte in data])[0] == at_once[0]


@settings(max_examples=300, deadline=None)
@given(PIECES)
def test_after_a_refusal_nothing_more_is_read(pieces: list[bytes]) -> None:
    asked, answered, ended = played(pieces)
    refusals = answered.count(b"HTTP/1.1 4") + answered.count(b"HTTP/1.1 5")
    assert refusals <= 1
    assert answered.count(b"HTTP/1.1 200") == len(asked)
    if refusals:
        assert ended
        assert answered.rfind(b"HTTP/1.1 200") < answered.find(b"HTTP/1.1 4") or not asked
