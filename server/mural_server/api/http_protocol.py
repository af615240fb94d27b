"""uvicorn's HTTP protocol, with an OpenAI body also for what is no HTTP at all."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from mural_server.api.errors import BadParameter, error_bytes

__all__ = ["OpenAIHttpProtocol"]


class OpenAIHttpProtocol(HttpToolsProtocol):
    """Answers a malformed request line or header as every other mistake is answered."""

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
