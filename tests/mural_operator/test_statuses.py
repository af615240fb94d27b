"""Of each object the last verdict is written, once, and what fails is tried again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise

import pytest

from mural_operator import statuses as module
from mural_operator.statuses import PARALLEL, RETRY_MOST_S, Statuses
from mural_operator.troubles import Troubles
from mural_resolvers.kubernetes.client import KubeError
from tests.mural_operator.virtual_time import in_virtual_time

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
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.0)
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


REFUSES_S = 60.0


class Refusing:
    """An API server that refuses statuses for a minute, and then none; in virtual time."""

    def __init__(self, error: KubeError, num: int = 200, only: str = "") -> None:
        self.error = error
        self.only = only
        """The one key that is refused; empty: all are."""
        self.keys = [f"adapter {at}" for at in range(num)]
        self.statuses = Statuses(lambda: True, Troubles())
        self.tries: list[float] = []
        self.written: dict[str, tuple[object, float]] = {}

    async def run(self) -> None:
        running = asyncio.create_task(self.statuses.run())
        now = asyncio.get_running_loop().time
        for key in self.keys:
            self.put(key, "loading")
        while now() < REFUSES_S + 2 * RETRY_MOST_S:
            await asyncio.sleep(1.0)
            # What its replicas do changes all the time.
            self.put(self.keys[0], f"verdict at {min(now(), REFUSES_S):.0f}")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    def put(self, key: str, verdict: object) -> None:
        async def write() -> None:
            now = asyncio.get_running_loop().time()
            await asyncio.sleep(0.01)
            if now < REFUSES_S and self.only in ("", key):
                self.tries.append(now)
                raise self.error
            self.written[key] = (verdict, now)

        self.statuses.put(key, "1", verdict, write)

    def check_all_is_right(self) -> None:
        assert set(self.written) == set(self.keys)
        assert self.written[self.keys[0]][0] == f"verdict at {REFUSES_S:.0f}"


@pytest.mark.parametrize(
    ("status", "asked_for_s"), [(429, 7.0), (429, None), (500, None), (503, 3600.0), (0, None)]
)
def test_an_api_server_in_trouble_is_asked_a_few_times_a_minute_for_all_objects_together(
    status, asked_for_s, caplog
):
    refusing = Refusing(KubeError(status, "", "later", retry_after_s=asked_for_s))
    in_virtual_time(refusing.run())
    assert PARALLEL < len(refusing.tries) <= PARALLEL * 8
    began = refusing.tries[::PARALLEL]
    least_s = min(asked_for_s or 0.0, RETRY_MOST_S)
    assert all(after - before >= least_s for before, after in pairwise(began))
    refusing.check_all_is_right()
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize("status", [403, 409, 422])
def test_an_object_whose_status_is_refused_is_asked_about_less_and_less(status, caplog):
    refusing = Refusing(KubeError(status, "", "no"))
    in_virtual_time(refusing.run())
    assert len(refusing.tries) <= len(refusing.keys) * 8
    refusing.check_all_is_right()
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize("status", [403, 500])
def test_one_object_whose_status_is_refused_keeps_the_others_for_a_moment_at_most(status):
    refusing = Refusing(KubeError(status, "", "no"), only="adapter 7")
    in_virtual_time(refusing.run())
    refusing.check_all_is_right()
    others = [at for key, (_, at) in refusing.written.items() if int(key.split()[1]) > 0]
    assert sorted(others)[-2] < 5.0
