"""Traffic to replay: who asks for what, when, and what happens to the fleet meanwhile."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

__all__ = ["TRACES", "Arrival", "Outage", "Trace"]

PREFIXES = 8
"""Of each adapter's prompts, by falling popularity: system prompts and documents."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request."""

    at_s: float
    adapter: str
    prefix: int
    """Requests with the same one share the first `shared_tokens` of their prompts."""
    shared_tokens: int
    own_tokens: int
    output_tokens: int
    rank: int = 16
    """Of the adapter."""


@dataclass(frozen=True, slots=True)
class Outage:
    """A replica dies and comes back empty."""

    replica: int
    from_s: float
    to_s: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Arrivals in order of time, and outages."""

    name: str
    arrivals: tuple[Arrival, ...]
    outages: tuple[Outage, ...] = ()


def _poisson(
    rng: random.Random, length_s: float, peak: float, rate: Callable[[float], float]
) -> Iterator[float]:
    """Times of arrival at ``rate(t)`` a second, none above ``peak``: by thinning."""
    at_s = 0.0
    while (at_s := at_s + rng.expovariate(peak)) < length_s:
        if rng.random() * peak < rate(at_s):
            yield at_s


class _Popularity:
    """Draws a rank from 0 by Zipf's law."""

    def __init__(self, count: int, exponent: float) -> None:
        self._ranks = range(count)
        self._cumulated = list(accumulate((rank + 1) ** -exponent for rank in self._ranks))

    def draw(self, rng: random.Random) -> int:
        return rng.choices(self._ranks, cum_weights=self._cumulated)[0]


class _Prompts:
    """Gives each arrival a prompt and an answer of exponential lengths."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._prefixes = _Popularity(PREFIXES, 1.0)

    def ask(self, at_s: float, adapter: int) -> Arrival:
        rng = self._rng
        return Arrival(
            at_s=at_s,
            adapter=f"tenant-{adapter % 97}/adapter-{adapter}:v1",
            prefix=adapter * PREFIXES + self._prefixes.draw(rng),
            shared_tokens=768,
            own_tokens=1 + round(rng.expovariate(1 / 128)),
            output_tokens=1 + round(rng.expovariate(1 / 100)),
        )


def zipf(length_s: float, rate: float, adapters: int, seed: int = 1) -> Trace:
    """Steady traffic; the adapter of rank r is asked for in proportion to 1/r."""
    rng = random.Random(seed)
    popularity, prompts = _Popularity(adapters, 1.0), _Prompts(rng)
    times = _poisson(rng, length_s, rate, lambda _: rate)
    return Trace("Zipf", tuple(prompts.ask(at_s, popularity.draw(rng)) for at_s in times))


def diurnal(length_s: float, rate: float, adapters: int, seed: int = 2) -> Trace:
    """Two days in little: the rate swings by 60 % about the mean, and who is popular moves on."""
    rng = random.Random(seed)
    popularity, prompts = _Popularity(adapters, 1.0), _Prompts(rng)

    def swing(at_s: float) -> float:
        return 0.75 * rate * (1 - 0.6 * math.cos(4 * math.pi * at_s / length_s))

    def ask(at_s: float) -> Arrival:
        # Each twelfth of the trace another region wakes up.
        awake = int(12 * at_s / length_s) * (adapters // 24)
        return prompts.ask(at_s, (popularity.draw(rng) + awake) % adapters)

    times = _poisson(rng, length_s, 1.2 * rate, swing)
    return Trace("diurnal", tuple(ask(at_s) for at_s in times))


def exploding(length_s: float, rate: float, adapters: int, seed: int = 3) -> Trace:
    """Zipf, but for the middle third half of all requests ask for one adapter of no renown."""
    rng = random.Random(seed)
    popularity, prompts = _Popularity(adapters, 1.0), _Prompts(rng)

    def ask(at_s: float) -> Arrival:
        exploded = length_s / 3 <= at_s < 2 * length_s / 3 and rng.random() < 0.5
        return prompts.ask(at_s, adapters // 2 if exploded else popularity.draw(rng))

    times = _poisson(rng, length_s, rate, lambda _: rate)
    return Trace("one explodes", tuple(ask(at_s) for at_s in times))


def loss(length_s: float, rate: float, adapters: int, seed: int = 4) -> Trace:
    """Zipf; a replica is gone for a quarter of the time and comes back with nothing in memory."""
    steady = zipf(length_s, rate, adapters, seed)
    return Trace("replica lost", steady.arrivals, (Outage(2, length_s / 2, 3 * length_s / 4),))


def mixed(length_s: float, rate: float, adapters: int, seed: int = 5) -> Trace:
    """Zipf; one adapter in four is of rank 64 and the others of rank 8, without regard to who is
    popular."""
    steady = zipf(length_s, rate, adapters, seed)
    rng = random.Random(seed)
    ranks: dict[str, int] = {}
    arrivals = []
    for arrival in steady.arrivals:
        if arrival.adapter not in ranks:
            ranks[arrival.adapter] = rng.choices((8, 64), (3, 1))[0]
        arrivals.append(replace(arrival, rank=ranks[arrival.adapter]))
    return Trace("mixed ranks", tuple(arrivals))


TRACES = (zipf, diurnal, exploding, loss, mixed)
