"""A tenant's requests about its own adapters: bodies of any size are passed on as they come."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.exchange import Exchange
from mural_router.http.upstream import ReplicaConnection, ReplicaPool
from mural_router.proxy.relay import Relay
from mural_router.routing.ask import Routed, Routing

__all__ = ["ForwardRelay"]

_PASSED_ON: Final = frozenset(
    {
        b"accept",
        b"content-encoding",
        b"content-type",
        b"if-match",
        b"if-none-match",
        b"if-range",
        b"range",
    }
)


class ForwardRelay(Relay):
    """Asked again only while nothing of its body was taken from the client."""

    def __init__(self, pool: ReplicaPool, routing: Routing, exchange: Exchange, path: str) -> None:
        self._path = path
        head = exchange.head
        self._has_body = head.chunked or head.length > 0
        super().__init__(pool, routing, exchange)

    def _route(self) -> Callable[[], Awaitable[Routed]]:
        return partial(self._routing.forward, self._ask)

    def _may_ask_again(self) -> bool:
        # What was sent of a body is gone; what changes something may have been done.
        return not self._has_body and self._exchange.head.method == "GET"

    def _send(self, connection: ReplicaConnection, routed: Routed) -> None:
        head = self._exchange.head
        lines = [f"{head.method} {self._target} HTTP/1.1\r\nhost: {routed.endpoint.authority}\r\n"]
        for name, value in head.fields:
            if name in _PASSED_ON:
                lines.append(f"{name.decode('ascii')}: {value.decode('latin-1')}\r\n")
        if head.chunked:
            lines.append("transfer-encoding: chunked\r\n")
        elif head.length or head.method in ("POST", "PUT"):
            lines.append(f"content-length: {head.length}\r\n")
        lines += [f"{name}: {value}\r\n" for name, value in routed.request_headers]
        lines.append("\r\n")
        connection.send(self, ("".join(lines).encode("latin-1"),), complete=not self._has_body)
        if self._has_body:
            self._exchange.take_body(self)

    @property
    def _target(self) -> str:
        query = self._exchange.head.query
        return f"{self._path}?{query}" if query else self._path

    def piece(self, payload: bytes) -> None:
        """A piece of the client's body."""
        if self._connection is not None:
            framed = chunk(payload) if self._exchange.head.chunked else payload
            self._connection.send_more(framed)

    def complete(self) -> None:
        """The client's body was complete."""
        if self._connection is not None:
            if self._exchange.head.chunked:
                self._connection.send_more(LAST_CHUNK)
            self._connection.send_end()
