"""When a replica is left alone, and how it comes back."""

from __future__ import annotations

from mural_router.routing.breaker import Breaker, Breakers, BreakerSettings

SETTINGS = BreakerSettings(failures=3, open_s=2.0)


def breaker() -> Breaker:
    return Breaker(SETTINGS, draw=lambda: 0.5)


def opened(at: float = 0.0) -> Breaker:
    made = breaker()
    for _ in range(SETTINGS.failures):
        made.failed(object(), at)
    return made


def test_it_opens_after_failures_in_a_row_only() -> None:
    one = breaker()
    for _ in range(10):
        one.failed(object(), 0.0)
        one.failed(object(), 0.0)
        one.succeeded(object())
    assert one.state(0.0) == "closed"
    assert opened().state(0.0) == "open"
    assert not opened().allows(1.9)


def test_half_open_lets_one_probe_through_at_a_time() -> None:
    one = opened()
    assert one.state(2.0) == "half_open"
    assert one.allows(2.0)
    probe = object()
    one.begin(probe, 2.0)
    assert not one.allows(2.0)
    one.ended(probe)
    assert one.allows(2.0)


def test_a_good_probe_closes_it_and_a_bad_one_doubles_the_time() -> None:
    one, probe = opened(), object()
    one.begin(probe, 2.0)
    one.failed(probe, 2.5)
    assert not one.allows(6.4)
    assert one.allows(6.5)
    one.begin(probe, 6.5)
    one.succeeded(probe)
    assert one.state(6.5) == "closed"
    assert one.allows(6.5)


def test_the_time_stops_doubling() -> None:
    one, now = opened(), 2.0
    for _ in range(20):
        probe = object()
        one.begin(probe, now)
        one.failed(probe, now)
        now += 64.0
        assert one.allows(now)


def test_answers_to_what_was_asked_before_it_broke_say_nothing() -> None:
    one = opened()
    one.succeeded(object())
    assert one.state(0.0) == "open"
    one.failed(object(), 1.0)
    assert one.allows(2.0)


def test_all_breakers_tell_whom_to_leave_alone_and_forget_who_is_gone() -> None:
    breakers = Breakers(SETTINGS, draw=lambda: 0.5)
    for _ in range(SETTINGS.failures):
        breakers.failed("a", object(), 0.0)
        breakers.succeeded("b", object(), 0.0)
    breakers.failed("b", object(), 0.0)
    assert breakers.excluded(0.0) == {"a"}
    assert breakers.states(0.0) == {"a": "open", "b": "closed"}
    breakers.keep(frozenset({"b"}))
    assert breakers.excluded(0.0) == frozenset()
    assert breakers.states(0.0) == {"b": "closed"}
