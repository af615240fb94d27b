"""An event loop that skips what would be waited for: an hour takes what is done in it."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.DefaultSelector):
    """Skips what would be waited for: it takes no time."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everything waits for something that nobody does"
        self.skipped += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only by waiting."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.skipped


def in_virtual_time(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
