"""uvicorn's HTTP protocol, with an OpenAI body also for what is no HTTP at all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mural_server.api.errors import BadParameter, error_bytes

__all__ = ["PEER_NAMES", "OpenAIHttpProtocol", "names_in"]

PEER_NAMES = "mural.peer_names"
"""Key of a request's state: the names in the client's certificate, which TLS has verified."""


class OpenAIHttpProtocol(HttpToolsProtocol):
    """Answers a malformed request line or header as every other mistake is answered.

    Says in each request's state which names the client's certificate proves.
    """

    _peer_names: frozenset[str] = frozenset()

    def connection_made(  # type: ignore[override]  # uvicorn narrows it
        self, transport: asyncio.Transport
    ) -> None:
        """Read the certificate once: the handshake is over."""
        super().connection_made(transport)
        session = transport.get_extra_info("ssl_object")
        if session is not None:
            self._peer_names = names_in(session.getpeercert() or {})

    def on_message_begin(self) -> None:
        """Begin a request's scope."""
        super().on_message_begin()
        self.scope["state"][PEER_NAMES] = self._peer_names

    def send_400_response(self, msg: str) -> None:
        """Write the error and close, since where the next request begins is unknown."""
        body = error_bytes(BadParameter(msg))
        head = (
            "HTTP/1.1 400 Bad Request\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()


def names_in(certificate: Mapping[str, object]) -> frozenset[str]:
    """DNS names and URIs for which a certificate is, as `ssl.SSLSocket.getpeercert` gives it."""
    found = certificate.get("subjectAltName", ())
    assert isinstance(found, tuple)
    return frozenset(value for kind, value in found if kind in ("DNS", "URI"))
