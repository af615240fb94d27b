"""Writes statuses beside the workers: of an object the last verdict, not too often, some at a time.

What an object's replicas do may change twenty times in a second; who reads its status wants the
outcome.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from mural_operator.troubles import Troubles
from mural_resolvers.kubernetes.client import KubeError

__all__ = ["Statuses"]

log = logging.getLogger(__name__)

PARALLEL: Final = 4
SPACING_S: Final = 0.5
"""Between two writes of one object's status."""
RETRY_S: Final = 5.0

Write = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class _Told:
    """Of one object."""

    verdict: object
    version: str
    write: Write | None
    """None: written."""
    queued: bool = False
    resting: bool = False


class Statuses:
    """For one event loop, during one term; nothing is written once ``may_act`` says no."""

    def __init__(self, may_act: Callable[[], bool], troubles: Troubles) -> None:
        self._may_act = may_act
        self._troubles = troubles
        self._told: dict[str, _Told] = {}
        self._queue: asyncio.Queue[str] = asyncio.Queue()

    def put(self, key: str, version: str, verdict: object, write: Write) -> None:
        """Have a verdict written on an object at a version, unless that was done already.

        ``write`` compares with what the API server has, so that nothing is written for nothing.
        """
        told = self._told.get(key)
        if told is None:
            told = self._told[key] = _Told(verdict, version, write)
        elif told.verdict == verdict and told.version == version:
            return
        else:
            told.verdict, told.version, told.write = verdict, version, write
        self._enqueue(key, told)

    def forget(self, key: str) -> None:
        """The object is gone, or someone else's."""
        self._told.pop(key, None)
        self._troubles.over(_kind(key), key)

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            told = self._told.get(key)
            if told is None or told.write is None:
                continue
            told.queued, told.resting = False, True
            rest_s = SPACING_S
            if self._may_act():
                rest_s = await self._write(key, told, told.write)
            # Else later: a renewal that comes late goes on with the same term.
            asyncio.get_running_loop().call_later(rest_s, self._rested, key, told)

    async def _write(self, key: str, told: _Told, write: Write) -> float:
        """How long to leave it alone then."""
        told.write = None
        try:
            await write()
        except KubeError as error:
            self._troubles.note(log, _kind(key), key, error)
        except Exception:
            log.exception("the status of %s cannot be written", key)
        else:
            self._troubles.over(_kind(key), key)
            return SPACING_S
        told.write = told.write or write
        return RETRY_S

    def _rested(self, key: str, told: _Told) -> None:
        told.resting = False
        if told.write is not None and self._told.get(key) is told:
            self._enqueue(key, told)

    def _enqueue(self, key: str, told: _Told) -> None:
        if not told.queued and not told.resting:
            told.queued = True
            self._queue.put_nowait(key)


def _kind(key: str) -> str:
    return f"the status of the {key.partition(' ')[0]}s"
