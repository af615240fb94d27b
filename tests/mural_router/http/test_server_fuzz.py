"""The port under any bytes in any pieces: nothing is raised, nothing is taken that was not sent."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from time import monotonic
from typing import TYPE_CHECKING, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mural_router.http.exchange import Exchange, Plan, WholeExchange
from mural_router.http.head import RequestHead, parse_request_head
from mural_router.http.scan import plain_request
from mural_router.http.server import Server
from mural_router.http.settings import HttpSettings
from mural_router.http.watch import Watch

if TYPE_CHECKING:
    from mural_router.http.client import ClientConnection

PLAIN_BODY = b'{"model":"a"}'
PLAIN_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 13\r\n\r\n"
HEAD = parse_request_head(PLAIN_HEAD, 10)
LIMIT_BYTES = 100

PIECES = st.lists(
    st.sampled_from(
        [
            b"POST / HTTP/1.1\r\nhost: a\r\n",
            b"GET / HTTP/1.1\r\nhost: a\r\n",
            b"content-length: 3\r\n",
            b"transfer-encoding: chunked\r\n",
            PLAIN_HEAD + PLAIN_BODY,
            PLAIN_HEAD,
            PLAIN_BODY,
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

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def close(self) -> None:
        self.ended = True

    def abort(self) -> None:
        self.ended = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Keeper:
    """Answers each request, at once or when it is told to; keeps what it was asked."""

    def __init__(self, *, late: bool) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.taken = 0
        """Of those, the ones that nobody had read before."""
        self._late = late
        self._waiting: list[Exchange] = []

    def plan(self, head: RequestHead) -> Plan:
        return Plan(LIMIT_BYTES, self.handle)

    def handle(self, exchange: Exchange) -> None:
        self.asked.append((exchange.head.method, exchange.body))
        self._waiting.append(exchange)
        if not self._late:
            self.answer()

    def answer(self) -> None:
        """Whatever is waiting, and what comes of that."""
        while self._waiting:
            self._waiting.pop(0).answer(200, b"")

    def express(self, connection: ClientConnection, data: bytes) -> WholeExchange | None:
        """Take what is plain, as the proxy does, but for its flow."""
        assert plain_request is not None
        plain = plain_request(data, HttpSettings().max_head_bytes, HttpSettings().max_head_fields)
        if plain is None or len(data) - plain[4] > LIMIT_BYTES:
            return None
        return Taken(connection, self, data[plain[4] :])


class Taken(WholeExchange):
    """A request that its connection has not read."""

    __slots__ = ("_keeper",)

    def __init__(self, connection: ClientConnection, keeper: Keeper, body: bytes) -> None:
        super().__init__(connection, HEAD, monotonic())
        self._keeper, self.body = keeper, body

    def begin(self) -> None:
        self._keeper.taken += 1
        self._keeper.handle(self)


class Played(NamedTuple):
    asked: list[tuple[str, bytes]]
    answered: bytes
    ended: bool
    taken: int


def played(pieces: list[bytes], *, express: bool = False, late: bool = False) -> Played:
    """What was asked, what was answered, and whether the connection ended."""

    async def play() -> Played:
        watch = Watch(asyncio.get_running_loop())
        keeper = Keeper(late=late)
        server = Server(HttpSettings(), keeper, watch, keeper.express if express else None)
        connection = server.connection()
        transport = Recorder()
        connection.connection_made(transport)
        for piece in pieces:
            connection.data_received(piece)
            keeper.answer()
        connection.connection_lost(None)
        watch.close()
        assert server.in_flight == 0
        assert server.buffered_bytes == 0
        assert server.connections == 0
        answered = transport.written.replace(CONTINUE, b"")
        return Played(keeper.asked, answered, transport.ended, keeper.taken)

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
    asked, answered, ended, _ = played(pieces)
    refusals = answered.count(b"HTTP/1.1 4") + answered.count(b"HTTP/1.1 5")
    assert refusals <= 1
    assert answered.count(b"HTTP/1.1 200") == len(asked)
    if refusals:
        assert ended
        assert answered.rfind(b"HTTP/1.1 200") < answered.find(b"HTTP/1.1 4") or not asked


needs_express = pytest.mark.skipif(plain_request is None, reason="nothing native is built")


@needs_express
@settings(max_examples=150, deadline=None)
@given(PIECES, st.booleans())
@example([PLAIN_HEAD, PLAIN_BODY], False)
@example([b"POST / HTTP/1.1\r\nhost: a\r\n", PLAIN_HEAD + PLAIN_BODY], False)
@example([PLAIN_HEAD + PLAIN_BODY, b"\0", PLAIN_HEAD + PLAIN_BODY], False)
@example([PLAIN_HEAD + PLAIN_BODY[:5], PLAIN_BODY[5:], PLAIN_HEAD + PLAIN_BODY], True)
@example([PLAIN_HEAD, PLAIN_BODY + PLAIN_HEAD, PLAIN_BODY], True)
def test_what_is_taken_unread_makes_no_difference(pieces: list[bytes], late: bool) -> None:
    """Each piece comes by itself, so that whatever is plain among them is taken."""
    pieces = [piece for piece in pieces if piece]
    with_it, without = played(pieces, express=True, late=late), played(pieces, late=late)
    assert with_it[:3] == without[:3]
    assert without.taken == 0


@needs_express
@pytest.mark.parametrize("late", [False, True])
def test_what_is_plain_is_taken_unread(late: bool) -> None:
    """So that the property above is about something."""
    whole = PLAIN_HEAD + PLAIN_BODY
    ends = [whole, PLAIN_HEAD, PLAIN_BODY, whole[:-1], whole[-1:], whole + whole, whole]
    assert played(ends, express=True, late=late).taken == 3
    assert len(played(ends, express=True, late=late).asked) == 6
