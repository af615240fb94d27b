"""One request to a server: a body in pieces, a bounded answer, every wait bounded.

Blocking, for threads. Redirects are not followed: a key would go along.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import NamedTuple

import msgspec

from mural_resolvers.errors import (
    InvalidInput,
    MuralError,
    Unauthorized,
    Unavailable,
    error_from_status,
    quoted,
)
from mural_resolvers.server_store.settings import ServerSettings

__all__ = ["Answer", "Body", "Request"]

_MAX_ANSWER_BYTES = 64 << 20
_MAX_MESSAGE_CHARS = 1000


class Body(NamedTuple):
    """What is sent: its media type, its size in bytes, and its pieces."""

    content_type: str
    num_bytes: int
    pieces: Iterator[bytes]


class Answer(NamedTuple):
    """A status that is no refusal, and what came with it."""

    status: int
    body: bytes


class _Detail(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Detail


class Request:
    """One request, which another thread may give up."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._connection = _connection(settings)
        self._socket: socket.socket | None = None
        self._response: HTTPResponse | None = None
        self._lock = threading.Lock()
        self._given_up = False

    def give_up(self) -> None:
        """Break off whatever another thread waits for."""
        with self._lock:
            self._given_up = True
            if self._socket is not None:
                try:
                    self._socket.shutdown(socket.SHUT_RDWR)
                except OSError:
                    # It is closed already: nothing waits for it.
                    return

    def send(self, method: str, path: str, body: Body | None = None) -> Answer:
        """Send it; raise the error that the server's answer stands for, or ``Unavailable``."""
        try:
            with self._asking():
                self._connect()
                self._put(method, path, body)
                return _answer(self._connection.getresponse())
        finally:
            self.close()

    def open(self, path: str) -> None:
        """Ask for what may be large, to be taken with ``read``; raises as ``send``."""
        with self._asking():
            self._connect()
            self._put("GET", path, None)
            response = self._connection.getresponse()
            if not 200 <= response.status < 300:
                raise _refusal(response, response.read(_MAX_ANSWER_BYTES))
            if self._socket is not None:
                self._socket.settimeout(self._settings.send_timeout_s)
            self._response = response

    def read(self, max_bytes: int) -> bytes:
        """The next bytes of what was asked for; none at its end, and where it breaks off."""
        assert self._response is not None
        with self._asking():
            return self._response.read(max_bytes)

    def close(self) -> None:
        """Close the connection. Idempotent; not while another thread uses it."""
        if self._response is not None:
            self._response.close()
        self._connection.close()

    @contextmanager
    def _asking(self) -> Iterator[None]:
        """Turn what the network does into a server that is away."""
        try:
            yield
        except ssl.SSLError as error:
            raise Unavailable(f"No TLS with {self._settings.location}: {error.reason}.") from error
        except (OSError, HTTPException) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            raise Unavailable(f"{self._settings.location} does not answer: {reason}.") from error

    def _connect(self) -> None:
        self._connection.connect()
        with self._lock:
            # The connection forgets it once the answer has begun.
            self._socket = self._connection.sock
            if self._given_up:
                raise Unavailable("The request was given up.")

    def _put(self, method: str, path: str, body: Body | None) -> None:
        connection, key = self._connection, self._settings.api_key
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Accept", "application/json")
        connection.putheader("Connection", "close")
        if key is not None:
            connection.putheader("Authorization", f"Bearer {key}")
        if body is not None:
            connection.putheader("Content-Type", body.content_type)
            connection.putheader("Content-Length", str(body.num_bytes))
        connection.endheaders()
        connection.sock.settimeout(self._settings.send_timeout_s)
        if body is not None:
            self._put_pieces(body.pieces)
        connection.sock.settimeout(self._settings.answer_timeout_s)

    def _put_pieces(self, pieces: Iterator[bytes]) -> None:
        for piece in pieces:
            try:
                self._connection.send(piece)
            except (BrokenPipeError, ConnectionResetError):
                # A server that refuses stops reading: its answer may be there.
                if self._given_up:
                    raise
                return


def _connection(settings: ServerSettings) -> HTTPConnection:
    if not settings.tls:
        return HTTPConnection(settings.host, settings.port, timeout=settings.connect_timeout_s)
    try:
        context = ssl.create_default_context(
            cafile=str(settings.ca_bundle) if settings.ca_bundle else None
        )
    except (OSError, ssl.SSLError):
        raise InvalidInput(
            f"ca_bundle {quoted(str(settings.ca_bundle))} holds no certificates that can be read."
        ) from None
    return HTTPSConnection(
        settings.host, settings.port, timeout=settings.connect_timeout_s, context=context
    )


def _answer(response: HTTPResponse) -> Answer:
    data = response.read(_MAX_ANSWER_BYTES + 1)
    if len(data) > _MAX_ANSWER_BYTES:
        raise Unavailable(f"The server's answer has more than {_MAX_ANSWER_BYTES} bytes.")
    if 200 <= response.status < 300:
        return Answer(response.status, data)
    raise _refusal(response, data)


def _refusal(response: HTTPResponse, data: bytes) -> MuralError:
    message = _message(data)
    if response.status == Unauthorized.status:
        return Unauthorized(message or "The server wants a valid key: see --api-key-file.")
    if not message:
        message = f"The server answered {response.status}, which says no more."
    if 300 <= response.status < 400:
        return InvalidInput("The server sends elsewhere (a redirect): give the address it means.")
    if response.status in (502, 504):
        return Unavailable(message)
    return error_from_status(response.status, message, _seconds(response.getheader("Retry-After")))


def _message(data: bytes) -> str:
    try:
        message = msgspec.json.decode(data, type=_Refusal).error.message
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""
    harmless = message.isprintable() and len(message) <= _MAX_MESSAGE_CHARS
    return message if harmless else quoted(message, _MAX_MESSAGE_CHARS)


def _seconds(text: str | None) -> float | None:
    return float(text) if text and text.isascii() and text.isdecimal() and len(text) < 8 else None
