"""Who is next when the fleet is full."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_resolvers.errors import RateLimited, Unavailable
from mural_router.limits.queue import FairQueue, Turn


class Fleet:
    """So many seats; who took one, in order."""

    def __init__(self, seats: int = 0) -> None:
        self.free: Counter[Hashable] = Counter({None: seats})
        self.taken: list[str] = []
        self.released: list[str] = []
        self.asked = 0

    def attempt(self, name: str, group: Hashable = None) -> Callable[[], str | None]:
        def take() -> str | None:
            self.asked += 1
            if not self.free[group]:
                return None
            self.free[group] -= 1
            self.taken.append(name)
            return name

        return take


def make(fleet: Fleet, **bounds: Any) -> FairQueue[str]:
    return FairQueue(**bounds)


async def settled() -> None:
    """Let every task run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


def ask(
    queue: FairQueue[str],
    fleet: Fleet,
    name: str,
    *,
    weight: float = 1.0,
    tokens: int = 100,
    timeout_s: float = 60.0,
    group: Hashable = None,
    max_waiting: int | None = None,
) -> asyncio.Task[Turn[str]]:
    """A request of the tenant before the first dot of its name."""
    return asyncio.ensure_future(
        queue.wait(
            name.partition(".")[0],
            weight,
            tokens,
            fleet.attempt(name, group),
            timeout_s=timeout_s,
            release=fleet.released.append,
            group=group,
            max_waiting=max_waiting,
        )
    )


async def grant(queue: FairQueue[str], fleet: Fleet, seats: int, group: Hashable = None) -> None:
    fleet.free[group] += seats
    queue.pump()
    await settled()


async def test_a_request_starts_at_once_where_there_is_a_seat() -> None:
    fleet = Fleet(1)
    queue = make(fleet)

    turn = await ask(queue, fleet, "acme.1")

    assert (turn.seat, turn.waited_s) == ("acme.1", 0.0)
    assert queue.snapshot().waiting == 0


async def test_tenants_take_turns_whatever_one_of_them_has_waiting() -> None:
    fleet = Fleet()
    queue = make(fleet)
    tasks = [ask(queue, fleet, f"heavy.{i}") for i in range(20)]
    await settled()
    tasks += [ask(queue, fleet, "light.0"), ask(queue, fleet, "light.1")]
    await settled()

    await grant(queue, fleet, 4)

    assert sorted(fleet.taken) == ["heavy.0", "heavy.1", "light.0", "light.1"]
    await grant(queue, fleet, 18)
    assert fleet.taken[4:] == [f"heavy.{i}" for i in range(2, 20)]
    await asyncio.gather(*tasks)


async def test_shares_are_of_tokens_by_weight() -> None:
    fleet = Fleet()
    queue = make(fleet)
    tasks = [ask(queue, fleet, f"big.{i}", tokens=400) for i in range(60)]
    tasks += [ask(queue, fleet, f"small.{i}", tokens=100) for i in range(60)]
    tasks += [ask(queue, fleet, f"paying.{i}", tokens=100, weight=3.0) for i in range(60)]
    await settled()

    await grant(queue, fleet, 68)

    started = Counter(name.partition(".")[0] for name in fleet.taken)
    # In tokens 400 n, 100 n, 300 n.
    assert started == {"big": 4, "small": 16, "paying": 48}
    for task in tasks:
        task.cancel()


async def test_a_tenant_saves_nothing_up_while_it_is_away() -> None:
    fleet = Fleet()
    queue = make(fleet)
    tasks = [ask(queue, fleet, f"steady.{i}") for i in range(50)]
    await settled()
    await grant(queue, fleet, 30)
    tasks += [ask(queue, fleet, f"late.{i}") for i in range(20)]
    await settled()
    fleet.taken.clear()

    await grant(queue, fleet, 10)

    assert Counter(name.partition(".")[0] for name in fleet.taken) == {"steady": 5, "late": 5}
    for task in tasks:
        task.cancel()


async def test_what_was_really_used_counts_in_the_end() -> None:
    fleet = Fleet()
    queue = make(fleet)
    tasks = [ask(queue, fleet, f"wordy.{i}") for i in range(20)]
    tasks += [ask(queue, fleet, f"terse.{i}") for i in range(20)]
    await settled()
    await grant(queue, fleet, 2)
    wordy = next(task for task in tasks if task.done() and "wordy" in task.result().seat)
    wordy.result().settle(500)
    wordy.result().settle(500)
    fleet.taken.clear()

    await grant(queue, fleet, 6)

    # 500 used for an estimate of 100: four turns of the other pay for it.
    assert Counter(name.partition(".")[0] for name in fleet.taken) == {"terse": 5, "wordy": 1}
    for task in tasks:
        task.cancel()


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    fleet = Fleet()
    queue = make(fleet)
    first = ask(queue, fleet, "acme.first")
    await settled()
    fleet.free[None] = 1
    second = ask(queue, fleet, "acme.second")
    await settled()

    queue.pump()
    await settled()

    assert fleet.taken == ["acme.first"]
    assert not second.done()
    second.cancel()
    await first


async def test_a_group_without_capacity_holds_nobody_else_up() -> None:
    fleet = Fleet()
    queue = make(fleet)
    tasks = [ask(queue, fleet, f"acme.{i}", group="west") for i in range(5)]
    await settled()
    tasks.append(ask(queue, fleet, "acme.east", group="east"))
    await settled()
    fleet.asked = 0

    await grant(queue, fleet, 1, group="east")

    assert fleet.taken == ["acme.east"]
    # One attempt of each group found nothing or something; no other was made.
    assert fleet.asked <= 3
    for task in tasks:
        task.cancel()


async def test_a_newcomer_of_another_group_starts_where_there_is_room() -> None:
    fleet = Fleet()
    fleet.free["east"] = 1
    queue = make(fleet)
    waiting = ask(queue, fleet, "acme.west", group="west")
    await settled()

    assert (await ask(queue, fleet, "acme.east", group="east")).seat == "acme.east"
    waiting.cancel()


async def test_over_its_deadline_a_request_is_told_that_there_is_no_capacity() -> None:
    fleet = Fleet()
    queue = make(fleet)

    with pytest.raises(Unavailable) as caught:
        await ask(queue, fleet, "acme.1", timeout_s=0.001)

    assert caught.value.status == 503
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s >= 1
    assert queue.snapshot().waiting == 0
    assert queue.snapshot().late == 1
    queue.check_integrity()


async def test_a_tenant_with_a_full_queue_is_over_its_own_limit() -> None:
    fleet = Fleet()
    queue = make(fleet, max_waiting_per_tenant=2)
    tasks = [ask(queue, fleet, f"acme.{i}") for i in range(2)]
    await settled()

    with pytest.raises(RateLimited) as caught:
        await ask(queue, fleet, "acme.2")

    assert caught.value.status == 429
    assert caught.value.retry_after_s
    other = ask(queue, fleet, "globex.0")
    await settled()
    assert not other.done()
    for task in [*tasks, other]:
        task.cancel()


@pytest.mark.parametrize(("own", "held"), [(0, 0), (1, 1), (3, 3), (None, 2)])
async def test_a_tenant_may_have_a_queue_length_of_its_own(own: int | None, held: int) -> None:
    fleet = Fleet()
    queue = make(fleet, max_waiting_per_tenant=2)
    tasks = [ask(queue, fleet, f"acme.{i}", max_waiting=own) for i in range(held)]
    await settled()
    assert queue.snapshot().longest == held

    with pytest.raises(RateLimited, match=f"wait for it as may: {held}") as caught:
        await ask(queue, fleet, "acme.more", max_waiting=own)

    assert caught.value.retry_after_s
    assert queue.snapshot().full == 1
    # Whatever it is, it holds nobody up who need not wait, and no other tenant.
    others = [ask(queue, fleet, f"globex.{i}") for i in range(2)]
    await settled()
    await grant(queue, fleet, held + 2)
    await asyncio.gather(*tasks, *others)
    fleet.free[None] = 1
    assert (await ask(queue, fleet, "acme.now", max_waiting=own)).seat == "acme.now"


async def test_where_all_places_are_taken_the_most_crowded_tenant_gives_way() -> None:
    fleet = Fleet()
    queue = make(fleet, max_waiting=5)
    heavy = [ask(queue, fleet, f"heavy.{i}") for i in range(5)]
    await settled()

    light = ask(queue, fleet, "light.0")
    await settled()

    assert not light.done()
    with pytest.raises(Unavailable, match="less waiting"):
        heavy[-1].result()
    with pytest.raises(Unavailable, match="no room"):
        await ask(queue, fleet, "heavy.6")
    queue.check_integrity()
    for task in [*heavy, light]:
        task.cancel()


async def test_whoever_goes_away_leaves_the_queue() -> None:
    fleet = Fleet()
    queue = make(fleet)
    gone, stays = ask(queue, fleet, "acme.gone"), ask(queue, fleet, "acme.stays")
    await settled()
    gone.cancel()
    # In the same moment: the queue has not been told yet.
    fleet.free[None] += 1
    queue.pump()
    await settled()

    assert fleet.taken == ["acme.stays"]
    assert (await stays).seat == "acme.stays"
    queue.check_integrity()


async def test_a_seat_given_to_one_who_went_away_is_given_back() -> None:
    fleet = Fleet()
    queue = make(fleet)
    gone = ask(queue, fleet, "acme.gone")
    await settled()
    fleet.free[None] += 1
    queue.pump()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone

    assert fleet.taken == fleet.released == ["acme.gone"]


async def test_what_an_attempt_raises_is_raised_to_its_own_request() -> None:
    fleet = Fleet()
    queue = make(fleet)

    answers = iter([None])

    def attempt() -> str | None:
        for answer in answers:
            return answer
        raise RateLimited("changed its mind")

    broken = asyncio.ensure_future(
        queue.wait("acme", 1.0, 1, attempt, timeout_s=60, release=fleet.released.append)
    )
    sound = ask(queue, fleet, "globex.1")
    await settled()

    await grant(queue, fleet, 1)

    with pytest.raises(RateLimited, match="changed its mind"):
        await broken
    assert (await sound).seat == "globex.1"


async def test_nobody_waits_for_a_call_that_was_forgotten() -> None:
    fleet = Fleet()
    queue = make(fleet)
    task = ask(queue, fleet, "acme.1")
    await settled()

    fleet.free[None] += 1

    assert (await task).seat == "acme.1"


async def test_how_long_to_stay_away_follows_from_what_was_served() -> None:
    fleet, now = Fleet(), [0.0]
    queue: FairQueue[str] = FairQueue(max_waiting_per_tenant=40, clock=lambda: now[0])
    tasks = [ask(queue, fleet, f"acme.{i}", tokens=100) for i in range(40)]
    await settled()
    with pytest.raises(RateLimited) as caught:
        await ask(queue, fleet, "acme.x")
    assert caught.value.retry_after_s == 30

    # 2,000 tokens now are 200 a second over the time that it remembers; as many are left.
    await grant(queue, fleet, 20)
    tasks += [ask(queue, fleet, f"acme.{i}", tokens=100) for i in range(20)]
    await settled()
    with pytest.raises(RateLimited) as caught:
        await ask(queue, fleet, "acme.x")

    assert caught.value.retry_after_s == pytest.approx(20)
    for task in tasks:
        task.cancel()


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 6), st.integers(0, 2)),
        st.tuples(st.just("grant"), st.integers(1, 3), st.integers(0, 2)),
        st.tuples(st.just("leave"), st.integers(0, 50), st.just(0)),
        st.tuples(st.just("settle"), st.integers(0, 50), st.integers(0, 900)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=60)
@given(steps)
def test_counts_agree_and_nobody_is_lost_whatever_happens(
    script: list[tuple[str, int, int]],
) -> None:
    async def play() -> None:
        fleet = Fleet()
        queue = make(fleet, max_waiting=12, max_waiting_per_tenant=4)
        tasks: list[asyncio.Task[Turn[str]]] = []
        for number, (what, first, second) in enumerate(script):
            if what == "ask":
                name = f"t{first}.{number}"
                tasks.append(ask(queue, fleet, name, tokens=50 * first, group=second))
            elif what == "grant":
                fleet.free[second] += first
                queue.pump()
            elif what == "leave" and tasks:
                tasks[first % len(tasks)].cancel()
            elif what == "settle" and tasks:
                task = tasks[first % len(tasks)]
                if task.done() and not task.cancelled() and task.exception() is None:
                    task.result().settle(second)
            await settled()
            queue.check_integrity()
        for group in range(3):
            await grant(queue, fleet, 100, group)
        assert all(task.done() for task in tasks)
        assert queue.snapshot().waiting == 0
        served = [t.result().seat for t in tasks if not t.cancelled() and t.exception() is None]
        assert sorted([*served, *fleet.released]) == sorted(fleet.taken)

    asyncio.run(play())


async def test_a_seat_that_nobody_waits_for_is_taken_with_no_room_to_wait_for_one() -> None:
    fleet = Fleet()
    queue = make(fleet, max_waiting=1, max_waiting_per_tenant=1)
    waiting = ask(queue, fleet, "busy.0", group="full")
    await settled()
    fleet.free["other"] += 3

    for name, bound in (("acme.0", 0), ("busy.1", None), ("globex.0", None)):
        turn = await ask(queue, fleet, name, group="other", max_waiting=bound)
        assert turn.seat == name
    with pytest.raises(RateLimited, match=r"There is no capacity, and as many .* as may: 0"):
        await ask(queue, fleet, "acme.1", group="other", max_waiting=0)
    assert not waiting.done()
    await grant(queue, fleet, 1, "full")
    assert (await waiting).seat == "busy.0"


async def test_who_waits_goes_before_another_group_that_wants_some_of_the_same() -> None:
    fleet = Fleet()
    queue = make(fleet)
    waiting = ask(queue, fleet, "first.0")
    await settled()

    # It got free, and nobody was told.
    fleet.free[None] += 1
    came = asyncio.ensure_future(
        queue.wait(
            "late",
            1.0,
            1,
            fleet.attempt("late.0"),
            timeout_s=60,
            release=fleet.released.append,
            group="some",
        )
    )
    await settled()
    assert (fleet.taken, waiting.done(), came.done()) == (["first.0"], True, False)
    await grant(queue, fleet, 1)
    assert (await came).seat == "late.0"
