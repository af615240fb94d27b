"""What a tenant may use in a minute and at one time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput, RateLimited
from mural_resolvers.tenants import ANYONE, Principal, TenantAccounts, TenantLimits
from mural_resolvers.tenants.limits import MinuteWindow


def acme(**limits: int) -> Principal:
    return Principal(tenant="acme", limits=TenantLimits(**limits))


def test_requests_over_the_limit_are_told_when_to_come_back() -> None:
    accounts, principal = TenantAccounts(), acme(requests_per_minute=2)
    accounts.enter(principal, 1, now=0.0).close()
    accounts.enter(principal, 1, now=10.5).close()

    with pytest.raises(RateLimited, match="2 requests a minute") as caught:
        accounts.enter(principal, 1, now=20.0)

    assert caught.value.retry_after_s == 41.0
    assert accounts.refused == {"requests": 1}
    with pytest.raises(RateLimited):
        accounts.enter(principal, 1, now=60.9)
    accounts.enter(principal, 1, now=61.0)


def test_what_is_refused_does_not_count() -> None:
    accounts, principal = TenantAccounts(), acme(requests_per_minute=1)
    accounts.enter(principal, 1, now=0.0).close()
    for second in range(1, 61):
        with pytest.raises(RateLimited):
            accounts.enter(principal, 1, now=float(second))

    accounts.enter(principal, 1, now=61.0)


def test_tokens_are_settled_from_what_was_used() -> None:
    accounts, principal = TenantAccounts(), acme(tokens_per_minute=100)
    first, second = (accounts.enter(principal, 1, now=0.0) for _ in range(2))
    first.spend(80, now=1.0)
    second.spend(500, now=2.0)

    with pytest.raises(RateLimited, match="100 tokens a minute") as caught:
        accounts.enter(principal, 1, now=3.0)

    # The 80 alone are below the limit, the 500 are not.
    assert caught.value.retry_after_s == 60.0
    accounts.enter(principal, 1, now=63.0)


def test_concurrency_counts_sequences_until_they_end() -> None:
    accounts, principal = TenantAccounts(), acme(concurrency=3)
    first = accounts.enter(principal, 2, now=0.0)
    with pytest.raises(RateLimited, match="3 sequences at one time"):
        accounts.enter(principal, 2, now=0.0)
    second = accounts.enter(principal, 1, now=0.0)
    first.close()
    first.close()

    accounts.enter(principal, 2, now=0.0).close()
    second.close()


def test_more_at_once_than_will_ever_be_allowed_is_no_matter_of_waiting() -> None:
    with pytest.raises(InvalidInput, match="may have 3"):
        TenantAccounts().enter(acme(concurrency=3), 4, now=0.0)


def test_tenants_have_accounts_of_their_own_and_some_have_none() -> None:
    accounts, limits = TenantAccounts(), TenantLimits(requests_per_minute=1)
    accounts.enter(Principal(tenant="acme", limits=limits), 1, now=0.0)
    accounts.enter(Principal(tenant="globex", limits=limits), 1, now=0.0)
    for _ in range(10):
        accounts.enter(Principal(tenant="initech"), 1, now=0.0)
        accounts.enter(ANYONE, 1, now=0.0)

    # Two keys of one tenant share its limits.
    with pytest.raises(RateLimited):
        accounts.enter(Principal(tenant="acme", limits=limits, key_id="other"), 1, now=0.0)


def test_limits_given_while_a_request_runs_count_from_the_next() -> None:
    accounts = TenantAccounts()
    before = accounts.enter(acme(), 5, now=0.0)
    ticket = accounts.enter(acme(concurrency=1), 1, now=0.0)
    before.spend(1000, now=0.0)
    before.close()

    with pytest.raises(RateLimited):
        accounts.enter(acme(concurrency=1), 1, now=0.0)
    ticket.close()
    accounts.enter(acme(concurrency=1, tokens_per_minute=1), 1, now=0.0)


def test_accounts_of_the_idle_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mural_resolvers.tenants.limits.MAX_ACCOUNTS", 2)
    accounts, limits = TenantAccounts(), TenantLimits(requests_per_minute=1)

    def enter(tenant: str, now: float) -> None:
        accounts.enter(Principal(tenant=tenant, limits=limits), 1, now).close()

    for place, tenant in enumerate("abcd"):
        enter(tenant, now=float(place))
    # Nobody's limit was forgotten for want of room.
    for tenant in "abcd":
        with pytest.raises(RateLimited):
            enter(tenant, now=5.0)
    enter("e", now=100.0)
    for tenant in "abcd":
        enter(tenant, now=100.0)


amounts = st.lists(st.tuples(st.floats(0, 90), st.integers(0, 20)), max_size=40)


@given(amounts, st.integers(1, 60))
def test_a_window_holds_a_minute_to_a_second(steps: list[tuple[float, int]], limit: int) -> None:
    window, now, added = MinuteWindow(), 0.0, []
    for pause, amount in steps:
        now += pause
        window.add(amount, now)
        added.append((now, amount))
        least = sum(amount for at, amount in added if at > now - 60)
        most = sum(amount for at, amount in added if at > now - 61)
        assert least <= window.total(now) <= most

        wait_s = window.wait_s(limit, now)
        assert (wait_s == 0) == (window.total(now) < limit)
        if wait_s:
            later = MinuteWindow()
            for at, earlier in added:
                later.add(earlier, at)
            assert later.total(now + wait_s) < limit
            assert wait_s <= 61


@given(
    st.lists(st.tuples(st.integers(0, 80), st.integers(1, 9)), max_size=20),
    st.integers(-400, 400),
    st.integers(0, 150),
)
def test_a_window_that_is_moved_is_the_same_at_another_time(
    amounts: list[tuple[int, int]], seconds: int, later_s: int
) -> None:
    moved, stays = MinuteWindow(), MinuteWindow()
    for at, amount in sorted(amounts):
        assert moved.add(amount, 1000 + at) == stays.add(amount, 1000 + at)

    moved.shift(seconds)

    now = 1080.0 + later_s
    assert moved.total(now + seconds) == stays.total(now)
    assert moved.wait_s(5, now + seconds) == stays.wait_s(5, now)
    assert moved.add(7, now + seconds) == stays.add(7, now) + seconds
    assert moved.take_back(3, int(now) + seconds, now + seconds)
    assert moved.total(now + seconds + 30) == stays.total(now + 30) - 3
