"""One HTTP/1.1 request on a connection of its own, over the standard library's streams.

Every wait and every size is bounded by the caller. What a peer does wrong is an `ExchangeError`.
"""

from __future__ import annotations

import asyncio
import ssl as tls
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

__all__ = ["Exchange", "ExchangeError", "Head", "exchange"]

MAX_HEADERS = 100
MAX_HEAD_LINE_BYTES = 64 << 10
PIECE_BYTES = 64 << 10


class ExchangeError(Exception):
    """No answer, or none that keeps to HTTP. ``refused``: nobody listens there."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Head:
    """Status and headers of an answer; the names are in lower case."""

    status: int
    headers: Mapping[str, str]


class Exchange:
    """An answer whose head has come."""

    def __init__(self, head: Head, reader: asyncio.StreamReader) -> None:
        self.head = head
        self._reader = reader

    async def body(self, max_bytes: int) -> bytes:
        """The whole body; the caller bounds the time. Raises ValueError over ``max_bytes``."""
        pieces: list[bytes] = []
        size = 0
        async for piece in self._pieces(max_bytes):
            size += len(piece)
            if size > max_bytes:
                raise ValueError(f"the body is over {max_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    async def beginning(self, max_bytes: int) -> bytes:
        """The body's first ``max_bytes`` at most; the rest is not read."""
        pieces: list[bytes] = []
        left = max_bytes
        async with aclosing(self._pieces(None)) as body:
            while left > 0 and (piece := await anext(body, None)) is not None:
                pieces.append(piece[:left])
                left -= len(piece)
        return b"".join(pieces)

    async def lines(self, max_bytes: int, idle_timeout_s: float) -> AsyncGenerator[bytes, None]:
        """The body's lines as they come, without their ends.

        Raises TimeoutError after a silence, ValueError for a line over ``max_bytes``.
        """
        pieces = self._pieces(None)
        rest = bytearray()
        try:
            while True:
                async with asyncio.timeout(idle_timeout_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                # Only what is new is searched, so that a long line costs its length once.
                if b"\n" not in piece:
                    rest += piece
                else:
                    first, *others = piece.split(b"\n")
                    last = others.pop()
                    yield bytes(rest + first).rstrip(b"\r")
                    for line in others:
                        yield line.rstrip(b"\r")
                    rest = bytearray(last)
                if len(rest) > max_bytes:
                    raise ValueError(f"a line is over {max_bytes} bytes")
        finally:
            await pieces.aclose()

    async def _pieces(self, max_bytes: int | None) -> AsyncGenerator[bytes, None]:
        """The body as it comes, whatever its framing."""
        reader, headers = self._reader, self.head.headers
        if "chunked" in headers.get("transfer-encoding", ""):
            while (left := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)) > 0:
                async for piece in self._exactly(left):
                    yield piece
                await reader.readexactly(2)
        elif "content-length" in headers:
            size = int(headers["content-length"])
            if max_bytes is not None and size > max_bytes:
                raise ValueError(f"the body is over {max_bytes} bytes")
            async for piece in self._exactly(size):
                yield piece
        else:
            while piece := await reader.read(PIECE_BYTES):
                yield piece

    async def _exactly(self, size: int) -> AsyncIterator[bytes]:
        """``size`` bytes in pieces: no peer makes this process hold what it only announced."""
        while size > 0:
            piece = await self._reader.read(min(size, PIECE_BYTES))
            if not piece:
                raise EOFError(f"the connection ended {size} bytes too early")
            size -= len(piece)
            yield piece


@asynccontextmanager
async def exchange(
    host: str,
    port: int,
    method: str,
    path: str,
    *,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    ssl: tls.SSLContext | None = None,
    server_name: str | None = None,
    connect_timeout_s: float,
    answer_timeout_s: float,
) -> AsyncIterator[Exchange]:
    """Send a request and wait for the answer's head; the connection ends with the context.

    ``server_name`` is what the peer's certificate must be for, where it is not for ``host``.
    Raises `ExchangeError`, also for what goes wrong while the caller reads the body.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(connect_timeout_s):
            reader, writer = await asyncio.open_connection(
                host,
                port,
                ssl=ssl,
                server_hostname=None if ssl is None else server_name or host,
                limit=MAX_HEAD_LINE_BYTES,
            )
        writer.write(_request_head(host, port, method, path, len(body), headers or {}) + body)
        async with asyncio.timeout(answer_timeout_s):
            await writer.drain()
            head = await _read_head(reader)
        yield Exchange(head, reader)
    except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
        # TimeoutError is an OSError; ValueError: over a limit, or a number that is none.
        raise ExchangeError(
            f"{host}:{port}: {str(error) or 'no answer in time'}",
            refused=isinstance(error, ConnectionRefusedError),
        ) from None
    finally:
        if writer is not None:
            writer.close()


def _request_head(
    host: str, port: int, method: str, path: str, size: int, headers: Mapping[str, str]
) -> bytes:
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: [{host}]:{port}" if ":" in host else f"Host: {host}:{port}",
        "Connection: close",
        f"Content-Length: {size}",
        *(f"{name}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_head(reader: asyncio.StreamReader) -> Head:
    _, _, status = (await reader.readuntil(b"\r\n")).partition(b" ")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        line = await reader.readuntil(b"\r\n")
        if line == b"\r\n":
            return Head(int(status[:3]), headers)
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    raise ValueError("too many headers")
