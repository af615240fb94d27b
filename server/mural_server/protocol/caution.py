"""What keeps a reader of the state stream sane: a server may flood, and may lie."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Callable
from typing import Final

from mural_resolvers.redaction import redacted

__all__ = [
    "BURST",
    "MAX_ADAPTERS",
    "MAX_COUNT",
    "MAX_NAME_CHARS",
    "MAX_READ_BYTES",
    "EventBudget",
    "count",
    "is_name",
    "rate",
    "ratio",
    "sha256",
    "word",
]

MAX_ADAPTERS: Final = 20_000
"""Names kept of one server; about 10 MB."""
MAX_READ_BYTES: Final = 8 << 20
"""Of one event; a snapshot takes about 250 bytes a name."""
MAX_COUNT: Final = 1 << 50
MAX_NAME_CHARS: Final = 256
"""``tenant/adapter:version`` at its longest."""
MAX_WORD_CHARS: Final = 128
MAX_RATE: Final = 1e9
EVENTS_PER_S: Final = 20.0
"""What is read of one server; it sends at most four. The rest waits in its own buffers."""
BURST: Final = 40.0
BYTES_PER_EVENT: Final = 64 << 10
"""So many bytes in one event cost its server as much as another event."""


_SHA256: Final = re.compile("[0-9a-f]{64}")


class EventBudget:
    """Events that may be read: ``EVENTS_PER_S``, a ``BURST`` of them at once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = BURST
        self._at = clock()

    async def spend(self, num_bytes: int) -> None:
        """Pay for an event that was read; wait until it is covered."""
        now = self._clock()
        self._left = min(BURST, self._left + (now - self._at) * EVENTS_PER_S)
        self._at = now
        self._left -= 1.0 + num_bytes / BYTES_PER_EVENT
        if self._left < 0:
            await asyncio.sleep(-self._left / EVENTS_PER_S)


def count(value: int) -> int:
    """Within what sums and products stay sane."""
    return min(max(value, 0), MAX_COUNT)


def rate(value: float) -> float:
    """A rate that is finite and not negative."""
    return min(max(value, 0.0), MAX_RATE) if math.isfinite(value) else 0.0


def ratio(value: float) -> float:
    """Between 0 and 1."""
    return min(max(value, 0.0), 1.0) if math.isfinite(value) else 0.0


def sha256(text: str) -> str:
    """A digest as servers say it, or nothing: no content goes by another name."""
    return text if _SHA256.fullmatch(text) else ""


def word(text: str) -> str:
    """Of one line that can be shown, without a key in it, and of bounded length."""
    # In this order: what is left out may stand within a key, and the cut may leave half of one.
    shown = "".join(each for each in text[:1024] if each.isprintable())
    return redacted(shown)[:MAX_WORD_CHARS]


def is_name(text: str) -> bool:
    """Whether it may be the name of an adapter, in any of the forms that servers tell."""
    return len(text) <= MAX_NAME_CHARS and text.isprintable()
