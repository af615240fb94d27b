"""A source that hangs costs one timeout, not one for each look-up."""

from __future__ import annotations

import pytest

from mural_resolvers.errors import Unavailable
from mural_resolvers.source_health import SourceHealth


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> SourceHealth:
    return SourceHealth(2.0, 5.0, clock)


def hang(health: SourceHealth) -> None:
    with pytest.raises(TimeoutError), health.asking():
        raise TimeoutError


def answer(health: SourceHealth) -> None:
    with health.asking():
        pass


def refused_for(health: SourceHealth) -> float | None:
    with pytest.raises(Unavailable) as caught, health.asking():
        raise AssertionError("it was asked")
    return caught.value.retry_after_s


def test_a_source_that_hangs_is_left_alone_for_a_while(health: SourceHealth, clock: Clock) -> None:
    hang(health)
    assert refused_for(health) == 5.0
    clock.now += 4.5
    assert refused_for(health) == 1.0
    assert health.is_down
    clock.now += 0.5
    answer(health)
    answer(health)
    assert not health.is_down


def test_one_question_at_a_time_tries_it_again(health: SourceHealth, clock: Clock) -> None:
    hang(health)
    clock.now += 5.0
    with health.asking():
        assert refused_for(health) == 1.0
    answer(health)


def test_a_probe_that_hangs_too_begins_the_wait_anew(health: SourceHealth, clock: Clock) -> None:
    hang(health)
    clock.now += 5.0
    hang(health)
    assert refused_for(health) == 5.0


def test_a_probe_that_is_given_up_leaves_the_next_one_to_try(
    health: SourceHealth, clock: Clock
) -> None:
    hang(health)
    clock.now += 5.0
    with pytest.raises(KeyboardInterrupt), health.asking():
        raise KeyboardInterrupt
    answer(health)


def test_one_slow_name_does_not_make_a_source_hang_that_answers_others(
    health: SourceHealth, clock: Clock
) -> None:
    def time_out_beside_an_answer() -> None:
        with health.asking():
            clock.now += 5.0
            answer(health)
            clock.now += 5.0
            raise TimeoutError

    with pytest.raises(TimeoutError):
        time_out_beside_an_answer()
    answer(health)


def test_a_source_that_says_that_it_is_down_may_be_asked_again(
    health: SourceHealth, clock: Clock
) -> None:
    hang(health)
    clock.now += 5.0
    with pytest.raises(Unavailable, match="down"), health.asking():
        raise Unavailable("down")
    assert health.is_down
    with health.asking():
        assert health.is_down
    assert not health.is_down
