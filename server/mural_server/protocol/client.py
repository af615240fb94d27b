"""An asynchronous client of the control API over the standard library's streams.

HTTP/1.1, one connection a call, every wait bounded. TLS where an ``SSLContext`` is given.
"""

from __future__ import annotations

import asyncio
import ssl as tls
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, TypeVar
from urllib.parse import quote

import msgspec

from mural_server.protocol.wire import (
    AdapterStatus,
    DeclaredAnswer,
    DeclaredRequest,
    DrainAnswer,
    FreedAnswer,
    ResidentRequest,
    Snapshot,
    StateEvent,
    StateGap,
    apply,
)

__all__ = ["ControlClient", "ControlError"]

MAX_LINE_BYTES = 64 << 20
MAX_BODY_BYTES = 64 << 20
MAX_HEADERS = 100

T = TypeVar("T")


class ControlError(Exception):
    """The server refused or could not be understood; ``status`` is 0 when it did not answer."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


class _Head(msgspec.Struct):
    status: int
    headers: dict[str, str]


class ControlClient:
    """Speaks with one server. Every call raises `ControlError`.

    ``timeout_s`` bounds each short call. ``idle_timeout_s`` bounds the silence of the state
    stream, whose heartbeats come more often. Unloading drains, so `remove` has a longer bound.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        ssl: tls.SSLContext | None = None,
        timeout_s: float = 10.0,
        load_timeout_s: float = 120.0,
        idle_timeout_s: float = 15.0,
    ) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._ssl = ssl
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._idle_timeout_s = idle_timeout_s

    async def healthy(self) -> bool:
        """Whether the server and its core live."""
        return await self._ok("/health")

    async def ready(self) -> bool:
        """Whether it accepts requests and has its declared adapters."""
        return await self._ok("/ready")

    async def set_resident(
        self,
        name: str,
        *,
        digest: str | None = None,
        level: Literal["host", "slot"] = "host",
        pinned: bool = False,
    ) -> AdapterStatus:
        """Have an adapter loaded; idempotent. 409: other content; 422: unusable."""
        body = ResidentRequest(name=name, digest=digest, level=level, pinned=pinned)
        return await self._call(
            "PUT", "/mural/v1/resident", body, AdapterStatus, self._load_timeout_s
        )

    async def remove(self, name: str) -> FreedAnswer:
        """Drain and unload a name; idempotent."""
        path = f"/mural/v1/resident/{quote(name, safe='')}"
        return await self._call("DELETE", path, None, FreedAnswer, self._load_timeout_s)

    async def declare(self, names: tuple[str, ...]) -> DeclaredAnswer:
        """Say what must be resident before the server is ready."""
        return await self._call(
            "PUT",
            "/mural/v1/declared",
            DeclaredRequest(names=names),
            DeclaredAnswer,
            self._timeout_s,
        )

    async def drain(self) -> DrainAnswer:
        """Have the server take no new requests."""
        return await self._call("POST", "/mural/v1/drain", None, DrainAnswer, self._timeout_s)

    async def events(self, since: int | None = None) -> AsyncGenerator[StateEvent, None]:
        """The state stream, from ``since`` where the server still has it, else from a snapshot.

        Ends with `ControlError` when the connection does, or falls silent.
        """
        query = "" if since is None else f"?since={since}"
        decoder = msgspec.json.Decoder(StateEvent)
        async with self._request("GET", f"/mural/v1/state{query}", b"") as (head, reader):
            if head.status != 200:
                raise await self._refusal(head, reader)
            async for line in _lines(reader, head, self._idle_timeout_s):
                if line.startswith(b"data: "):
                    try:
                        event: StateEvent = decoder.decode(line[6:])
                    except msgspec.MsgspecError as error:
                        raise ControlError(f"an event that is none: {error}") from None
                    yield event
            raise ControlError("the server ended the stream")

    async def states(self) -> AsyncGenerator[Snapshot, None]:
        """The state after every event; a gap asks for a snapshot. Ends as `events` does."""
        state: Snapshot | None = None
        while True:
            events = self.events(None if state is None else state.seq)
            try:
                async for event in events:
                    state = apply(state, event)
                    yield state
            except StateGap:
                state = None
            finally:
                await events.aclose()

    async def _ok(self, path: str) -> bool:
        async with self._request("GET", path, b"") as (head, _):
            return head.status == 200

    async def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        answer: type[T],
        timeout_s: float,
    ) -> T:
        sent = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._request(method, path, sent) as (head, reader):
                    if head.status != 200:
                        raise await self._refusal(head, reader)
                    received = await _body(reader, head)
        except TimeoutError:
            raise ControlError(f"no answer within {timeout_s:g} s") from None
        try:
            return msgspec.json.decode(received, type=answer)
        except msgspec.MsgspecError as error:
            raise ControlError(f"an answer that is none: {error}") from None

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: bytes
    ) -> AsyncIterator[tuple[_Head, asyncio.StreamReader]]:
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                reader, writer = await asyncio.open_connection(
                    self._host, self._port, ssl=self._ssl, limit=MAX_LINE_BYTES
                )
            writer.write(self._head(method, path, body) + body)
            # A load or an unload answers only when it is done: the caller's bound is the longer.
            async with asyncio.timeout(self._load_timeout_s):
                await writer.drain()
                head = await _head(reader)
            yield head, reader
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            # TimeoutError is an OSError; ValueError: a body over the limit, a header that is none.
            raise ControlError(f"{self._host}:{self._port}: {error or 'no answer'}") from None
        finally:
            if writer is not None:
                writer.close()

    def _head(self, method: str, path: str, body: bytes) -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._host}:{self._port}",
            "Connection: close",
            f"Content-Length: {len(body)}",
            "Content-Type: application/json",
        ]
        if self._token is not None:
            lines.append(f"Authorization: Bearer {self._token}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    async def _refusal(self, head: _Head, reader: asyncio.StreamReader) -> ControlError:
        async with asyncio.timeout(self._timeout_s):
            body = await _body(reader, head)
        try:
            message = msgspec.json.decode(body, type=_ErrorBody).error.message
        except msgspec.MsgspecError:
            message = f"status {head.status}"
        retry = head.headers.get("retry-after", "")
        return ControlError(message, head.status, float(retry) if retry.isdecimal() else None)


async def _head(reader: asyncio.StreamReader) -> _Head:
    _, _, status = (await reader.readuntil(b"\r\n")).partition(b" ")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = await reader.readuntil(b"\r\n")
        if line == b"\r\n":
            return _Head(int(status[:3]), headers)
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ValueError("too many headers")


async def _pieces(reader: asyncio.StreamReader, head: _Head) -> AsyncIterator[bytes]:
    """The body as it comes, whatever its framing."""
    if "chunked" in head.headers.get("transfer-encoding", ""):
        while (size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)) > 0:
            if size > MAX_BODY_BYTES:
                raise ValueError("a chunk is too large")
            yield await reader.readexactly(size)
            await reader.readexactly(2)
    elif "content-length" in head.headers:
        size = int(head.headers["content-length"])
        if size > MAX_BODY_BYTES:
            raise ValueError("the body is too large")
        yield await reader.readexactly(size)
    else:
        while piece := await reader.read(1 << 16):
            yield piece


async def _body(reader: asyncio.StreamReader, head: _Head) -> bytes:
    pieces = []
    size = 0
    async for piece in _pieces(reader, head):
        size += len(piece)
        if size > MAX_BODY_BYTES:
            raise ValueError("the body is too large")
        pieces.append(piece)
    return b"".join(pieces)


async def _lines(
    reader: asyncio.StreamReader, head: _Head, idle_timeout_s: float
) -> AsyncIterator[bytes]:
    pieces = aiter(_pieces(reader, head))
    rest = b""
    while True:
        async with asyncio.timeout(idle_timeout_s):
            piece = await anext(pieces, None)
        if piece is None:
            return
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise ValueError("a line is too long")
        for line in lines:
            yield line.rstrip(b"\r")
