"""The interface of followers: one implementation for each kind of engine."""

from __future__ import annotations

import ssl as tls
from abc import ABC, abstractmethod
from collections.abc import Callable

from mural_router.fleet.report import Report

__all__ = ["Follower", "Listener", "TlsContext"]

TlsContext = Callable[[], tls.SSLContext | None]
"""What connections are made with now, since certificates are renewed; None: plain."""


class Listener(ABC):
    """Who is told what a follower hears."""

    @abstractmethod
    def heard(self, report: Report) -> None:
        """The replica said how it is now."""

    @abstractmethod
    def alive(self) -> None:
        """The replica said that nothing has changed."""

    @abstractmethod
    def lost(self, error: str, *, refused: bool) -> None:
        """Nothing, or nothing usable, comes from it; ``refused``: nobody listens there."""


class Follower(ABC):
    """Keeps a listener informed of one replica."""

    @abstractmethod
    async def run(self) -> None:
        """Follow until cancelled. Nothing that a replica does ends it."""
