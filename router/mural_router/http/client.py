"""A client's connection: requests are read strictly, answered in order, and never wait long.

It reads one request at a time. What a client sends ahead of its answer (pipelining) waits, a little
in memory and the rest with the client. Whatever is no proper request is answered with its reason,
and the connection is closed: where the next request begins is unknown.
"""

from __future__ import annotations

import asyncio
from enum import Enum, auto
from time import monotonic
from typing import TYPE_CHECKING, Final, cast

from mural_resolvers.errors import MuralError, TooLarge, Unavailable
from mural_router.http.chunks import ChunkDecoder, ChunkError
from mural_router.http.cut_through import plain_socket
from mural_router.http.errors import (
    BadRequest,
    HeadTooLarge,
    RequestTimeout,
    answer_fields,
    error_json,
)
from mural_router.http.exchange import BodySink, Exchange, Plan, Reader, WholeExchange, whole_answer
from mural_router.http.head import END, RequestHead, parse_request_head, refuse_hopeless
from mural_router.http.watch import NEVER, Watched

if TYPE_CHECKING:
    from mural_router.http.server import Server

__all__ = ["ClientConnection"]

_AHEAD_BYTES: Final = 65_536
"""What may be sent ahead of an answer before reading stops."""
_LINGER_S: Final = 2.0
_LINGER_BYTES: Final = 16 << 20
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class _State(Enum):
    HEAD = auto()
    BODY = auto()
    """Read whole, before the application is asked."""
    PASSING = auto()
    """Passed on, while the application is at work."""
    BUSY = auto()
    LINGER = auto()
    """Answered and closing: what still comes is thrown away, so that the answer is not lost."""
    CLOSED = auto()


class ClientConnection(Watched):
    """A client's connection: a protocol of asyncio's by its methods."""

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._settings = server.settings
        self._watch = server.watch
        self._state = _State.HEAD
        self._data = b""
        self._exchange: Exchange | None = None
        self._decoder: ChunkDecoder | None = None
        self._missing = 0
        self._head = b""
        """A request's head as it came, until something of its body has."""
        self._body = bytearray()
        self._buffered = 0
        self._limit = 0
        self._plan: Plan | None = None
        self._sink: BodySink | None = None
        self._body_paused = False
        self._reading = True
        self._unread_answers = False
        """The transport's buffer is full of what the client has not taken."""
        self._untaken = 0
        """How much that was when it was last looked at."""
        self._advancing = False
        self._head_begun = False
        self._lingered = 0
        self.deadline = NEVER
        self.keep = True
        self.fd = -1
        """Its socket, where what is sent there is what the client reads: -1 with TLS."""

    # -- the transport's calls --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's.
        self.transport = cast("asyncio.Transport", transport)
        self.fd = plain_socket(self.transport)
        self.deadline = self._watch.now + self._settings.keep_alive_s
        if not self._server.admit(self):
            self.keep = False
            self._refuse(Unavailable("Too many connections.", retry_after_s=1.0))

    def connection_lost(self, exc: Exception | None) -> None:
        self._state = _State.CLOSED
        self._server.forget(self)
        self._release()
        self._leave(gone=True)

    def eof_received(self) -> bool:
        # A client that closes its half waits for nothing; an answer could not be told from a cut.
        return False

    def data_received(self, data: bytes) -> None:
        if self._state is _State.LINGER:
            self._lingered += len(data)
            if self._lingered > _LINGER_BYTES:
                self.transport.abort()
            return
        if self._state is _State.HEAD and not self._data and self._is_express(data):
            return
        self._data = self._data + data if self._data else data
        if not self._advancing:
            self._advance()

    def pause_writing(self) -> None:
        self._unread_answers = True
        self._untaken = self.transport.get_write_buffer_size()
        self.deadline = self._watch.now + self._settings.stall_timeout_s
        if self._exchange is not None and self._exchange.reader is not None:
            self._exchange.reader.paused()

    def resume_writing(self) -> None:
        self._unread_answers = False
        if self._state is _State.BUSY:
            self.deadline = NEVER
        elif self._state is _State.LINGER:
            self.deadline = self._watch.now + _LINGER_S
            self._server.has_taken(self)
        if self._exchange is not None and self._exchange.reader is not None:
            self._exchange.reader.resumed()
        elif self._state is _State.HEAD:
            self.deadline = self._watch.now + self._settings.keep_alive_s
            self._read_on()

    def expired(self) -> None:
        """A wait is over: for a request to begin, to be read, for its answer to be taken."""
        if self._takes_answers():
            self.deadline = self._watch.now + self._settings.stall_timeout_s
            return
        idle = self._state is _State.HEAD and (not self._data or self._unread_answers)
        if idle or self._state not in (_State.HEAD, _State.BODY):
            self.abort()
        else:
            self._refuse(RequestTimeout("The request took too long to come."))

    def _takes_answers(self) -> bool:
        """Whether the client is slow, and has taken something since this was last asked."""
        if not self._unread_answers:
            return False
        before, self._untaken = self._untaken, self.transport.get_write_buffer_size()
        return self._untaken < before

    # -- requests that are carried without being read here ----------------------------------------

    def _is_express(self, data: bytes) -> bool:
        """Whether it is a whole request of the plainest kind, which is on its way then."""
        server, size = self._server, len(data)
        if server.buffered_bytes + size > self._settings.max_buffered_bytes:
            return False
        exchange = self._whole(data)
        if exchange is None:
            return False
        self._decoder, self._missing = None, 0
        self._buffered = size
        server.buffered_bytes += size
        server.requests_total += 1
        self._carry(exchange)
        return True

    def _whole(self, data: bytes) -> WholeExchange | None:
        server = self._server
        if server.express is None or server.draining or self._unread_answers:
            return None
        return server.express(self, data)

    def _carry(self, exchange: WholeExchange) -> None:
        self._exchange = exchange
        self._state = _State.BUSY
        self.deadline = NEVER
        self._server.begun()
        exchange.handled = True
        exchange.begin()

    # -- reading ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Do what the bytes that are here allow; a loop, so that many requests are no recursion."""
        self._advancing = True
        try:
            while self._data:
                try:
                    if not self._step():
                        break
                except MuralError as error:
                    self._refuse(error)
        finally:
            self._advancing = False

    def _step(self) -> bool:
        if self._state is _State.HEAD:
            if self._unread_answers:
                # Who takes no answers is asked for no more requests.
                self._hold()
                return False
            return self._read_head()
        if self._state is _State.BODY:
            return self._read_body()
        if self._state is _State.PASSING and not self._body_paused:
            return self._pass_on()
        if self._state in (_State.BUSY, _State.PASSING):
            self._hold()
            return False
        self._data = b""
        return False

    def _hold(self) -> None:
        """Leave what a client sends ahead with the client, but for a little."""
        if len(self._data) > _AHEAD_BYTES and self._reading:
            self._reading = False
            self.transport.pause_reading()

    def _read_head(self) -> bool:
        settings = self._settings
        end = self._data.find(END, 0, settings.max_head_bytes)
        if end < 0:
            if len(self._data) >= settings.max_head_bytes:
                raise HeadTooLarge(f"The request's head is above {settings.max_head_bytes} bytes.")
            refuse_hopeless(self._data)
            if not self._head_begun:
                self._head_begun = True
                self.deadline = self._watch.now + settings.head_timeout_s
            return False
        self._head_begun = False
        end += 4
        raw = self._data[:end]
        head = parse_request_head(raw, settings.max_head_fields)
        self._data = self._data[end:]
        self.keep = head.keep and not self._server.draining
        exchange = self._exchange = Exchange(self, head, monotonic())
        self._server.requests_total += 1
        self._missing = head.length
        self._decoder = ChunkDecoder() if head.chunked else None
        if not self.body_is_unread:
            self._plan = self._server.application.plan(head)
            return self._ask(exchange)
        # Of this request, whatever became of the one before; of one whose body came with it nobody
        # needs it.
        self._head = raw if not head.chunked and not self._data else b""
        return self._expect_body(exchange, head)

    def _expect_body(self, exchange: Exchange, head: RequestHead) -> bool:
        self._state = _State.BODY
        if head.method in ("GET", "HEAD"):
            raise BadRequest(f"A {head.method} has no body.")
        self._plan = self._server.application.plan(head)
        limit = self._plan.body_limit
        if limit is None:
            return self._ask(exchange)
        self._limit = limit
        if head.length > limit:
            raise TooLarge(f"The request's body is above {limit} bytes.")
        self.deadline = self._watch.now + self._settings.body_timeout_s
        if head.expects_continue and not self._data:
            self.transport.write(_CONTINUE)
        return True

    def _read_body(self) -> bool:
        payload, complete = self._next_payload()
        self._count(len(payload))
        exchange = self._exchange
        assert exchange is not None
        head, self._head = self._head, b""
        if complete and not self._body:
            # Many clients write a head and its body one after the other.
            whole = self._whole(head + payload) if head and not self._data else None
            if whole is not None:
                whole.arrived = exchange.arrived
                exchange.detach()
                self._carry(whole)
                return True
            exchange.body = payload
            return self._ask(exchange)
        self._body += payload
        if not complete:
            return True
        exchange.body = bytes(self._body)
        self._body = bytearray()
        return self._ask(exchange)

    def _next_payload(self) -> tuple[bytes, bool]:
        """Take what there is of the body, and whether that is its end."""
        if self._decoder is None:
            payload = self._data[: self._missing]
            self._data = self._data[self._missing :]
            self._missing -= len(payload)
            return payload, not self._missing
        try:
            payload, self._data = self._decoder.feed(self._data)
        except ChunkError as error:
            raise BadRequest(f"The request's body is not properly chunked: {error}.") from None
        return payload, self._decoder.done

    def _count(self, size: int) -> None:
        self._buffered += size
        self._server.buffered_bytes += size
        if self._buffered > self._limit:
            raise TooLarge(f"The request's body is above {self._limit} bytes.")
        if self._server.buffered_bytes > self._settings.max_buffered_bytes:
            raise Unavailable("Too many bodies are held at this time.", retry_after_s=1.0)

    def _ask(self, exchange: Exchange) -> bool:
        self._state = _State.BUSY
        self.deadline = NEVER
        self._server.begun()
        exchange.handled = True
        plan = self._plan
        assert plan is not None
        plan.handle(exchange)
        return True

    # -- a body that is passed on -----------------------------------------------------------------

    @property
    def body_is_unread(self) -> bool:
        return self._missing > 0 or (self._decoder is not None and not self._decoder.done)

    def pass_body(self, sink: BodySink) -> None:
        exchange = self._exchange
        assert exchange is not None
        if not self.body_is_unread:
            self._server.loop.call_soon(sink.complete)
            return
        self._sink = sink
        self._state = _State.PASSING
        self.deadline = self._watch.now + self._settings.body_timeout_s
        if exchange.head.expects_continue and not self._data:
            self.transport.write(_CONTINUE)
        self._read_on()

    def pause_body(self) -> None:
        self._body_paused = True
        self.deadline = NEVER

    def resume_body(self) -> None:
        if self._body_paused:
            self._body_paused = False
            if self._state is _State.PASSING:
                self.deadline = self._watch.now + self._settings.body_timeout_s
            self._read_on()

    def _read_on(self) -> None:
        """Go on with what lies here, in a turn of its own: callers are amid their work."""
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        if self._data:
            self._server.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if not self._advancing:
            self._advance()

    def _pass_on(self) -> bool:
        payload, complete = self._next_payload()
        self.deadline = self._watch.now + self._settings.body_timeout_s
        sink = self._sink
        assert sink is not None
        if payload:
            sink.piece(payload)
        if complete and self._state is _State.PASSING:
            self._state = _State.BUSY
            self._sink = None
            self.deadline = NEVER
            sink.complete()
        return True

    # -- ends -------------------------------------------------------------------------------------

    def answered(self) -> None:
        """The exchange is complete."""
        self._leave(gone=False)
        if self._buffered:
            self._release()
        if not self.keep or self.body_is_unread:
            self._linger()
            return
        self._state = _State.HEAD
        self._decoder = None
        self._body_paused = False
        settings = self._settings
        wait_s = settings.stall_timeout_s if self._unread_answers else settings.keep_alive_s
        self.deadline = self._watch.now + wait_s
        if not self._reading:
            self._reading = True
            self.transport.resume_reading()
        if self._data and not self._advancing:
            self._advance()

    def _refuse(self, error: MuralError) -> None:
        """Answer what is no request to be handled, and close."""
        self._server.refused_total += 1
        # A body that goes wrong while it is passed on has no end that anybody may see.
        exchange = self._leave(gone=True)
        if exchange is not None and exchange.bytes_sent:
            # Amid an answer there is no place for another one.
            self.abort()
            return
        self.keep = self.keep and exchange is not None and not self.body_is_unread
        whole = whole_answer(
            error.status,
            error_json(error),
            answer_fields(error),
            keep=self.keep,
            method="" if exchange is None else exchange.head.method,
        )
        self.transport.write(whole)
        self.answered()

    def _linger(self) -> None:
        """Close so that the client can read its answer: a reset would take it away.

        For as long as it takes something of that: what waits in the transport is lost by an abort.
        """
        if self._state is _State.CLOSED:
            return
        self._state = _State.LINGER
        self._data = b""
        self._lingered = 0
        self._sink = None
        transport = self.transport
        if not self._reading:
            self._reading = True
            transport.resume_reading()
        self._untaken = transport.get_write_buffer_size()
        self._unread_answers = self._untaken > 0
        if self._unread_answers:
            self._server.is_taking(self)
        if transport.can_write_eof():
            wait_s = self._settings.stall_timeout_s if self._unread_answers else _LINGER_S
            # So `resume_writing` tells when all has been taken.
            transport.set_write_buffer_limits(0)
            try:
                transport.write_eof()
            except OSError:
                # So asyncio's own loop says that the client is gone, and goes on waiting.
                transport.abort()
        else:
            # TLS tells of its end alone, and has more of the answer than it says.
            wait_s = self._settings.stall_timeout_s
            transport.close()
        self.deadline = self._watch.now + wait_s

    def _leave(self, *, gone: bool) -> Exchange | None:
        """Let go of the exchange, and say so to whoever answers it."""
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return None
        if gone:
            exchange.detach()
        if exchange.handled:
            self._server.ended()
        # They hold one another: their bodies would stay until the collector comes by.
        reader, exchange.reader = exchange.reader, None
        if gone and reader is not None:
            reader.gone()
        return exchange

    def _release(self) -> None:
        self._server.buffered_bytes -= self._buffered
        self._buffered = 0
        self._body = bytearray()

    def abort(self) -> None:
        if self._state is not _State.CLOSED:
            self.transport.abort()

    @property
    def reader(self) -> Reader | None:
        return self._exchange.reader if self._exchange is not None else None

    def end_when_idle(self) -> None:
        """Close now if no request is in flight, else after its answer."""
        self.keep = False
        if self._state is not _State.HEAD:
            return
        if self.transport.get_write_buffer_size():
            self._linger()
        elif not self._data:
            self.transport.close()
