"""A replica's connection under any bytes in any pieces: one answer, never more than it says."""

from __future__ import annotations

import asyncio
import ssl
from itertools import pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mural_router.fleet.endpoint import Endpoint
from mural_router.http.head import ResponseHead
from mural_router.http.settings import HttpSettings
from mural_router.http.upstream import ReplicaConnection, ReplicaPool
from mural_router.http.watch import Watch

PIECES = st.lists(
    st.sampled_from(
        [
            b"HTTP/1.1 200 OK\r\n",
            b"HTTP/1.1 204 No Content\r\n",
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"content-length: 3\r\n",
            b"content-length: 0\r\n",
            b"transfer-encoding: chunked\r\n",
            b"connection: close\r\n",
            b"\r\n",
            b"abc",
            b"3\r\nabc\r\n",
            b"0\r\n\r\n",
            b"\n",
        ]
    )
    | st.binary(max_size=4),
    max_size=12,
)
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc"


class Silent(asyncio.Transport):
    """A transport to nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = False

    def write(self, data: object) -> None:
        pass

    def abort(self) -> None:
        self.aborted = True


class Noting:
    """Keeps what it is told, and holds the connection to the order of its calls."""

    def __init__(self) -> None:
        self.head: ResponseHead | None = None
        self.payload = b""
        self.over = ""

    def answer_begins(self, head: ResponseHead) -> None:
        assert self.head is None
        assert not self.over
        self.head = head

    def answer_goes_on(self, raw: bytes, payload: bytes, whole: bool) -> None:
        assert self.head is not None
        assert not self.over
        self.payload += payload

    def answer_ends(self) -> None:
        assert self.head is not None
        assert not self.over
        self.over = "complete"

    def replica_falls_silent(self) -> None:
        raise AssertionError("nobody says so")

    def answer_breaks(self, error: Exception) -> None:
        assert not self.over
        self.over = "broken"

    def request_pauses(self) -> None:
        raise AssertionError("nothing is sent")

    def request_resumes(self) -> None:
        raise AssertionError("nothing is sent")


def played(pieces: list[bytes]) -> tuple[Noting, int]:
    """What a caller is told, and how many connections are idle then."""

    async def play() -> tuple[Noting, int]:
        watch = Watch(asyncio.get_running_loop())
        pool = ReplicaPool(HttpSettings(), watch, ssl.create_default_context)
        connection = ReplicaConnection(pool, Endpoint("r", "127.0.0.1", 1))
        transport = Silent()
        connection.connection_made(transport)
        caller = Noting()
        connection.send(caller, [b"x"])
        for piece in pieces:
            if transport.aborted:
                break
            connection.data_received(piece)
        idle = pool.idle
        connection.connection_lost(None)
        watch.close()
        assert pool.idle == 0
        return caller, idle

    return asyncio.run(play())


@settings(max_examples=300, deadline=None)
@given(PIECES, st.lists(st.integers(0, 1000), max_size=6))
@example([WHOLE], [])
@example([WHOLE, b"x"], [])
def test_an_answer_is_whole_or_broken_and_never_more_than_it_says(
    pieces: list[bytes], cuts: list[int]
) -> None:
    data = b"".join(pieces)
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    torn = [data[a:b] for a, b in pairwise(places) if a != b]
    for parts in ([data] if data else [], torn, [bytes([byte]) for byte in data]):
        caller, idle = played(parts)
        # A connection that ends breaks what was not whole.
        assert caller.over in ("complete", "broken")
        if caller.head is not None and caller.head.length is not None:
            assert len(caller.payload) <= caller.head.length
            assert caller.over == "broken" or len(caller.payload) == caller.head.length
        if idle:
            assert caller.over == "complete"
            assert caller.head is not None
            assert caller.head.keep


def test_bytes_after_an_answer_are_never_passed_on_however_they_come() -> None:
    together, idle = played([WHOLE + b"HTTP/1.1 200 OK\r\n"])
    assert (together.over, together.payload, idle) == ("broken", b"", 0)
    apart, idle = played([WHOLE, b"HTTP/1.1 200 OK\r\n"])
    assert (apart.over, apart.payload, idle) == ("complete", b"abc", 0)
