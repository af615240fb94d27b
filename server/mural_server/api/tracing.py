"""A span for each request that generates, under the router's where there is one."""

from __future__ import annotations

from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mural_resolvers.tracing import Tracing

__all__ = ["TracingMiddleware"]

PATHS: Final = frozenset({"/v1/completions", "/v1/chat/completions"})
HEADERS: Final = frozenset({b"traceparent", b"tracestate"})


class TracingMiddleware:
    """Begins a span when a request has arrived and ends it with the answer's last byte."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, watched where it generates."""
        if scope["type"] != "http" or scope["path"] not in PATHS:
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in scope["headers"]
            if name in HEADERS
        }
        trace = self._tracing.start(f"{scope['method']} {scope['path']}", headers)
        status, began, error = 0, False, None

        async def watched(message: Message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not began:
                began = True
                trace.event("first byte")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            trace.end(status=status, error=error)
