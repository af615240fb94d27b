"""What the owner of a proxy holds: `proxy.start` gives one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

__all__ = ["Proxy", "ProxyState"]


@dataclass(frozen=True, slots=True)
class ProxyState:
    """Counts for metrics and the debug page."""

    connections: int
    """Of clients, open now."""
    requests: int
    """Not answered to the end yet."""
    buffered_bytes: int
    replica_connections_opened: int
    """Since the start: far fewer than requests while connections are kept."""
    idle_replica_connections: int
    requests_total: int
    refused_total: int
    """Requests that were no proper HTTP, too large or too slow, answered without routing."""


class Proxy(ABC):
    """A listening proxy.

    Made by ``await proxy.start(settings: HttpSettings, routing: Routing, *, version: str)``,
    which raises `OSError` when it cannot listen and `ValueError` when a certificate cannot be
    read. It needs a running event loop (uvloop, for speed) and starts no thread.
    """

    host: str
    port: int
    """The one that was bound."""

    @abstractmethod
    async def drain(self, grace_s: float) -> int:
        """Stop listening, end idle connections, and let what is in flight finish.

        Answers meanwhile say ``connection: close``. What still runs after ``grace_s`` is ended
        like an answer of a replica that broke off: streams with an error event. Gives how many,
        with those whose answers are complete and have not been taken whole by then.
        """

    @abstractmethod
    async def close(self) -> None:
        """End everything at once. Idempotent; after `drain` as well."""

    @abstractmethod
    def state(self) -> ProxyState:
        """Counts as of now."""

    @abstractmethod
    def reload_certificates(self) -> None:
        """Read the files of TLS anew, for new connections. Raises `ValueError`, and keeps the
        old ones, when they cannot be read."""
