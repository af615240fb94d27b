"""A replica that plays scripts, over real sockets."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from mural_router.fleet.endpoint import Endpoint, Engine

BOUND_S = 20.0
"""No wait of a test is longer."""


@dataclass
class Received:
    """A request as a replica got it, and the connection to answer on."""

    head: bytes
    body: bytes
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def raw(self) -> bytes:
        return self.head + self.body

    @property
    def fields(self) -> dict[str, str]:
        lines = self.head.decode("latin-1").split("\r\n")[1:-2]
        return {name: value for name, _, value in (line.partition(": ") for line in lines)}

    async def send(self, *pieces: bytes) -> None:
        """Each piece in a write of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            # The other end reads each by itself: both are in this loop.
            for _ in range(3):
                await asyncio.sleep(0)

    async def until_closed(self) -> None:
        async with asyncio.timeout(BOUND_S):
            while await self.reader.read(65536):
                pass


Script = Callable[[Received], Awaitable[None]]


def says(*pieces: bytes) -> Script:
    async def script(received: Received) -> None:
        await received.send(*pieces)

    return script


async def lose(received: Received) -> None:
    received.writer.transport.abort()


async def silence(received: Received) -> None:
    await received.until_closed()


class ScriptedReplica:
    """Plays ``next`` one after another, then ``usual``; keeps what it was asked."""

    def __init__(self, usual: Script) -> None:
        self.usual = usual
        self.next: list[Script] = []
        self.leave_bodies = False
        """For the script to read."""
        self.connections = 0
        self.requests: list[Received] = []
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(
        self, name: str, engine: Engine = "mural", context: ssl.SSLContext | None = None
    ) -> Endpoint:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context)
        port = self._server.sockets[0].getsockname()[1]
        return Endpoint(name, "127.0.0.1", port, engine=engine, tls=context is not None)

    def stop_listening(self) -> None:
        """Connections that are there stay."""
        self._server.close()

    def drop(self) -> None:
        """Close all connections."""
        for writer in list(self._writers):
            writer.transport.abort()

    def close(self) -> None:
        self.stop_listening()
        self.drop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                received = Received(await reader.readuntil(b"\r\n\r\n"), b"", reader, writer)
                length = int(received.fields.get("content-length", "0"))
                if length and not self.leave_bodies:
                    received.body = await reader.readexactly(length)
                self.requests.append(received)
                await (self.next.pop(0) if self.next else self.usual)(received)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
