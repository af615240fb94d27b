"""Does one thing again and again, whenever something may have changed: level-triggered."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Final

from mural_resolvers.backoff import Backoff

__all__ = ["Worker"]

log = logging.getLogger(__name__)

PAUSE_S: Final = 0.1
"""Between two steps: what changes meanwhile is taken together."""
SHARE: Final = 2.0
"""A step that takes long is followed by a pause this many times as long."""
RESYNC_S: Final = 10.0
"""At the latest after it everything is looked at again, whatever was told: deadlines pass too."""


class Worker(ABC):
    """Any number of wakes make one step. For one event loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._dirty = asyncio.Event()
        self._dirty.set()
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Something may have changed."""
        self._dirty.set()

    def wake_at(self, due_s: float) -> None:
        """Something will have, at a time of the loop's clock. Holds until the next step."""
        if self._timer is None or due_s < self._timer.when():
            self._clear_timer()
            self._timer = asyncio.get_running_loop().call_at(due_s, self.wake)

    async def run(self) -> None:
        """Work until cancelled. A step that fails is logged, and tried again later and later."""
        backoff = Backoff(1.0, 30.0)
        now = asyncio.get_running_loop().time
        try:
            while True:
                await self._woken()
                self._dirty.clear()
                self._clear_timer()
                began = now()
                try:
                    await self.step()
                except Exception:
                    log.exception("%s failed", self.name)
                    self._dirty.set()
                    await asyncio.sleep(backoff.next_s())
                else:
                    backoff.reset()
                await asyncio.sleep(max(PAUSE_S, SHARE * (now() - began)))
        finally:
            self._clear_timer()

    @abstractmethod
    async def step(self) -> None:
        """Look at everything, decide, and hand over what follows; waits for nothing long."""

    async def _woken(self) -> None:
        try:
            async with asyncio.timeout(RESYNC_S):
                await self._dirty.wait()
        except TimeoutError:
            return

    def _clear_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
