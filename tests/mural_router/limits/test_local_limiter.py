"""Limits counted in one router."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput, RateLimited
from mural_resolvers.tenants import ANYONE, Principal, TenantLimits
from mural_router.limits.local import LocalLimiter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limiter(clock: Clock) -> LocalLimiter:
    return LocalLimiter(clock)


def acme(**limits: int) -> Principal:
    return Principal(tenant="acme", limits=TenantLimits(**limits))


async def refused(limiter: LocalLimiter, principal: Principal, tokens: int = 1) -> float:
    with pytest.raises(RateLimited) as caught:
        await limiter.enter(principal, 1, tokens)
    assert caught.value.retry_after_s is not None
    return caught.value.retry_after_s


async def test_requests_over_the_limit_are_told_when_to_come_back(
    limiter: LocalLimiter, clock: Clock
) -> None:
    principal = acme(requests_per_minute=2)
    for _ in range(2):
        (await limiter.enter(principal, 1, 10)).close()
    clock.now += 10

    assert await refused(limiter, principal) == 51
    clock.now += 50.9
    await refused(limiter, principal)
    clock.now += 0.1
    await limiter.enter(principal, 1, 10)
    assert limiter.snapshot().refused == {"requests": 2}


async def test_an_estimate_is_counted_until_the_answer_tells(
    limiter: LocalLimiter, clock: Clock
) -> None:
    principal = acme(tokens_per_minute=100)
    first = await limiter.enter(principal, 1, 80)
    await refused(limiter, principal, 30)

    first.settle(20)
    first.settle(20)
    second = await limiter.enter(principal, 1, 80)
    clock.now += 30
    # More than was guessed counts from when it is known.
    second.settle(130)

    assert limiter.snapshot().tenants[0].tokens == 150
    assert await refused(limiter, principal, 1) == 31
    clock.now += 31
    assert limiter.snapshot().tenants[0].tokens == 50
    await limiter.enter(principal, 1, 50)


async def test_what_is_settled_after_its_minute_changes_nothing_before(
    limiter: LocalLimiter, clock: Clock
) -> None:
    principal = acme(tokens_per_minute=100)
    hold = await limiter.enter(principal, 1, 100)
    clock.now += 100
    await limiter.enter(principal, 1, 100)

    hold.settle(10)

    assert limiter.snapshot().tenants[0].tokens == 100


async def test_an_estimate_above_the_limit_shuts_nobody_out_for_good(
    limiter: LocalLimiter, clock: Clock
) -> None:
    principal = acme(tokens_per_minute=100)
    hold = await limiter.enter(principal, 1, 5000)
    hold.settle(60)

    assert await refused(limiter, principal, 5000) == 61
    clock.now += 61
    await limiter.enter(principal, 1, 5000)


async def test_concurrency_counts_sequences_until_they_end(limiter: LocalLimiter) -> None:
    principal = acme(concurrency=3)
    first = await limiter.enter(principal, 2, 1)
    await limiter.enter(principal, 1, 1)
    assert await refused(limiter, principal) == 1
    first.close()
    first.close()

    await limiter.enter(principal, 2, 1)
    await refused(limiter, principal)
    with pytest.raises(InvalidInput, match="may have 3"):
        await limiter.enter(principal, 4, 1)


async def test_what_is_refused_is_not_counted(limiter: LocalLimiter) -> None:
    principal = acme(requests_per_minute=100, tokens_per_minute=10, concurrency=5)
    await limiter.enter(principal, 1, 10)
    for _ in range(20):
        await refused(limiter, principal)

    usage = limiter.snapshot().tenants[0]
    assert (usage.requests, usage.tokens, usage.sequences) == (1, 10, 1)


async def test_whoever_has_no_limits_is_not_counted(limiter: LocalLimiter) -> None:
    for principal in (ANYONE, Principal(tenant="initech")):
        hold = await limiter.enter(principal, 1000, 1 << 40)
        hold.settle(1 << 50)
        hold.close()

    assert limiter.snapshot().tenants == ()


async def test_the_snapshot_shows_the_busiest(limiter: LocalLimiter) -> None:
    limits = TenantLimits(tokens_per_minute=10_000)
    for number in range(20):
        await limiter.enter(Principal(tenant=f"t{number}", limits=limits), 1, 100 + number)

    assert [usage.tenant for usage in limiter.snapshot(3).tenants] == ["t19", "t18", "t17"]


async def test_accounts_of_the_idle_make_room(
    limiter: LocalLimiter, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mural_router.limits.local.MAX_ACCOUNTS", 2)
    limits = TenantLimits(requests_per_minute=1)
    tenants = [Principal(tenant=f"t{number}", limits=limits) for number in range(4)]
    for tenant in tenants:
        (await limiter.enter(tenant, 1, 1)).close()
    # Nobody's limit was forgotten for want of room.
    for tenant in tenants:
        await refused(limiter, tenant)
    clock.now += 100

    await limiter.enter(Principal(tenant="new", limits=limits), 1, 1)

    assert len(limiter.snapshot().tenants) <= 2


@given(
    st.lists(
        st.tuples(st.floats(0, 20), st.integers(1, 60), st.none() | st.floats(0, 1)), max_size=60
    )
)
async def test_no_minute_holds_more_tokens_than_the_limit(
    script: list[tuple[float, int, float | None]],
) -> None:
    clock = Clock()
    limiter, principal, used = LocalLimiter(clock), acme(tokens_per_minute=60), []
    for pause, tokens, part in script:
        clock.now += pause
        try:
            hold = await limiter.enter(principal, 1, tokens)
        except RateLimited:
            continue
        really = tokens if part is None else int(tokens * part)
        hold.settle(really)
        used.append((clock.now, really))

    for end, _ in used:
        assert sum(tokens for at, tokens in used if end - 60 < at <= end) <= 60
