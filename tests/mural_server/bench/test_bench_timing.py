"""Percentiles and what is derived from requests' times."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_server.bench.timing import (
    RequestTimes,
    Sample,
    first_token_times,
    inter_token_times,
    latency,
    percentile,
)


@given(st.lists(st.floats(0, 100), min_size=1), st.sampled_from([0.01, 0.5, 0.99, 1.0]))
def test_a_percentile_is_numpys_by_nearest_rank(values: list[float], share: float) -> None:
    ordered = sorted(values)
    assert percentile(ordered, share) == np.quantile(ordered, share, method="inverted_cdf")


def test_latencies_are_milliseconds_with_the_maximum() -> None:
    found = latency([0.003, 0.001, 0.002])
    assert (found.p50_ms, found.p99_ms, found.max_ms, found.count) == pytest.approx((2, 3, 3, 3))


def test_no_values_give_no_latency() -> None:
    assert latency([]).count == 0


def test_first_and_later_tokens_are_told_apart() -> None:
    sample = Sample(
        seconds=2.0,
        requests=[RequestTimes(1.0, [1.5, 1.75, 2.75], 3), RequestTimes(1.0, [2.0], 1)],
    )
    assert list(first_token_times([sample])) == [0.5, 1.0]
    assert list(inter_token_times([sample])) == [0.25, 1.0]
    assert sample.tokens_per_s == 2.0
