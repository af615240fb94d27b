"""The operator's own port: ``/health``, ``/ready`` and ``/metrics``, each a few lines of HTTP.

A probe and a scrape every few seconds ask for no framework: each connection takes one request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST

__all__ = ["AdminPages", "serve_admin"]

TIMEOUT_S: Final = 5.0
"""For a request's head, and again for its answer."""
MAX_HEAD_BYTES: Final = 16 * 1024
MAX_CONNECTIONS: Final = 32
"""At a time; who comes over it is answered 503, so that a flood cannot fill the memory."""
TEXT: Final = "text/plain; charset=utf-8"

log = logging.getLogger(__name__)


class _Answer(NamedTuple):
    status: str
    body: bytes
    media: str = TEXT


class AdminPages(NamedTuple):
    """What the pages say. ``trouble`` is why it is not alive, ``not_ready`` why not ready.

    None is well. Leader and follower are both ready as soon as what they watch is in hand.
    """

    trouble: Callable[[], str | None]
    not_ready: Callable[[], str | None]
    metrics: Callable[[], bytes]


@asynccontextmanager
async def serve_admin(pages: AdminPages, host: str, port: int) -> AsyncIterator[int]:
    """Serve the pages while the block runs; gives the port (asked for 0: any that is free).

    Raises OSError when the address is taken.
    """
    connections: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        crowded = len(connections) >= MAX_CONNECTIONS
        task = asyncio.create_task(_serve(pages, reader, writer, crowded=crowded))
        connections.add(task)
        task.add_done_callback(connections.discard)

    server = await asyncio.start_server(connected, host, port, limit=MAX_HEAD_BYTES)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _serve(
    pages: AdminPages,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    crowded: bool,
) -> None:
    """One request and its answer."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            head = b"" if crowded else await reader.readuntil(b"\r\n\r\n")
        answer = _Answer("503 Service Unavailable", b"busy\n") if crowded else _answer(pages, head)
        async with asyncio.timeout(TIMEOUT_S):
            writer.write(_encoded(answer))
            await writer.drain()
    except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        # Whoever asked has gone, or speaks something else.
        log.debug("a request on the admin port was given up: %r", error)
    finally:
        writer.close()


def _answer(pages: AdminPages, head: bytes) -> _Answer:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    if method != b"GET":
        return _Answer("405 Method Not Allowed", b"only GET\n")
    if path == b"/metrics":
        return _Answer("200 OK", pages.metrics(), CONTENT_TYPE_LATEST)
    if path in (b"/health", b"/ready"):
        trouble = pages.trouble() if path == b"/health" else pages.not_ready()
        if trouble is None:
            return _Answer("200 OK", b"ok\n")
        return _Answer("503 Service Unavailable", f"{trouble}\n".encode())
    return _Answer("404 Not Found", b"/health, /ready or /metrics\n")


def _encoded(answer: _Answer) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status}\r\ncontent-type: {answer.media}\r\n"
        f"content-length: {len(answer.body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + answer.body
