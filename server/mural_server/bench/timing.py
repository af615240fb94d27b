"""Times of requests, and what is made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

__all__ = [
    "Latency",
    "RequestTimes",
    "Sample",
    "first_token_times",
    "inter_token_times",
    "latency",
    "percentile",
]


class RequestTimes(msgspec.Struct):
    """One request's moments, in seconds of one clock."""

    sent: float
    arrivals: list[float]
    """When something came: a token, or over HTTP an event, which may hold more than one."""
    output_tokens: int


class Sample(msgspec.Struct, kw_only=True):
    """One round of one group."""

    seconds: float
    """From before the first request is sent until the last answer is whole."""
    requests: list[RequestTimes]
    token_ids: list[list[int]] = []
    """Each request's answer, where it comes as token ids."""
    prefix_hits: int | None = None
    """Prompt tokens from the prefix cache; None where there is none."""
    cold_adapters: int | None = None
    """Distinct adapters that were not in host memory when the round began."""

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds


class Latency(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    count: int


def latency(seconds: Iterable[float]) -> Latency:
    """Percentiles of what is given in seconds; all zero when that is nothing."""
    values = sorted(seconds)
    if not values:
        return Latency(0.0, 0.0, 0.0, 0)
    return Latency(
        1e3 * percentile(values, 0.5), 1e3 * percentile(values, 0.99), 1e3 * values[-1], len(values)
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (nearest rank)."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def first_token_times(samples: Iterable[Sample]) -> Iterable[float]:
    for sample in samples:
        for request in sample.requests:
            yield request.arrivals[0] - request.sent


def inter_token_times(samples: Iterable[Sample]) -> Iterable[float]:
    for sample in samples:
        for request in sample.requests:
            yield from (b - a for a, b in zip(request.arrivals, request.arrivals[1:], strict=False))
