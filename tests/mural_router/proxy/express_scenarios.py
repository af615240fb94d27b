"""Scenarios that are played with and without the express way, and seen alike.

Each is played twice over real sockets, on a stage of its own, and all that a client, a replica and
the router's own books see is compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from tests.mural_router.proxy.express_stage import Here, Setting

Play = Callable[[Here], Awaitable[None]]


@dataclass(frozen=True)
class Scenario:
    play: Play
    used: list[str]
    """What becomes of its requests on the express way, of those that are taken there."""
    setting: Setting

    async def is_seen_alike(self, authorities: str) -> None:
        (fast, ways), (slow, none) = await asyncio.gather(
            self._played(authorities, express=True), self._played(authorities, express=False)
        )
        assert none == []
        assert fast == slow
        assert ways == self.used

    async def _played(self, authorities: str, *, express: bool) -> tuple[object, list[str]]:
        here = Here(self.setting, authorities, express=express)
        await here.begin()
        await self.play(here)
        return await here.end(), here.used


class Scenarios:
    """Those of one file: ``@scenario("whole")`` keeps one, ``@scenario.each`` tests all."""

    def __init__(self) -> None:
        self._kept: list[Scenario] = []

    def __call__(self, *used: str, **setting: object) -> Callable[[Play], Play]:
        def keep(play: Play) -> Play:
            self._kept.append(Scenario(play, list(used), Setting(**setting)))  # type: ignore[arg-type] # fields by name
            return play

        return keep

    @property
    def each(self) -> pytest.MarkDecorator:
        names = [one.play.__name__ for one in self._kept]
        return pytest.mark.parametrize("played", self._kept, ids=names)
