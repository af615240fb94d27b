"""Any number of wakes make one step, and no failure ends the work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from mural_operator import worker as module
from mural_operator.worker import Worker

WAIT_S = 20


class Counting(Worker):
    """Counts its steps."""

    def __init__(self) -> None:
        super().__init__("a test")
        self.steps: list[float] = []
        self.failures = 0
        self._stepped = asyncio.Event()

    async def step(self) -> None:
        self.steps.append(asyncio.get_running_loop().time())
        self._stepped.set()
        if self.failures:
            self.failures -= 1
            raise RuntimeError("a fault")

    async def until(self, number: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.steps) < number:
                await self._stepped.wait()
                self._stepped.clear()


@pytest.fixture
async def worker() -> AsyncIterator[Counting]:
    worker = Counting()
    running = asyncio.create_task(worker.run())
    yield worker
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_comes_together_is_taken_together(worker):
    await worker.until(1)
    for _ in range(1000):
        worker.wake()
    await worker.until(2)
    await asyncio.sleep(3 * module.PAUSE_S)
    assert len(worker.steps) == 2


async def test_steps_keep_their_distance_however_often_it_is_woken(worker):
    for number in range(1, 5):
        await worker.until(number)
        worker.wake()
    gaps = [b - a for a, b in zip(worker.steps, worker.steps[1:], strict=False)]
    assert min(gaps) >= module.PAUSE_S * 0.99


async def test_the_earliest_time_that_was_named_wakes_it(worker):
    await worker.until(1)
    now = asyncio.get_running_loop().time()
    worker.wake_at(now + 3600)
    worker.wake_at(now + 0.05)
    worker.wake_at(now + 7200)
    await worker.until(2)


async def test_everything_is_looked_at_again_after_a_while_without_a_wake(monkeypatch):
    monkeypatch.setattr(module, "RESYNC_S", 0.01)
    worker = Counting()
    running = asyncio.create_task(worker.run())
    await worker.until(3)
    running.cancel()


async def test_a_step_that_fails_is_tried_again(worker, caplog, monkeypatch):
    monkeypatch.setattr(module, "RESYNC_S", 3600)
    await worker.until(1)
    worker.failures = 1
    worker.wake()
    await worker.until(3)
    assert "a test failed" in caplog.text
