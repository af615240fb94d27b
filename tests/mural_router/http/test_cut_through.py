"""Events that go on by themselves: the same stream, whether they do or are all taken in."""

from __future__ import annotations

import asyncio
import gc
import ssl
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_router.fleet.endpoint import Endpoint
from mural_router.http.chunks import LAST_CHUNK, ChunkDecoder, chunk
from mural_router.http.cut_through import CutThrough
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

    def writelines(self, list_of_data: object) -> None:
        pass

    def pause_reading(self) -> None:
        self.reading_paused = True

    def resume_reading(self) -> None:
        self.reading_paused = False

    def abort(self) -> None:
        self.aborted = True


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
        self.sent = b""
        self.bytes_sent = 0
        self.over = ""

    def write(self, data: bytes) -> None:
        self.sent += data

    def answer_begins(self, head: ResponseHead) -> None:
        pass

    def answer_goes_on(self, raw: bytes, payload: bytes, whole: bool) -> None:
        raw = self.events.feed(raw, payload, whole)
        self.bytes_sent += len(raw)
        self.write(raw)
        if not self.events.held:
            self.connection.pass_on(self.write, self)

    def answer_ends(self) -> None:
        last = self.events.end()
        self.bytes_sent += len(last)
        self.write(last)
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

        def pausing(data: bytes) -> None:
            connection.pause()

        connection.pass_on(pausing, caller)
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

        def failing(data: bytes) -> None:
            raise ConnectionError("no")

        connection.pass_on(failing, caller)
        with pytest.raises(ConnectionError):
            connection.data_received(chunk(TEXT))


@native
@pytest.mark.parametrize("how", ["closed", "replaced", "dropped", "collected"])
def test_what_it_holds_is_let_go(how: str) -> None:
    class Heir(CutThrough):
        deadline = 0.0

        def take_in(self, data: bytes) -> None:
            raise AssertionError("all is plain")

    class Counting:
        bytes_sent = 0

        def write(self, data: bytes) -> None:
            if how == "replaced":
                heir.take_all_in()

    loop = asyncio.new_event_loop()
    watch = Watch(loop)
    heir, counting = Heir(), Counting()
    if how == "collected":
        counting.heir = heir  # type: ignore[attr-defined]
    gone, before = weakref.ref(counting), sys.getrefcount(watch)
    heir.cut_through(counting.write, counting, watch, 1.0)
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
@pytest.mark.parametrize("arguments", [(), (print,), (print, None, None, "long"), (1, 2, 3, 4, 5)])
def test_it_is_told_all_that_it_needs(arguments: tuple[object, ...]) -> None:
    through: Callable[..., None] = CutThrough().cut_through
    with pytest.raises(TypeError):
        through(*arguments)
