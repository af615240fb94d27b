"""Server-sent events by hand: one write per stream and step, and an end when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

__all__ = ["DONE", "ClientGone", "EventStream", "unless_disconnected"]

DONE = b"data: [DONE]\n\n"
WRITE_S = 60.0

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and cancel it when the client goes away, raising `ClientGone`."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await _end(watching)
        await _end(working)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Future[Any]) -> None:
    if not task.done():
        task.cancel()
        # The task's own clean-up (an abort in the engine) is waited for; its outcome is nobody's.
        await asyncio.wait((task,))


class EventStream(Response):
    """Writes what an iterator of ready-made event bytes gives.

    The iterator is closed, which aborts its request, when the client leaves or takes nothing for
    ``WRITE_S``. The status is sent before the first event, so take the first update before
    making one of these.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(None, headers={"cache-control": "no-cache", **(headers or {})})
        # Set by Response for a body it knows; this one has no end yet.
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Closed here, since a write that is cancelled before its start closes nothing.
        async with aclosing(self._events):
            try:
                await unless_disconnected(receive, self._write(send))
            except ClientGone:
                return

    async def _write(self, send: Send) -> None:
        start = {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }
        await send(start)
        async for event in self._events:
            try:
                async with asyncio.timeout(WRITE_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            except TimeoutError:
                raise ClientGone from None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
