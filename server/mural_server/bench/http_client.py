"""A streaming client that costs little: it shares the machine with what it measures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from mural_server.bench.setup import BenchError
from mural_server.bench.timing import RequestTimes

__all__ = ["StreamingClient"]

LINE_LIMIT_BYTES = 1 << 20
DATA, DONE = b"data: ", b"[DONE]"


class Head(NamedTuple):
    """A response's status and the headers that say how long its body is."""

    status: int
    length: int | None
    """None: chunked."""


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Event(msgspec.Struct):
    """What is read of a streamed chunk."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: msgspec.Raw | None = None


class StreamingClient:
    """One kept-alive connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.json.Decoder(_Event)

    @classmethod
    async def connect(cls, host: str, port: int) -> StreamingClient:
        """Raise ``OSError`` when nobody listens."""
        return cls(*await asyncio.open_connection(host, port, limit=LINE_LIMIT_BYTES))

    async def get(self, path: str) -> bytes:
        """The body of a GET; raise `BenchError` when its status is not 200."""
        self._writer.write(f"GET {path} HTTP/1.1\r\nHost: bench\r\n\r\n".encode())
        head = await self._head()
        body = b"".join([chunk async for chunk in self._body(head)])
        _check_status(head, body)
        return body

    async def complete(self, body: bytes) -> RequestTimes:
        """Stream one completion, whose body asks for ``stream`` and its usage.

        Raises `BenchError` for an error, before or inside the stream, and for a stream cut short.
        """
        self._writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        times = RequestTimes(time.perf_counter(), [], 0)
        head = await self._head()
        if head.status != 200:
            _check_status(head, b"".join([chunk async for chunk in self._body(head)]))
        rest, done = b"", False
        async for chunk in self._body(head):
            now = time.perf_counter()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                done = self._take(line.rstrip(b"\r"), now, times) or done
        if not done or not times.arrivals:
            raise BenchError("A stream ended before its answer did.")
        return times

    def _take(self, line: bytes, now: float, times: RequestTimes) -> bool:
        """Note a line of the stream; True for the last one."""
        if not line.startswith(DATA):
            return False
        payload = line[len(DATA) :]
        if payload == DONE:
            return True
        event = self._decoder.decode(payload)
        if event.error is not None:
            raise BenchError(f"The stream brought an error: {bytes(event.error)[:500]!r}")
        if event.choices:
            times.arrivals.append(now)
        if event.usage is not None:
            times.output_tokens = event.usage.completion_tokens
        return False

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()

    async def _head(self) -> Head:
        status_line = await self._line()
        length: int | None = 0
        while line := await self._line():
            name, _, value = line.lower().partition(b":")
            if name == b"content-length":
                length = int(value)
            elif name == b"transfer-encoding" and b"chunked" in value:
                length = None
        return Head(int(status_line.split()[1]), length)

    async def _line(self) -> bytes:
        line = await self._reader.readline()
        if not line:
            raise BenchError("The server closed a connection.")
        return line.rstrip(b"\r\n")

    async def _body(self, head: Head) -> AsyncIterator[bytes]:
        if head.length is not None:
            yield await self._reader.readexactly(head.length)
            return
        while size := int(await self._line(), 16):
            yield (await self._reader.readexactly(size + 2))[:size]
        await self._line()


def _check_status(head: Head, body: bytes) -> None:
    if head.status != 200:
        raise BenchError(
            f"The server answered {head.status}: {body[:500].decode(errors='replace')}"
        )
