"""Plain events of a stream go on as they came, and nobody is woken for them.

Of a stream's pieces nearly all are whole events that say nothing to a router. The base of a
replica's connection sends them on by itself (cut-through switching): native, so that a piece costs
no Python of ours at all. Where nothing native could be built each piece is taken in.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from mural_router.http.watch import Watch

__all__ = ["Counted", "CutThrough", "plain_socket", "send_now"]


class Counted(Protocol):
    """Whose bytes are counted."""

    bytes_sent: int


class _TakesAllIn:
    """Does without: the same calls, and every piece is taken in."""

    deadline: float

    def take_in(self, data: bytes) -> None:
        """Read a piece that does not go on by itself: the heir's own."""
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        """Send a piece on, or have it taken in."""
        self.take_in(data)

    def cut_through(
        self,
        transport: asyncio.Transport,
        fd: int,
        counted: Counted,
        watch: Watch,
        idle_s: float,
        /,
    ) -> None:
        """From here on pieces that are plain events (`scan.plain_events`) go to ``transport``.

        ``fd`` is its socket, to which bytes are sent at once while nothing waits in the transport:
        it would keep them until all that was received has been looked at; -1: not so, as where
        there is TLS. The piece is counted, and `deadline` becomes ``idle_s`` from then, by
        ``watch``. Any other piece is taken in.
        """

    def take_all_in(self) -> None:
        """Send nothing on any more."""


def _write(transport: asyncio.Transport, fd: int, data: bytes, /) -> None:
    """Send bytes at once while nothing waits in the transport; see `CutThrough.cut_through`."""
    transport.write(data)


def plain_socket(transport: asyncio.Transport) -> int:
    """A transport's socket; -1 where it has none, or what is sent is not what the peer reads."""
    if transport.get_extra_info("ssl_object") is not None:
        return -1
    found = transport.get_extra_info("socket")
    return -1 if found is None else int(found.fileno())


if TYPE_CHECKING:
    CutThrough = _TakesAllIn
    send_now = _write
else:
    try:
        from mural_router.http._scan import CutThrough, send_now
    except ImportError:
        CutThrough, send_now = _TakesAllIn, _write
