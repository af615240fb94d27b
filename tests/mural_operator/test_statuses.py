"""Of each object the last verdict is written, once, and what fails is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from mural_operator import statuses as module
from mural_operator.statuses import PARALLEL, Statuses
from mural_operator.troubles import Troubles
from mural_resolvers.kubernetes.client import KubeError

WAIT_S = 20


class Written:
    """Running statuses, and what they wrote."""

    def __init__(self) -> None:
        self.may_act = True
        self.statuses = Statuses(lambda: self.may_act, Troubles())
        self.writes: list[tuple[str, object]] = []
        self.failures: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.under_way = 0
        self.most = 0
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self.statuses.run())

    def put(self, key: str, verdict: object, version: str = "1") -> None:
        async def write() -> None:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await self.gate.wait()
            self.under_way -= 1
            self._changed.set()
            if self.failures:
                raise self.failures.pop()
            self.writes.append((key, verdict))

        self.statuses.put(key, version, verdict, write)

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await self._changed.wait()
                self._changed.clear()


@pytest.fixture
async def written(monkeypatch) -> AsyncIterator[Written]:
    monkeypatch.setattr(module, "SPACING_S", 0.0)
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    written = Written()
    yield written
    written.task.cancel()
    await asyncio.gather(written.task, return_exceptions=True)


async def test_the_same_verdict_on_the_same_version_is_written_once(written):
    for _ in range(3):
        written.put("adapter a", "ready")
        await written.until(lambda: written.writes)
    written.put("adapter b", "ready")
    await written.until(lambda: len(written.writes) == 2)
    assert written.writes == [("adapter a", "ready"), ("adapter b", "ready")]
    # The object has changed: the writer may find that its status has been, too.
    written.put("adapter a", "ready", version="2")
    await written.until(lambda: len(written.writes) == 3)


async def test_of_what_comes_while_one_is_written_the_last_is_written_next(written):
    written.gate.clear()
    written.put("adapter a", "1/3")
    await asyncio.sleep(0)
    for verdict in ("2/3", "3/3"):
        written.put("adapter a", verdict)
    written.gate.set()
    await written.until(lambda: len(written.writes) == 2)
    assert written.writes[-1] == ("adapter a", "3/3")


async def test_a_few_are_written_at_a_time(written):
    written.gate.clear()
    for at in range(20):
        written.put(f"adapter {at}", "ready")
    await asyncio.sleep(0.05)
    written.gate.set()
    await written.until(lambda: len(written.writes) == 20)
    assert written.most == PARALLEL


@pytest.mark.parametrize("error", [KubeError(503, "", "busy"), RuntimeError("a fault")])
async def test_what_could_not_be_written_is_tried_again_and_stops_no_other(written, error):
    written.failures = [error]
    written.put("adapter a", "ready")
    written.put("adapter b", "ready")
    await written.until(lambda: len(written.writes) == 2)
    assert {key for key, _ in written.writes} == {"adapter a", "adapter b"}


async def test_nothing_is_written_of_an_object_that_is_gone_or_when_this_one_may_not(written):
    written.put("adapter a", "ready")
    written.statuses.forget("adapter a")
    written.put("adapter b", "ready")
    await written.until(lambda: written.writes)
    written.may_act = False
    written.put("adapter c", "ready")
    await asyncio.sleep(0.05)
    assert written.writes == [("adapter b", "ready")]


async def test_what_could_not_be_written_between_two_renewals_is_written_after_the_second(written):
    written.may_act = False
    written.put("adapter a", "ready")
    # Taken from the queue, and not written.
    await asyncio.sleep(0.05)
    written.may_act = True
    await written.until(lambda: written.writes)
    assert written.writes == [("adapter a", "ready")]
