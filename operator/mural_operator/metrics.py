"""What the operator counts, for Prometheus. Labels are bounded: by the pools, or by lists here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, Protocol

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector, generate_latest
from prometheus_client import Counter as CounterFamily
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["Freshness", "Metrics"]

RECONCILE_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ACTION_S: Final = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
STATUSES: Final = frozenset({0, 400, 401, 403, 404, 409, 413, 422, 429, 500, 502, 503, 504})


class Freshness(Protocol):
    """What is asked of a `mural_resolvers.kubernetes.watch.Watch`."""

    @property
    def synced(self) -> bool:
        """Whether a list has succeeded at least once."""

    @property
    def fresh(self) -> bool:
        """Whether it is being watched now."""

    @property
    def trouble(self) -> str:
        """Why it is not; empty: it is."""


class Metrics:
    """One operator's numbers: events are told, states are asked for at each scrape.

    ``watches`` are by the kind of object, such as ``adapters``. ``adapters`` gives how many
    `Adapter` objects have which status of which condition: (type, status) → count.
    """

    def __init__(
        self,
        *,
        watches: Callable[[], Mapping[str, Freshness]],
        calls: Callable[[], Mapping[str, int]],
        leading: Callable[[], bool],
        adapters: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        """All four are called at each scrape and must not block."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.events_dropped = 0
        """Set by whoever records events."""
        self._reconciles = CounterFamily(
            "mural_operator_reconciles",
            "Times that a pool was reconciled; outcome is ok or error.",
            ("pool", "outcome"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "mural_operator_reconcile_seconds",
            "Time of one reconcile, without the actions that follow from it.",
            ("pool",),
            buckets=RECONCILE_S,
            registry=self.registry,
        )
        self._actions = Histogram(
            "mural_operator_action_seconds",
            "Time until a replica had answered to an action; outcome is ok, refused or no_answer.",
            ("action", "outcome"),
            buckets=ACTION_S,
            registry=self.registry,
        )
        self._refusals = CounterFamily(
            "mural_operator_refusals",
            "Answers of replicas other than success, by their status; 0 for none.",
            ("action", "status"),
            registry=self.registry,
        )
        self._status_writes = CounterFamily(
            "mural_operator_status_writes",
            "Status written to the API server; outcome is ok, conflict, gone or error.",
            ("kind", "outcome"),
            registry=self.registry,
        )
        self._recorded: Counter[str] = Counter()
        self.registry.register(_States(self, watches, calls, leading, adapters))

    def reconciled(self, pool: str, seconds: float, *, ok: bool = True) -> None:
        """A pool was reconciled."""
        self._reconciles.labels(pool, "ok" if ok else "error").inc()
        self._seconds.labels(pool).observe(seconds)

    def acted(self, action: str, seconds: float, refused: int | None = None) -> None:
        """An action, such as ``Load``, was done, or refused with a status (0: no answer)."""
        outcome = "ok" if refused is None else "refused" if refused else "no_answer"
        self._actions.labels(action, outcome).observe(seconds)
        if refused is not None:
            # A pod that lies may answer with any number.
            self._refusals.labels(action, str(refused) if refused in STATUSES else "other").inc()

    def wrote_status(self, kind: str, outcome: str) -> None:
        """The status of an object of a kind was written, or could not be."""
        self._status_writes.labels(kind, outcome).inc()

    def recorded(self, kind: str) -> None:
        """An event of a type (Normal or Warning) was sent to the API server."""
        self._recorded[kind] += 1

    def forget(self, pool: str) -> None:
        """The pool is gone: its series go, too."""
        for family, labels in (
            (self._reconciles, (pool, "ok")),
            (self._reconciles, (pool, "error")),
            (self._seconds, (pool,)),
        ):
            with suppress(KeyError):
                family.remove(*labels)

    def exposition(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self.registry)

    def events(self) -> Mapping[str, int]:
        """Those sent, by type."""
        return self._recorded


class _States(Collector):
    """What is asked for at each scrape."""

    def __init__(
        self,
        metrics: Metrics,
        watches: Callable[[], Mapping[str, Freshness]],
        calls: Callable[[], Mapping[str, int]],
        leading: Callable[[], bool],
        adapters: Callable[[], Mapping[tuple[str, str], int]],
    ) -> None:
        self._metrics = metrics
        self._watches = watches
        self._calls = calls
        self._leading = leading
        self._adapters = adapters

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "mural_operator_leading",
            "1 on the one that acts.",
            value=float(self._leading()),
        )
        fresh = GaugeMetricFamily(
            "mural_operator_watch_fresh",
            "1 while the objects of a kind are being watched, 0 during an outage.",
            labels=("objects",),
        )
        for name, watch in self._watches().items():
            fresh.add_metric((name,), float(watch.synced and watch.fresh))
        yield fresh
        calls = CounterMetricFamily(
            "mural_operator_api_calls",
            "Requests to the API server, by verb.",
            labels=("verb",),
        )
        for verb, count in self._calls().items():
            calls.add_metric((verb,), count)
        yield calls
        adapters = GaugeMetricFamily(
            "mural_operator_adapters",
            "Adapter objects, by a condition's type and status.",
            labels=("condition", "status"),
        )
        for (condition, status), count in self._adapters().items():
            adapters.add_metric((condition, status), count)
        yield adapters
        yield from self._of_events()

    def _of_events(self) -> Iterator[Metric]:
        sent = CounterMetricFamily(
            "mural_operator_events", "Events sent to the API server, by type.", labels=("type",)
        )
        for kind, count in self._metrics.events().items():
            sent.add_metric((kind,), count)
        yield sent
        yield CounterMetricFamily(
            "mural_operator_events_dropped",
            "Events that were not sent: more at once than the queue holds, or refused.",
            value=self._metrics.events_dropped,
        )
