"""How often a router asks again."""

from __future__ import annotations

import pytest

from mural_router.routing.retry import RetryBudget, RetrySettings, may_ask_again


def spend(budget: RetryBudget, now: float) -> int:
    taken = 0
    while budget.take(now):
        taken += 1
    return taken


def test_without_traffic_a_window_has_its_minimum() -> None:
    budget = RetryBudget(RetrySettings(ratio=0.2, min_per_s=3))
    assert spend(budget, 0.0) == 30
    assert spend(budget, 0.0) == 0


def test_under_an_outage_retries_are_a_share_of_the_requests() -> None:
    budget = RetryBudget(RetrySettings(ratio=0.2, min_per_s=0))
    retries = 0
    for at in range(10_000):
        now = at / 1_000
        budget.request(now)
        retries += budget.take(now)
    assert retries == pytest.approx(2_000, rel=0.05)


def test_what_was_saved_up_is_gone_after_a_window() -> None:
    budget = RetryBudget(RetrySettings(ratio=0.2, min_per_s=1))
    for _ in range(1_000):
        budget.request(0.0)
    assert spend(budget, 10.0) == 10


def test_a_clock_that_jumps_back_gives_nothing() -> None:
    budget = RetryBudget(RetrySettings(ratio=0, min_per_s=1))
    spend(budget, 100.0)
    assert not budget.take(50.0)


@pytest.mark.parametrize(
    ("engine", "status", "mark", "again"),
    [
        ("mural", 503, "elsewhere", True),
        ("mural", 503, None, False),
        ("mural", 502, None, True),
        ("mural", 429, "elsewhere", False),
        ("mural", 500, None, False),
        ("vllm", 503, None, True),
        ("vllm", 500, None, False),
        ("vllm", 404, None, False),
        ("vllm", 401, None, True),
        ("mural", 401, None, True),
    ],
)
def test_only_refusals_before_any_work_are_asked_again(
    engine: str, status: int, mark: str | None, again: bool
) -> None:
    assert may_ask_again("vllm" if engine == "vllm" else "mural", status, mark) is again
