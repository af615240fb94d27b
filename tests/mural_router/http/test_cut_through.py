"""Events that go on by themselves: the same stream, whether they do or are all taken in."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import ssl
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_router.fleet.endpoint import Endpoint
from mural_router.http.chunks import LAST_CHUNK, ChunkDecoder, chunk
from mural_router.http.cut_through import CutThrough, plain_socket, send_now
from mural_router.http.head import ResponseHead
from mural_router.http.scan import plain_events
from mural_router.http.settings import HttpSettings
from mural_router.http.upstream import Caller, ReplicaConnection, ReplicaPool
from mural_router.http.watch import NEVER, Watch
from mural_router.proxy.events import EventRelay

native = pytest.mark.skipif(plain_events is None, reason="the native reader is not built")

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices":[{"text":"a"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
EVENTS = st.lists(
    st.sampled_from([TEXT, USAGE, b"data: y\r\n\r\n", b": a comment\n\n", b"data: half"]),
    max_size=8,
)


class Silent(asyncio.Transport):
    """A transport to nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = self.reading_paused = False

    def write(self, data: object) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False

    def abort(self) -> None:
        self.aborted = True


class Client(asyncio.Transport):
    """To a client: notes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.waiting = 0
        self.closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def is_closing(self) -> bool:
        return self.closing


class Reading(ReplicaConnection):
    """Counts what it takes in."""

    taken_in = 0

    def take_in(self, data: bytes) -> None:
        self.taken_in += 1
        super().take_in(data)


class TakingAllIn(Reading):
    """As it is where nothing native was built."""

    def data_received(self, data: bytes) -> None:
        self.take_in(data)


class Streaming(Caller):
    """Passes a stream on as the proxy does."""

    def __init__(self, connection: Reading) -> None:
        self.connection = connection
        self.events = EventRelay(hide_usage=True)
        self.client = Client()
        self.bytes_sent = 0
        self.over = ""

    @property
    def sent(self) -> bytes:
        return self.client.written

    def answer_begins(self, head: ResponseHead) -> None:
        pass

    def answer_goes_on(self, raw: bytes, payload: bytes, whole: bool) -> None:
        raw = self.events.feed(raw, payload, whole)
        self.bytes_sent += len(raw)
        self.client.write(raw)
        if not self.events.held:
            self.connection.pass_on(self.client, -1, self)

    def answer_ends(self) -> None:
        last = self.events.end()
        self.bytes_sent += len(last)
        self.client.write(last)
        self.over = "complete"

    def answer_breaks(self, error: Exception) -> None:
        self.over = "broken"

    def replica_falls_silent(self) -> None:
        raise AssertionError("nobody says so")

    def request_pauses(self) -> None:
        raise AssertionError("nothing is sent")

    def request_resumes(self) -> None:
        raise AssertionError("nothing is sent")


@contextmanager
def streaming(kind: type[Reading] = Reading) -> Iterator[tuple[Reading, Streaming]]:
    """A connection on which a stream has begun."""
    loop = asyncio.new_event_loop()
    watch = Watch(loop)

    async def made() -> Reading:
        pool = ReplicaPool(HttpSettings(), watch, ssl.create_default_context)
        return kind(pool, Endpoint("r", "127.0.0.1", 1))

    try:
        connection = loop.run_until_complete(made())
        connection.connection_made(Silent())
        caller = Streaming(connection)
        connection.send(caller, [b"x"])
        connection.data_received(HEAD)
        yield connection, caller
    finally:
        watch.close()
        loop.close()


def played(kind: type[Reading], pieces: list[bytes]) -> tuple[Reading, Streaming]:
    with streaming(kind) as (connection, caller):
        for piece in pieces:
            if not caller.over:
                connection.data_received(piece)
        return connection, caller


@native
@settings(max_examples=200, deadline=None)
@given(EVENTS, st.lists(st.integers(0, 10_000), max_size=6), st.booleans(), st.booleans())
def test_a_stream_is_the_same_whether_pieces_are_taken_in_or_not(
    events: list[bytes], cuts: list[int], ends: bool, by_event: bool
) -> None:
    chunks = [chunk(event) for event in events] + [LAST_CHUNK if ends else b"junk"]
    raw = b"".join(chunks)
    places = sorted({cut % (len(raw) + 1) for cut in cuts} | {0, len(raw)})
    pieces = chunks if by_event else [raw[a:b] for a, b in pairwise(places)]
    connection, through = played(Reading, pieces)
    read, taken = played(TakingAllIn, pieces)
    assert (through.sent, through.over) == (taken.sent, taken.over)
    assert through.events.usage == taken.events.usage
    assert through.bytes_sent == len(through.sent)
    assert connection.taken_in <= read.taken_in
    if ends:
        decoder = ChunkDecoder()
        assert decoder.feed(through.sent)[1] == b""
        assert decoder.done


@native
def test_plain_events_are_not_taken_in_and_the_rest_is() -> None:
    pieces = [chunk(TEXT), *[chunk(TEXT)] * 50, chunk(USAGE), *[chunk(TEXT)] * 50, LAST_CHUNK]
    connection, caller = played(Reading, pieces)
    # The head, the first events, the usage, and the end.
    assert connection.taken_in == 4
    assert caller.sent == chunk(TEXT) * 101 + LAST_CHUNK
    assert (caller.over, caller.events.usage) == ("complete", (7, 2))


@native
def test_each_piece_puts_the_deadline_off_and_one_that_pauses_has_none() -> None:
    with streaming() as (connection, caller):
        connection.data_received(chunk(TEXT))
        before = connection.deadline
        connection._watch.now += 7.0
        connection.data_received(chunk(TEXT))
        assert connection.deadline == before + 7.0

        class Pausing(Client):
            def write(self, data: bytes | bytearray | memoryview) -> None:
                connection.pause()

        connection.pass_on(Pausing(), -1, caller)
        connection.data_received(chunk(TEXT))
        assert connection.taken_in == 2
        assert connection.deadline == NEVER


@native
@pytest.mark.parametrize("how", ["discarded", "lost", "complete", "expired"])
def test_nothing_is_sent_once_it_is_over(how: str) -> None:
    with streaming() as (connection, caller):
        connection.data_received(chunk(TEXT))
        if how == "discarded":
            connection.discard()
        elif how == "lost":
            connection.connection_lost(None)
        elif how == "expired":
            connection.expired()
        else:
            connection.data_received(LAST_CHUNK)
        sent = caller.sent
        connection.data_received(chunk(TEXT))
        assert caller.sent == sent


@native
def test_a_fault_of_writing_is_not_swallowed() -> None:
    with streaming() as (connection, caller):
        connection.data_received(chunk(TEXT))

        class Failing(Client):
            def write(self, data: bytes | bytearray | memoryview) -> None:
                raise ConnectionError("no")

        connection.pass_on(Failing(), -1, caller)
        with pytest.raises(ConnectionError):
            connection.data_received(chunk(TEXT))


@native
@pytest.mark.parametrize("by", ["cut_through", "send_now"])
@pytest.mark.parametrize("how", ["sent", "waits", "closing", "full", "broken", "in_part"])
def test_what_cannot_be_sent_at_once_is_the_transports(by: str, how: str) -> None:
    near, far = socket.socketpair()
    with near, far, streaming() as (connection, caller):
        near.setblocking(False)
        client = Client()
        client.waiting, client.closing = 7 * (how == "waits"), how == "closing"
        event = chunk(b"data: %b\n\n" % (b"x" * (1 << 22 if how == "in_part" else 100)))
        if how == "full":
            with contextlib.suppress(BlockingIOError):
                while True:
                    near.send(b"y" * 65_536)
        elif how == "broken":
            far.close()
        if by == "send_now":
            send_now(client, near.fileno(), event)
        else:
            connection.data_received(chunk(TEXT))
            before = caller.bytes_sent
            connection.pass_on(client, near.fileno(), caller)
            connection.data_received(event)
            assert caller.bytes_sent == before + len(event)
        if how == "sent":
            assert (client.written, far.recv(1000)) == (b"", event)
        elif how == "in_part":
            assert 0 < len(client.written) < len(event)
            assert event.endswith(client.written)
        else:
            assert client.written == event


@pytest.mark.parametrize("fd", [-1, 0])
def test_bytes_of_a_transport_without_a_plain_socket_go_through_it(fd: int) -> None:
    client = Client()
    client.waiting = fd + 1
    send_now(client, fd, b"")
    send_now(client, fd, b"abc")
    assert client.written == b"abc"


@native
@pytest.mark.parametrize("arguments", [(), (None, -1), (None, "x", b""), (None, -1, "text")])
def test_what_is_sent_is_bytes(arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        send_now(*arguments)  # type: ignore[arg-type]


@native
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_slow_clients_stream_comes_in_order(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """A part of what is sent goes past the transport, the rest through it."""
    events = [chunk(b"data: %d %b\n\n" % (i, b"x" * 20_000)) for i in range(400)]

    class Sending(asyncio.Protocol):
        bytes_sent = 0

        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self.transport = cast("asyncio.Transport", transport)

    class Heir(CutThrough):
        deadline = 0.0

        def take_in(self, data: bytes) -> None:
            raise AssertionError("all is plain")

    async def play() -> bytes:
        loop, made = asyncio.get_running_loop(), Sending()
        server = await loop.create_server(lambda: made, "127.0.0.1", 0)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8_192)
        client.connect(server.sockets[0].getsockname())
        reader, writer = await asyncio.open_connection(sock=client)
        await asyncio.sleep(0.05)
        fd, through, watch = plain_socket(made.transport), Heir(), Watch(loop)
        assert fd >= 0
        through.cut_through(made.transport, fd, made, watch, 1.0)
        got = asyncio.create_task(reader.readexactly(len(b"".join(events))))
        waited = False
        for i, event in enumerate(events):
            through.data_received(event)
            waited |= made.transport.get_write_buffer_size() > 0
            if i % 7 == 0:
                await asyncio.sleep(0)
        assert waited
        received = await asyncio.wait_for(got, 30)
        writer.close()
        server.close()
        watch.close()
        return received

    with contextlib.closing(new_loop()) as loop:
        assert loop.run_until_complete(play()) == b"".join(events)


@native
@pytest.mark.parametrize("how", ["closed", "replaced", "dropped", "collected"])
def test_what_it_holds_is_let_go(how: str) -> None:
    class Heir(CutThrough):
        deadline = 0.0

        def take_in(self, data: bytes) -> None:
            raise AssertionError("all is plain")

    class Counting(Client):
        bytes_sent = 0

        def write(self, data: bytes | bytearray | memoryview) -> None:
            if how == "replaced":
                heir.take_all_in()

    loop = asyncio.new_event_loop()
    watch = Watch(loop)
    heir, counting = Heir(), Counting()
    if how == "collected":
        counting.heir = heir  # type: ignore[attr-defined]
    gone, before = weakref.ref(counting), sys.getrefcount(watch)
    heir.cut_through(counting, -1, counting, watch, 1.0)
    del counting
    for _ in range(3):
        if (counted := gone()) is not None:
            heir.data_received(chunk(TEXT))
            assert counted.bytes_sent > 0
        del counted
    if how == "closed":
        heir.take_all_in()
    if how == "collected":
        del heir
        gc.collect()
    elif how == "dropped":
        del heir
    assert gone() is None
    assert sys.getrefcount(watch) == before
    watch.close()
    loop.close()


@native
@pytest.mark.parametrize(
    "arguments", [(), (print,), (print, -1, None, None, "long"), (1, 2, 3, 4, 5, 6)]
)
def test_it_is_told_all_that_it_needs(arguments: tuple[object, ...]) -> None:
    through: Callable[..., None] = CutThrough().cut_through
    with pytest.raises(TypeError):
        through(*arguments)
