"""The port that clients see, and the connections that it has."""

from __future__ import annotations

import asyncio
import ssl
from typing import cast

from mural_router.http.client import ClientConnection
from mural_router.http.exchange import Application, Express, Reader
from mural_router.http.settings import HttpSettings
from mural_router.http.watch import Watch

__all__ = ["Server"]


class Server:
    """Listens, and knows its connections."""

    def __init__(
        self,
        settings: HttpSettings,
        application: Application,
        watch: Watch,
        express: Express | None = None,
    ) -> None:
        self.settings = settings
        self.application = application
        self.watch = watch
        self.express = express
        self.loop = asyncio.get_running_loop()
        self.draining = False
        self.buffered_bytes = 0
        self.requests_total = 0
        self.refused_total = 0
        self.in_flight = 0
        """Requests that the application has and that are not answered to the end."""
        self.idle = asyncio.Event()
        """Set while nothing is in flight, and nobody is taking a last answer."""
        self.idle.set()
        self._connections: set[ClientConnection] = set()
        self._taking: set[ClientConnection] = set()
        self._listener: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        return len(self._connections)

    async def listen(self, context: ssl.SSLContext | None) -> tuple[str, int]:
        """Bind; give the address. Raises `OSError`."""
        settings = self.settings
        self._listener = await self.loop.create_server(
            self.connection,
            settings.host,
            settings.port,
            ssl=context,
            ssl_handshake_timeout=settings.tls_handshake_timeout_s if context else None,
            ssl_shutdown_timeout=settings.stall_timeout_s if context else None,
            backlog=1024,
        )
        host, port = self._listener.sockets[0].getsockname()[:2]
        return host, port

    def connection(self) -> asyncio.Protocol:
        """The protocol of a new connection."""
        return cast("asyncio.Protocol", ClientConnection(self))

    def admit(self, connection: ClientConnection) -> bool:
        self._connections.add(connection)
        self.watch.add(connection)
        return len(self._connections) <= self.settings.max_connections

    def forget(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self.watch.discard(connection)
        self.has_taken(connection)

    def begun(self) -> None:
        self.in_flight += 1
        if self.in_flight == 1:
            self.idle.clear()

    def ended(self) -> None:
        self.in_flight -= 1
        self._look_if_idle()

    def is_taking(self, connection: ClientConnection) -> None:
        """Its last answer is complete, and not yet taken whole."""
        self._taking.add(connection)
        self.idle.clear()

    def has_taken(self, connection: ClientConnection) -> None:
        """It has taken all, or is gone."""
        self._taking.discard(connection)
        self._look_if_idle()

    def _look_if_idle(self) -> None:
        if not self.in_flight and not self._taking:
            self.idle.set()

    @property
    def taking(self) -> int:
        """How many are taking a last answer."""
        return len(self._taking)

    def readers(self) -> list[Reader]:
        """Whoever is answering an exchange."""
        return [each.reader for each in self._connections if each.reader is not None]

    def stop_listening(self) -> None:
        """Take no new connection; idle ones end, others after their answer."""
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.end_when_idle()

    def abort(self) -> None:
        """End everything now."""
        self.stop_listening()
        for connection in list(self._connections):
            connection.abort()
