"""The router's numbers for Prometheus. No label has more values than a stated bound.

They are plain counts that the loop adds to, read at each scrape: a request is counted in a
microsecond.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

__all__ = ["OTHER", "AdapterNumbers", "Distribution", "RouterMetrics", "counters", "gauges"]

OTHER: Final = "other"
LABEL_IDLE_S: Final = 600.0
SECONDS: Final = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)


class Distribution:
    """A histogram of seconds."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """As Prometheus reads it."""
        running, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            running += count
            buckets.append((bound, running))
        family = HistogramMetricFamily(name, text)
        family.add_metric([], buckets, self._sum)
        return family


@dataclass(slots=True)
class AdapterNumbers:
    """What was asked of one exact version: to compare it with the one that it shall replace."""

    ok: int = 0
    client_errors: int = 0
    server_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    first_byte_s: float = 0.0
    """Summed over the answers that were ``ok``."""
    used_at: float = 0.0

    def add(self, other: AdapterNumbers) -> None:
        """Take over another's counts."""
        self.ok += other.ok
        self.client_errors += other.client_errors
        self.server_errors += other.server_errors
        self.prompt_tokens += other.prompt_tokens
        self.completion_tokens += other.completion_tokens
        self.first_byte_s += other.first_byte_s


@dataclass(slots=True)
class ReplicaNumbers:
    """Attempts at one replica, and those that failed by its fault."""

    attempts: int = 0
    failures: int = 0


@dataclass
class RouterMetrics:
    """Counts of requests; further collectors are read beside them."""

    max_adapter_labels: int = 50
    clock: Callable[[], float] = time.monotonic
    answers: Counter[int] = field(default_factory=Counter)
    """By status; 0: the client left first."""
    refusals: Counter[str] = field(default_factory=Counter)
    """What the router itself refused, by the error's code."""
    choices: Counter[str] = field(default_factory=Counter)
    retries: Counter[str] = field(default_factory=Counter)
    """``made``, or why not: ``attempts``, ``budget``, ``replicas``."""
    express: Counter[str] = field(default_factory=lambda: Counter(whole=0, unfolded=0, refused=0))
    """Of the express way: ``whole``, ``unfolded`` into an ordinary request, or ``refused``."""
    replicas: dict[str, ReplicaNumbers] = field(default_factory=dict)
    request_s: Distribution = field(default_factory=Distribution)
    first_byte_s: Distribution = field(default_factory=Distribution)
    queued_s: Distribution = field(default_factory=Distribution)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def __post_init__(self) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Requests(self))
        self._adapters: OrderedDict[str, AdapterNumbers] = OrderedDict()
        self._other = AdapterNumbers()

    def adapter(self, name: str, *, exists: bool) -> AdapterNumbers:
        """The counts that a request for an exact version goes to.

        Only a name that a replica has answered under (``exists``) gets a label of its own, so
        that names which somebody makes up take none; the others are counted as ``other``.
        """
        numbers, now = self._adapters.get(name), self.clock()
        if numbers is None:
            if not exists or not self._has_label_free(now):
                return self._other
            numbers = self._adapters[name] = AdapterNumbers()
        numbers.used_at = now
        self._adapters.move_to_end(name)
        return numbers

    def adapters(self) -> list[tuple[str, AdapterNumbers]]:
        """Label and counts; ``other`` last."""
        return [*sorted(self._adapters.items()), (OTHER, self._other)]

    def replica(self, name: str) -> ReplicaNumbers:
        """The counts of a replica."""
        numbers = self.replicas.get(name)
        if numbers is None:
            numbers = self.replicas[name] = ReplicaNumbers()
        return numbers

    def keep(self, replicas: frozenset[str]) -> None:
        """Forget the replicas that are gone."""
        for name in self.replicas.keys() - replicas:
            del self.replicas[name]

    def add(self, collector: Collector) -> None:
        """Have a further collector read at each scrape."""
        self._registry.register(collector)

    def families(self) -> list[Metric]:
        """Everything that a scrape would tell, as it is now."""
        return list(self._registry.collect())

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)

    def _has_label_free(self, now: float) -> bool:
        if len(self._adapters) < self.max_adapter_labels:
            return True
        name = next(iter(self._adapters), None)
        if name is None or now - self._adapters[name].used_at < LABEL_IDLE_S:
            return False
        # No series ever falls: this one ends, and its counts go on in "other".
        self._other.add(self._adapters.pop(name))
        return True


class _Requests(Collector):
    def __init__(self, metrics: RouterMetrics) -> None:
        self._metrics = metrics

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        metrics = self._metrics
        yield counters(
            "mural_router_requests",
            "Requests that ended, by the status of the answer (0: the client left first).",
            "status",
            {str(status): count for status, count in metrics.answers.items()},
        )
        yield counters(
            "mural_router_refused",
            "Requests that the router itself refused, by the error's code.",
            "code",
            metrics.refusals,
        )
        yield counters(
            "mural_router_choices", "Choices of a replica, by reason.", "reason", metrics.choices
        )
        yield counters(
            "mural_router_retries",
            "Retries that were made, or why not.",
            "outcome",
            metrics.retries,
        )
        yield counters(
            "mural_router_express",
            "Requests of the express way: answered whole, unfolded into ordinary ones, refused.",
            "outcome",
            metrics.express,
        )
        tokens = {"prompt": metrics.prompt_tokens, "completion": metrics.completion_tokens}
        yield counters("mural_router_tokens", "Tokens that replicas told of.", "kind", tokens)
        yield metrics.request_s.family(
            "mural_router_request_seconds", "From a request's arrival to its answer's end."
        )
        yield metrics.first_byte_s.family(
            "mural_router_first_byte_seconds", "From a request's arrival to its answer's start."
        )
        yield metrics.queued_s.family(
            "mural_router_queue_seconds", "Waiting for capacity, of the requests that had to."
        )
        yield from self._by_replica()
        yield from self._by_adapter()

    def _by_replica(self) -> Iterator[Metric]:
        replicas = self._metrics.replicas
        yield counters(
            "mural_router_replica_attempts",
            "Requests sent to a replica.",
            "replica",
            {name: numbers.attempts for name, numbers in replicas.items()},
        )
        yield counters(
            "mural_router_replica_failures",
            "Attempts that failed by the replica's fault.",
            "replica",
            {name: numbers.failures for name, numbers in replicas.items()},
        )

    def _by_adapter(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "mural_router_adapter_requests",
            "Requests by exact version and outcome; the less asked for are 'other'.",
            labels=["adapter", "outcome"],
        )
        tokens = CounterMetricFamily(
            "mural_router_adapter_tokens", "Tokens by version.", labels=["adapter", "kind"]
        )
        waited = CounterMetricFamily(
            "mural_router_adapter_first_byte_seconds",
            "Time to the first byte, summed over the requests with outcome 'ok'.",
            labels=["adapter"],
        )
        for name, numbers in self._metrics.adapters():
            requests.add_metric([name, "ok"], numbers.ok)
            requests.add_metric([name, "client_error"], numbers.client_errors)
            requests.add_metric([name, "server_error"], numbers.server_errors)
            tokens.add_metric([name, "prompt"], numbers.prompt_tokens)
            tokens.add_metric([name, "completion"], numbers.completion_tokens)
            waited.add_metric([name], numbers.first_byte_s)
        yield from (requests, tokens, waited)


def counters(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A family of counters with one label."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value in sorted(values):
        family.add_metric([value], values[value])
    return family


def gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    """A family of gauges with one label."""
    family = GaugeMetricFamily(name, text, labels=[label])
    for value in sorted(values):
        family.add_metric([value], values[value])
    return family
