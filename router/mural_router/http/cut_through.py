"""Plain events of a stream go on as they came, and nobody is woken for them.

Of a stream's pieces nearly all are whole events that say nothing to a router. The base of a
replica's connection sends them on by itself (cut-through switching): native, so that a piece costs
no Python of ours at all. Where nothing native could be built each piece is taken in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mural_router.http.watch import Watch

__all__ = ["Counted", "CutThrough"]


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
        self, write: Callable[[bytes], object], counted: Counted, watch: Watch, idle_s: float, /
    ) -> None:
        """From here on call ``write`` with each piece that is plain events (`scan.plain_events`).

        It is counted, and `deadline` becomes ``idle_s`` from then, by ``watch``; any other piece is
        taken in.
        """

    def take_all_in(self) -> None:
        """Send nothing on any more."""


if TYPE_CHECKING:
    CutThrough = _TakesAllIn
else:
    try:
        from mural_router.http._scan import CutThrough
    except ImportError:
        CutThrough = _TakesAllIn
