"""Leader election in virtual time: clocks that differ, late answers, networks that part."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_operator.election import Clock, Election, ElectionTiming, WorkGoesOn
from mural_resolvers.kubernetes.client import JsonObject, KubeError
from tests.mural_operator.virtual_time import in_virtual_time


class DriftingClock(Clock):
    """One that goes faster or slower than the true time, and shows another one."""

    def __init__(self, rate: float, shows: float) -> None:
        self._rate = rate
        self._shows = shows

    def now(self) -> float:
        return self._shows + super().now() * self._rate

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / self._rate)

    def timeout(self, seconds: float) -> asyncio.Timeout:
        return super().timeout(seconds / self._rate)


class Api:
    """One Lease, as the API server keeps it."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.writes = 0

    def get(self) -> bytes:
        if self.lease is None:
            raise KubeError(404, "NotFound", "no such Lease")
        return msgspec.json.encode(self.lease)

    def create(self, body: JsonObject) -> bytes:
        if self.lease is not None:
            raise KubeError(409, "AlreadyExists", "there is one")
        return self._write(body)

    def replace(self, body: JsonObject) -> bytes:
        if self.lease is None:
            raise KubeError(404, "NotFound", "no such Lease")
        metadata = body["metadata"]
        assert isinstance(metadata, dict)
        if metadata["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", "not the last version")
        return self._write(body)

    def _write(self, body: JsonObject) -> bytes:
        self.writes += 1
        self.lease = msgspec.json.decode(msgspec.json.encode(body))
        assert self.lease is not None
        self.lease["metadata"]["resourceVersion"] = str(self.writes)
        return self.get()

    @property
    def holder(self) -> str:
        return "" if self.lease is None else self.lease["spec"]["holderIdentity"]


class Line:
    """A candidate's way to the API: it delays, and loses requests or answers while it is cut."""

    def __init__(self, api: Api, delay: Callable[[], float] = lambda: 0.0) -> None:
        self._api = api
        self._delay = delay
        self.loses_requests = False
        self.loses_answers = False

    async def get(self, path: str) -> bytes:
        return await self._call(self._api.get)

    async def create(self, path: str, body: JsonObject) -> bytes:
        return await self._call(lambda: self._api.create(body))

    async def replace(self, path: str, body: JsonObject) -> bytes:
        return await self._call(lambda: self._api.replace(body))

    async def _call(self, do: Callable[[], bytes]) -> bytes:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bytes] = loop.create_future()

        def arrive() -> None:
            try:
                data = do()
            except KubeError as error:
                loop.call_later(self._delay(), self._come_back, answer, error)
            else:
                loop.call_later(self._delay(), self._come_back, answer, data)

        # What was sent arrives, whether or not anybody still waits for the answer.
        if not self.loses_requests:
            loop.call_later(self._delay(), arrive)
        return await answer

    def _come_back(self, answer: asyncio.Future[bytes], what: bytes | KubeError) -> None:
        if self.loses_answers or answer.done():
            return
        if isinstance(what, bytes):
            answer.set_result(what)
        else:
            answer.set_exception(what)


class Stage:
    """Who acts at any time; more than one at once is the fault that all this is against."""

    def __init__(self) -> None:
        self.acting: set[str] = set()
        self.empty = asyncio.Event()
        self.terms: list[str] = []

    def work(self, who: str, clock: Clock, ends_in_s: float) -> Callable[[], Awaitable[None]]:
        async def act() -> None:
            self.terms.append(who)
            self.acting.add(who)
            self.empty.clear()
            try:
                while True:
                    assert self.acting == {who}
                    await asyncio.sleep(0.1)
            finally:
                with suppress(asyncio.CancelledError):
                    await clock.sleep(ends_in_s)
                self.acting.discard(who)
                self.empty.set()

        return act


class Candidate:
    """One operator."""

    def __init__(self, api: Api, stage: Stage, who: str, rng: random.Random | None = None) -> None:
        self.who = who
        rate = 1.0 if rng is None else rng.uniform(0.95, 1.05)
        shows = 0.0 if rng is None else rng.uniform(-1e6, 1e6)
        slow = 0.0 if rng is None else rng.choice((0.01, 0.3, 0.9))
        self.clock = DriftingClock(rate, shows)
        self.line = Line(api, (lambda: 0.0) if rng is None else lambda: rng.uniform(0, slow))
        self.election = Election(
            self.line,
            name="mural",
            namespace="prod",
            identity=who,
            clock=self.clock,
            jitter=(lambda: 0.5) if rng is None else rng.random,
        )
        ends_in_s = 0.0 if rng is None else rng.choice((0.0, 0.9))
        self._work = stage.work(who, self.clock, ends_in_s)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self.election.run()),
            asyncio.create_task(self.election.lead(self._work)),
        ]

    def check(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled():
                task.result()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _disturbed(seed: int, number: int) -> None:
    rng = random.Random(seed)
    api, stage = Api(), Stage()
    candidates = [Candidate(api, stage, f"operator-{i}", rng) for i in range(number)]
    for each in candidates:
        each.start()
    for _ in range(rng.randint(3, 12)):
        await _watched(candidates, rng.uniform(0.1, 8.0))
        line = rng.choice(candidates).line
        line.loses_requests = rng.random() < 0.4
        line.loses_answers = rng.random() < 0.4
        if rng.random() < 0.15:
            again = rng.choice(candidates)
            await again.end()
            again.start()
    for each in candidates:
        each.line.loses_requests = each.line.loses_answers = False
    terms = len(stage.terms)
    await _watched(candidates, 40.0)
    # Slow as the lines may be, someone acts when they hold.
    assert stage.acting or len(stage.terms) > terms
    for each in candidates:
        await each.end()


async def _watched(candidates: list[Candidate], seconds: float) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds
    while loop.time() < until:
        await asyncio.sleep(0.05)
        assert sum(each.election.leading for each in candidates) <= 1
        for each in candidates:
            each.check()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), number=st.integers(2, 3))
def test_never_do_two_act_at_once(seed: int, number: int) -> None:
    in_virtual_time(_disturbed(seed, number))


def calm(number: int = 2) -> tuple[Api, Stage, list[Candidate]]:
    api, stage = Api(), Stage()
    return api, stage, [Candidate(api, stage, f"operator-{i}") for i in range(number)]


def test_the_first_leads_and_renews_and_the_second_waits() -> None:
    async def main() -> None:
        api, stage, (first, second) = calm()
        first.start()
        await asyncio.sleep(1)
        second.start()
        await asyncio.sleep(60)
        assert stage.terms == ["operator-0"]
        assert second.election.leader == "operator-0"
        assert 35 <= api.writes <= 45
        assert api.lease is not None
        assert api.lease["spec"]["leaseDurationSeconds"] == 6
        assert api.lease["spec"]["leaseTransitions"] == 0
        for each in (first, second):
            await each.end()

    in_virtual_time(main())


def test_a_leader_that_dies_is_followed_within_a_lease_and_a_look() -> None:
    async def main() -> None:
        api, stage, (first, second) = calm()
        first.start()
        await asyncio.sleep(1)
        second.start()
        await asyncio.sleep(10)
        first.line.loses_requests = True
        died = asyncio.get_running_loop().time()
        await second.election.wait_leading()
        assert asyncio.get_running_loop().time() - died < 6 + 2
        assert stage.terms == ["operator-0"]
        await asyncio.sleep(0.1)
        assert stage.terms == ["operator-0", "operator-1"]
        assert api.lease is not None
        assert api.lease["spec"]["leaseTransitions"] == 1
        for each in (first, second):
            await each.end()

    in_virtual_time(main())


def test_a_leader_without_an_api_server_stops_before_the_lease_lapses() -> None:
    async def main() -> None:
        _, stage, (first, *_) = calm()
        first.start()
        await asyncio.sleep(10)
        first.line.loses_answers = first.line.loses_requests = True
        cut = asyncio.get_running_loop().time()
        await stage.empty.wait()
        assert asyncio.get_running_loop().time() - cut < 4.2
        first.line.loses_answers = first.line.loses_requests = False
        await asyncio.sleep(5)
        # It goes on when it has renewed.
        assert stage.terms == ["operator-0", "operator-0"]
        await first.end()

    in_virtual_time(main())


def test_one_lost_answer_costs_no_leadership() -> None:
    async def main() -> None:
        _, stage, (first, *_) = calm()
        first.start()
        await asyncio.sleep(10)
        first.line.loses_answers = True
        await asyncio.sleep(2)
        first.line.loses_answers = False
        await asyncio.sleep(20)
        assert stage.terms == ["operator-0"]
        assert first.election.leading
        await first.end()

    in_virtual_time(main())


def test_who_ends_gracefully_is_followed_at_the_next_look() -> None:
    async def main() -> None:
        api, stage, (first, second) = calm()
        first.start()
        await asyncio.sleep(1)
        second.start()
        await asyncio.sleep(10)
        await first.end()
        assert api.holder == ""
        assert not stage.acting
        ended = asyncio.get_running_loop().time()
        await second.election.wait_leading()
        assert asyncio.get_running_loop().time() - ended < 2
        await second.end()

    in_virtual_time(main())


def test_work_that_takes_some_seconds_to_end_ends_before_the_lease_is_given_back() -> None:
    async def main() -> None:
        api = Api()
        election = Election(Line(api), name="mural", namespace="prod", identity="me")
        held: list[str] = []

        async def tidy() -> None:
            try:
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(3)
                held.append(api.holder)

        run = asyncio.create_task(election.run())
        lead = asyncio.create_task(election.lead(tidy))
        await asyncio.sleep(5)
        for task in (lead, run):
            task.cancel()
            await asyncio.wait({task})
        assert held == ["me"]
        assert api.holder == ""

    in_virtual_time(main())


def test_the_lease_is_not_given_back_while_the_work_goes_on() -> None:
    async def main() -> None:
        api = Api()
        election = Election(
            Line(api), name="mural", namespace="prod", identity="me", jitter=lambda: 0.5
        )
        released = asyncio.Event()

        async def stubborn() -> None:
            while not released.is_set():
                with suppress(asyncio.CancelledError):
                    await released.wait()

        run = asyncio.create_task(election.run())
        lead = asyncio.create_task(election.lead(stubborn))
        await asyncio.sleep(5)
        run.cancel()
        await asyncio.wait({run})
        assert api.holder == "me"
        assert not election.leading
        with pytest.raises(WorkGoesOn):
            await lead
        released.set()

    in_virtual_time(main())


def test_a_lease_that_someone_else_has_written_ends_leadership_at_once() -> None:
    async def main() -> None:
        api, stage, (first, *_) = calm()
        first.start()
        await asyncio.sleep(10)
        assert api.lease is not None
        spec = api.lease["spec"] | {"holderIdentity": "somebody"}
        api.replace(api.lease | {"spec": spec})
        await asyncio.sleep(1.6)
        assert not stage.acting
        assert not first.election.leading
        assert first.election.leader == "somebody"
        await first.end()
        assert api.holder == "somebody"

    in_virtual_time(main())


def test_what_others_have_written_into_the_lease_stays() -> None:
    async def main() -> None:
        api, _, (first, *_) = calm()
        api.create(
            {
                "metadata": {"name": "mural", "labels": {"a": "b"}},
                "spec": {"holderIdentity": "", "leaseTransitions": 7},
            }
        )
        first.start()
        await asyncio.sleep(3)
        assert api.lease is not None
        assert api.lease["metadata"]["labels"] == {"a": "b"}
        assert api.lease["spec"]["leaseTransitions"] == 8
        await first.end()

    in_virtual_time(main())


def test_a_lease_that_claims_to_hold_for_ever_is_not_believed_for_ever() -> None:
    async def main() -> None:
        api, stage, (first, *_) = calm()
        api.create(
            {
                "metadata": {"name": "mural"},
                "spec": {"holderIdentity": "ghost", "leaseDurationSeconds": 10**9},
            }
        )
        first.start()
        await asyncio.sleep(50)
        assert not stage.terms
        await asyncio.sleep(15)
        assert stage.acting == {"operator-0"}
        await first.end()

    in_virtual_time(main())


def test_who_is_not_able_looks_now_and_then_and_leaves_the_lease_to_others() -> None:
    async def main() -> None:
        api = Api()
        asked = 0
        able = False

        class Counted(Line):
            async def get(self, path: str) -> bytes:
                nonlocal asked
                asked += 1
                return await super().get(path)

        one = Election(
            Counted(api), name="mural", namespace="prod", identity="me", able=lambda: able
        )
        run = asyncio.create_task(one.run())
        await asyncio.sleep(20)
        assert api.lease is None
        spec = {"holderIdentity": "ghost", "leaseDurationSeconds": 1}
        api.create({"metadata": {"name": "mural"}, "spec": spec})
        await asyncio.sleep(20)
        assert api.holder == "ghost"
        assert not one.leading
        assert asked <= 45
        able = True
        await asyncio.sleep(2)
        assert api.holder == "me"
        run.cancel()
        await asyncio.wait({run})

    in_virtual_time(main())


def test_what_the_work_raises_is_raised_by_lead() -> None:
    async def main() -> None:
        election = Election(Line(Api()), name="mural", namespace="prod", identity="me")

        async def fails() -> None:
            raise LookupError("a bug")

        run = asyncio.create_task(election.run())
        with pytest.raises(LookupError, match="a bug"):
            await election.lead(fails)
        run.cancel()
        await asyncio.wait({run})

    in_virtual_time(main())


def test_times_that_cannot_keep_two_apart_are_refused() -> None:
    with pytest.raises(ValueError, match="two from acting"):
        ElectionTiming(duration_s=4)
