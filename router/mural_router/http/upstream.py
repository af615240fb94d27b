"""The side that replicas see: kept connections, answers followed strictly, passed on as bytes."""

from __future__ import annotations

import asyncio
import ssl
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol, cast

from mural_router.fleet.endpoint import Address, Endpoint
from mural_router.http.chunks import ChunkDecoder, ChunkError
from mural_router.http.cut_through import Counted, CutThrough, plain_socket, send_now
from mural_router.http.errors import BrokenAnswer
from mural_router.http.head import END, ResponseHead, parse_response_head
from mural_router.http.settings import HttpSettings
from mural_router.http.watch import NEVER, Watch, Watched

__all__ = [
    "AnswerTimeout",
    "Caller",
    "ConnectFailed",
    "ReplicaConnection",
    "ReplicaPool",
    "ReplicaSilent",
]

_MAX_HEAD_BYTES: Final = 65_536
_MAX_INTERIM_ANSWERS: Final = 8
_JOINED_BYTES: Final = 65_536
"""Up to here one piece is sent rather than several."""


class ConnectFailed(Exception):
    """No connection came to be; nothing was sent."""


class AnswerTimeout(Exception):  # and no TimeoutError, which is an OSError: nothing was lost
    """The replica was silent for too long."""


class ReplicaSilent(AnswerTimeout):
    """The replica answers nobody: no answer of it was waited for to the end."""


class Caller(Protocol):
    """Who a replica's answer is for. After `complete` or `broken` nothing more is called."""

    @abstractmethod
    def answer_begins(self, head: ResponseHead) -> None:
        """The head of the final answer. `ReplicaConnection.discard` may be called within."""

    @abstractmethod
    def answer_goes_on(self, raw: bytes, payload: bytes, whole: bool) -> None:
        """A piece of the body: as it came, without its framing, and whether it is whole chunks.

        Never beyond the answer's end. For a body with a length both are the same.
        """

    @abstractmethod
    def answer_ends(self) -> None:
        """The answer is complete, and the connection given back."""

    @abstractmethod
    def answer_breaks(self, error: Exception) -> None:
        """No (more) answer will come: lost (`OSError`), `BrokenAnswer` or `AnswerTimeout`."""

    @abstractmethod
    def replica_falls_silent(self) -> None:
        """The replica answers nobody. Nothing has ended: `ReplicaConnection.discard` may."""

    @abstractmethod
    def request_pauses(self) -> None:
        """The replica takes no more of a request's body for now."""

    @abstractmethod
    def request_resumes(self) -> None:
        """It takes more."""


class ReplicaConnection(Watched, CutThrough):
    """One connection to a replica; it has one request at a time."""

    transport: asyncio.Transport

    def __init__(self, pool: ReplicaPool, endpoint: Endpoint) -> None:
        self.address = endpoint.address
        self.requests = 0
        """Sent on it so far: above 1 it was kept, and may have been closed meanwhile."""
        self._pool = pool
        self._watch = pool.watch
        self._idle_timeout_s = pool.settings.idle_timeout_s
        self._caller: Caller | None = None
        self._first: Callable[[bytes], bool] | None = None
        self._start = b""
        self._head: ResponseHead | None = None
        self._interim = 0
        self._left = 0
        self._decoder: ChunkDecoder | None = None
        self._sending = False
        self._paused = False
        self._closed = False
        self._fd = -1
        self.deadline = NEVER

    # -- the caller's side ------------------------------------------------------------------------

    def send(
        self,
        caller: Caller,
        pieces: Iterable[bytes],
        *,
        complete: bool = True,
        first: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Begin a request; with ``complete`` its body is in ``pieces`` too.

        ``first`` is shown what comes first: True if that was the whole answer, and all is done, or
        if it holds that and waits for more.
        """
        self._caller = caller
        self._first = first
        self._head = None
        self._interim = 0
        self.requests += 1
        self._sending = not complete
        self.deadline = self._watch.now + self._pool.settings.first_byte_timeout_s
        parts = list(pieces)
        if sum(map(len, parts)) <= _JOINED_BYTES:
            send_now(self.transport, self._fd, b"".join(parts))
        else:
            self.transport.writelines(parts)

    def pass_on(self, transport: asyncio.Transport, fd: int, counted: Counted) -> None:
        """Send pieces that are plain events on, until the caller has to be told of one.

        For one that has no part of a chunk, and none of an event, in its hands.
        """
        decoder = self._decoder
        if decoder is not None and decoder.whole and not decoder.done:
            self.cut_through(transport, fd, counted, self._watch, self._idle_timeout_s)

    def send_more(self, data: bytes) -> None:
        """A piece of a body that is passed on."""
        if not self._closed:
            self.deadline = self._watch.now + self._pool.settings.first_byte_timeout_s
            self.transport.write(data)

    def send_end(self) -> None:
        """The body was complete."""
        self._sending = False

    def pause(self) -> None:
        """Take no more of the answer for now."""
        if not self._paused and not self._closed:
            self._paused = True
            self.deadline = NEVER
            self.transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self._closed:
            self._paused = False
            self.deadline = self._watch.now + self._idle_timeout_s
            self.transport.resume_reading()

    def wait_for_more(self, first: Callable[[bytes], bool]) -> None:
        """Show ``first`` what comes next, too: it holds a head, whose body is yet to come."""
        self._first = first
        self.deadline = self._watch.now + self._idle_timeout_s

    def hand_over(self, caller: Caller, held: bytes) -> None:
        """Tell another caller from now on, and before that of a head that was held."""
        self._first = None
        lost = self._caller is None
        if not lost:
            self._caller = caller
        if held:
            head = parse_response_head(held)
            if lost:
                caller.answer_begins(head)
            else:
                self._begin(head)

    def answered_whole(self) -> None:
        """The caller has read the whole answer, which leaves the connection as it was."""
        self._caller = None
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        self._pool.give_back(self)

    def discard(self) -> None:
        """The caller wants nothing more; the replica sees the connection end and stops its work."""
        self._caller = None
        self._close()

    def fall_silent(self) -> None:
        """Its replica answers nobody."""
        if self._caller is not None:
            self._caller.replica_falls_silent()

    # -- the transport's calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self._fd = plain_socket(self.transport)
        self._pool.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self.take_all_in()
        self._pool.lost(self)
        caller, self._caller = self._caller, None
        if caller is not None:
            caller.answer_breaks(exc or ConnectionResetError("the replica closed the connection"))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        if self._caller is not None and self._sending:
            self._caller.request_pauses()

    def resume_writing(self) -> None:
        if self._caller is not None and self._sending:
            self._caller.request_resumes()

    def expired(self) -> None:
        if self._caller is None:
            self._close()
        else:
            self._break(AnswerTimeout("the replica was silent for too long"))

    def take_in(self, data: bytes) -> None:
        if self._caller is None:
            # Nothing was asked: an answer to nothing must not become one to the next request.
            self._close()
            return
        self.take_all_in()
        first, self._first = self._first, None
        if first is not None and first(data):
            return
        try:
            if self._head is None:
                data = self._read_head(data)
            if data and self._caller is not None:
                self._read_body(data)
        except (BrokenAnswer, ChunkError) as error:
            self._break(error)

    # -- reading ----------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> bytes:
        """Give what follows the head; nothing while it is incomplete, or when it is all."""
        if self._start:
            data = self._start + data
            self._start = b""
        while self._head is None:
            end = data.find(END, 0, _MAX_HEAD_BYTES) + 4
            if end < 4:
                if len(data) >= _MAX_HEAD_BYTES:
                    raise BrokenAnswer("its head is too large")
                self._start = data
                return b""
            head = parse_response_head(data[:end])
            data = data[end:]
            if head.status >= 200:
                self._begin(head)
            elif head.status == 101 or self._interim == _MAX_INTERIM_ANSWERS:
                raise BrokenAnswer(f"{head.status} was not asked for")
            else:
                self._interim += 1
        return data

    def _begin(self, head: ResponseHead) -> None:
        caller = self._caller
        assert caller is not None
        self._head = head
        self.deadline = self._watch.now + self._idle_timeout_s
        self._decoder = ChunkDecoder() if head.length is None else None
        self._left = head.length or 0
        caller.answer_begins(head)
        if head.length == 0 and self._caller is not None:
            self._end()

    def _read_body(self, data: bytes) -> None:
        caller = self._caller
        assert caller is not None
        if not self._paused:
            self.deadline = self._watch.now + self._idle_timeout_s
        decoder = self._decoder
        if decoder is not None:
            began_whole = decoder.whole
            payload, rest = decoder.feed(data)
            if rest:
                raise BrokenAnswer("bytes follow its end")
            caller.answer_goes_on(data, payload, began_whole and decoder.whole)
            ended = decoder.done
        else:
            self._left -= len(data)
            if self._left < 0:
                raise BrokenAnswer("bytes follow its end")
            caller.answer_goes_on(data, data, True)
            ended = not self._left
        if ended and self._caller is not None:
            self._end()

    def _end(self) -> None:
        caller, self._caller = self._caller, None
        self.take_all_in()
        assert caller is not None
        assert self._head is not None
        if self._paused:
            self._paused = False
            self.transport.resume_reading()
        # A request that was answered before it was sent whole leaves a connection without a frame.
        if self._head.keep and not self._sending:
            self._pool.give_back(self)
        else:
            self._close()
        caller.answer_ends()

    def _break(self, error: Exception) -> None:
        caller, self._caller = self._caller, None
        self._close()
        if caller is not None:
            caller.answer_breaks(error)

    def _close(self) -> None:
        self.take_all_in()
        if not self._closed:
            self._closed = True
            self._pool.lost(self)
            self.transport.abort()


class ReplicaPool:
    """Connections to replicas, the idle ones kept; the one used last is taken first."""

    def __init__(
        self,
        settings: HttpSettings,
        watch: Watch,
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        self.settings = settings
        self.watch = watch
        self.opened_total = 0
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._idle: dict[Address, deque[ReplicaConnection]] = {}
        self._open: set[ReplicaConnection] = set()

    @property
    def idle(self) -> int:
        return sum(len(connections) for connections in self._idle.values())

    def take(self, endpoint: Endpoint) -> ReplicaConnection | None:
        """An idle connection, if there is one."""
        return self.take_from(endpoint.address)

    async def connect(self, endpoint: Endpoint) -> ReplicaConnection:
        """Open one. Raises `ConnectFailed`."""
        connection = ReplicaConnection(self, endpoint)
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await self._loop.create_connection(
                    lambda: cast("asyncio.Protocol", connection),
                    endpoint.host,
                    endpoint.port,
                    ssl=self._context() if endpoint.tls else None,
                )
        except BaseException as error:
            if connection in self._open:
                # Cancelled just when it was made: uvloop closes it then, and does not tell it.
                connection.discard()
            if isinstance(error, TimeoutError):
                raise ConnectFailed("no connection in time") from None
            if isinstance(error, OSError):
                raise ConnectFailed(str(error)) from None
            raise
        return connection

    def opened(self, connection: ReplicaConnection) -> None:
        self.opened_total += 1
        self._open.add(connection)
        self.watch.add(connection)

    def take_from(self, address: Address) -> ReplicaConnection | None:
        """`take` for an endpoint's address."""
        idle = self._idle.get(address)
        return idle.pop() if idle else None

    def put_back(self, connection: ReplicaConnection) -> None:
        """One that was taken and not used after all."""
        self._idle.setdefault(connection.address, deque()).append(connection)

    def give_back(self, connection: ReplicaConnection) -> None:
        idle = self._idle.get(connection.address)
        if idle is None:
            idle = self._idle[connection.address] = deque()
        connection.deadline = self.watch.now + self.settings.idle_connection_s
        idle.append(connection)
        if len(idle) > self.settings.max_idle_connections:
            idle.popleft().discard()

    def fell_silent(self, endpoint: Endpoint) -> None:
        """Tell all who wait for a replica that it answers nobody."""
        address = endpoint.address
        for connection in [each for each in self._open if each.address == address]:
            connection.fall_silent()

    def lost(self, connection: ReplicaConnection) -> None:
        self._open.discard(connection)
        self.watch.discard(connection)
        idle = self._idle.get(connection.address)
        if idle is None:
            return
        if connection in idle:
            idle.remove(connection)
        if not idle:
            # Endpoints come and go: nothing is kept of those without a connection.
            del self._idle[connection.address]

    def close(self) -> None:
        for connection in list(self._open):
            connection.discard()
