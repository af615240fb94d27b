"""Writes statuses beside the workers: of an object the last verdict, not too often, some at a time.

What an object's replicas do may change twenty times in a second; who reads its status wants the
outcome.
"""

from __future__ import annotations

import asyncio
import logging
import random
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
RETRY_FIRST_S: Final = 1.0
RETRY_MOST_S: Final = 30.0
"""Of an object's status that is refused, and of all while the API server is in trouble: twice as
long each time."""
TROUBLE: Final = frozenset({0, 429, 500, 502, 503, 504})
"""Answers that are not about the object: all others would get the same."""

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
    refusals: int = 0
    """In a row."""


class Statuses:
    """For one event loop, during one term; nothing is written once ``may_act`` says no."""

    def __init__(self, may_act: Callable[[], bool], troubles: Troubles) -> None:
        self._may_act = may_act
        self._said = troubles
        self._told: dict[str, _Told] = {}
        self._queue: asyncio.Queue[str] = asyncio.Queue()
        self._troubles = 0
        """In a row."""
        self._paused_until_s = 0.0
        """By the loop's clock."""

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
        self._said.forget(_kind(key), key)

    async def run(self) -> None:
        """Write until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(PARALLEL):
                group.create_task(self._work())

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            key = await self._queue.get()
            if (pause_s := self._paused_until_s - loop.time()) > 0:
                await asyncio.sleep(pause_s)
            told = self._told.get(key)
            if told is None or told.write is None:
                continue
            told.queued, told.resting = False, True
            rest_s = SPACING_S
            if self._may_act():
                rest_s = await self._write(key, told, told.write)
            # Else later: a renewal that comes late goes on with the same term.
            loop.call_later(rest_s, self._rested, key, told)

    async def _write(self, key: str, told: _Told, write: Write) -> float:
        """How long to leave it alone then."""
        told.write = None
        try:
            await write()
        except KubeError as error:
            rest_s = self._refused(key, told, error)
        except Exception:
            log.exception("the status of %s cannot be written", key)
            told.refusals += 1
            rest_s = _retry_s(told.refusals)
        else:
            self._well()
            told.refusals = 0
            self._said.over(_kind(key), key)
            return SPACING_S
        told.write = told.write or write
        return rest_s

    def _refused(self, key: str, told: _Told, error: KubeError) -> float:
        """How long to leave the object alone; the others may have to wait, too."""
        asked_for_s = min(error.retry_after_s or 0.0, RETRY_MOST_S)
        told.refusals += 1
        self._said.note(log, _kind(key), key, error)
        now = asyncio.get_running_loop().time()
        if error.status not in TROUBLE:
            self._well()
        elif now >= self._paused_until_s:
            self._troubles += 1
            self._paused_until_s = now + max(_retry_s(self._troubles), asked_for_s)
        # Else it was under way when the pause began, and tells nothing new.
        return max(_retry_s(told.refusals), asked_for_s)

    def _well(self) -> None:
        """The API server answers."""
        self._troubles, self._paused_until_s = 0, 0.0

    def _rested(self, key: str, told: _Told) -> None:
        told.resting = False
        if told.write is not None and self._told.get(key) is told:
            self._enqueue(key, told)

    def _enqueue(self, key: str, told: _Told) -> None:
        if not told.queued and not told.resting:
            told.queued = True
            self._queue.put_nowait(key)


def _retry_s(refusals: int) -> float:
    most_s = min(RETRY_FIRST_S * 2.0 ** min(refusals - 1, 16), RETRY_MOST_S)
    return most_s * (0.75 + random.random() / 4)


def _kind(key: str) -> str:
    """Keys begin with the kind: "adapter mural/a"."""
    return f"the status of objects of the kind {key.partition(' ')[0]}"
