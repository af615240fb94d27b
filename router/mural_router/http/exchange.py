"""One request and its answer, as those see it who answer."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from mural_resolvers.errors import MuralError
from mural_router.http.cut_through import send_now
from mural_router.http.errors import answer_fields, error_json
from mural_router.http.head import RequestHead

if TYPE_CHECKING:
    from mural_router.http.client import ClientConnection

__all__ = [
    "Application",
    "BodySink",
    "Exchange",
    "Express",
    "Plan",
    "Reader",
    "WholeExchange",
    "status_line",
    "whole_answer",
]

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}".encode() for status in HTTPStatus
}


def status_line(status: int) -> bytes:
    """An answer's first line, without its end."""
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} ".encode()


def whole_answer(
    status: int,
    body: bytes,
    fields: tuple[tuple[str, str], ...],
    *,
    content_type: str = "application/json",
    keep: bool,
    method: str = "",
) -> bytes:
    """An answer's bytes; to a HEAD its body is only announced."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    last = "" if keep else "connection: close\r\n"
    length = f"\r\ncontent-length: {len(body)}\r\n"
    head = f"\r\ncontent-type: {content_type}{length}{lines}{last}\r\n"
    sent = status_line(status) + head.encode("latin-1")
    return sent if method == "HEAD" else sent + body


class Reader(Protocol):
    """Who answers an exchange, as far as the connection tells it what happens."""

    def gone(self) -> None:
        """The client went away, or was sent away, before its answer was complete."""

    def paused(self) -> None:
        """The client takes nothing more for now."""

    def resumed(self) -> None:
        """The client takes bytes again."""

    def end_now(self, error: MuralError) -> None:
        """The server stops: end the exchange at once, with this error where one can be told."""


class BodySink(Protocol):
    """Takes a body that is passed on as it comes."""

    def piece(self, payload: bytes) -> None: ...

    def complete(self) -> None: ...


class Plan(NamedTuple):
    """What will be done with a request whose head is known."""

    body_limit: int | None
    """How large a body is read whole first; None: `handle` takes it as it comes."""
    handle: Callable[[Exchange], None]
    """Answers, now or later. What it raises as a `MuralError` becomes the answer."""


class Application(Protocol):
    """What is done with requests."""

    def plan(self, head: RequestHead) -> Plan:
        """Decide by the head. Raises a `MuralError` for a request that is refused by it."""


class Exchange:
    """One request and its answer. Everything is ignored once the client is gone."""

    __slots__ = ("_connection", "arrived", "body", "bytes_sent", "handled", "head", "reader")

    def __init__(self, connection: ClientConnection, head: RequestHead, arrived: float) -> None:
        self._connection: ClientConnection | None = connection
        self.head = head
        self.body = b""
        """Whole, unless it is passed on."""
        self.arrived = arrived
        """When the head was complete, by `time.monotonic`: a loop's clock is coarse."""
        self.reader: Reader | None = None
        self.bytes_sent = 0
        self.handled = False
        """The application has it."""

    @property
    def keeps(self) -> bool:
        """Whether the connection stays after this answer, as far as is known now."""
        return self._connection is not None and self._connection.keep

    def write(self, data: bytes) -> None:
        """Send bytes of the answer, framing included."""
        if self._connection is not None:
            self.bytes_sent += len(data)
            send_now(self._connection.transport, self._connection.fd, data)

    @property
    def way(self) -> tuple[asyncio.Transport, int] | None:
        """The transport that `write` writes to, and its socket or -1 (`CutThrough.cut_through`).

        None once the client is gone.
        """
        connection = self._connection
        return None if connection is None else (connection.transport, connection.fd)

    def finish(self) -> None:
        """The answer is complete: the next request may come."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.answered()

    def cut(self) -> None:
        """The answer cannot be completed: end the connection so that the client sees that."""
        if self._connection is not None:
            connection, self._connection = self._connection, None
            connection.abort()

    def close_after(self) -> None:
        """No further request on this connection, whatever was promised before."""
        if self._connection is not None:
            self._connection.keep = False

    def answer(
        self,
        status: int,
        body: bytes,
        fields: tuple[tuple[str, str], ...] = (),
        content_type: str = "application/json",
    ) -> None:
        """Send a whole answer."""
        connection = self._connection
        if connection is None:
            return
        if connection.body_is_unread:
            connection.keep = False
        self.write(
            whole_answer(
                status,
                body,
                fields,
                content_type=content_type,
                keep=connection.keep,
                method=self.head.method,
            )
        )
        self.finish()

    def fail(self, error: MuralError, fields: tuple[tuple[str, str], ...] = ()) -> None:
        """Send an error's answer."""
        self.answer(error.status, error_json(error), answer_fields(error) + fields)

    def take_body(self, sink: BodySink) -> None:
        """Have the body passed to ``sink`` from the next turn of the loop on."""
        if self._connection is not None:
            self._connection.pass_body(sink)

    def pause_body(self) -> None:
        if self._connection is not None:
            self._connection.pause_body()

    def resume_body(self) -> None:
        if self._connection is not None:
            self._connection.resume_body()

    def detach(self) -> None:
        """The connection's own word that it is gone."""
        self._connection = None


class WholeExchange(Exchange):
    """Of a request that was taken whole, unread by its connection, which sets it going."""

    __slots__ = ()

    @abstractmethod
    def begin(self) -> None:
        """Once the connection knows of it."""


Express = Callable[["ClientConnection", bytes], WholeExchange | None]
"""Takes what is one request of the plainest kind, and nothing else; None: it has to be read."""
