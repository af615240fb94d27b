"""What metrics read off the running parts at each scrape."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from mural_resolvers.watched_file import WatchNumbers
from mural_router.objects import FileObjects
from mural_router.routing.metrics import counters, gauges
from mural_router.running import Router

__all__ = ["RouterCollector"]

BREAKER_VALUES = {"closed": 0.0, "half_open": 0.5, "open": 1.0}


class RouterCollector(Collector):
    """Fleet, breakers, queue, limits, log, settings, objects, and the proxy's connections."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def describe(self) -> list[Metric]:
        """Nothing before it is asked: its values come and go with the fleet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Read everything."""
        yield from self._fleet()
        yield from self._waiting()
        yield from self._settings()
        yield from self._objects()
        yield from self._proxy()

    def _fleet(self) -> Iterator[Metric]:
        router = self._router
        replicas = router.fleet.fleet.replicas
        yield gauges(
            "mural_router_replica_ready",
            "1: the replica accepts requests, as far as it is known.",
            "replica",
            {each.name: float(each.ready) for each in replicas},
        )
        yield gauges(
            "mural_router_replica_stale",
            "1: it has not been heard of for too long.",
            "replica",
            {each.name: float(each.stale) for each in replicas},
        )
        ledger = router.dispatch.ledger
        yield gauges(
            "mural_router_replica_in_flight",
            "This router's own sequences on a replica.",
            "replica",
            {each.name: float(ledger.in_flight(each.name)) for each in replicas},
        )
        states = router.breakers.states(router.dispatch.now)
        yield gauges(
            "mural_router_replica_breaker",
            "0: closed, 0.5: half-open, 1: open.",
            "replica",
            {each.name: BREAKER_VALUES[states.get(each.name, "closed")] for each in replicas},
        )

    def _waiting(self) -> Iterator[Metric]:
        queue = self._router.queue.snapshot()
        yield gauges(
            "mural_router_queue",
            "Requests that wait for capacity, the tenants that they are of, and the longest queue.",
            "what",
            {"waiting": queue.waiting, "tenants": queue.tenants, "longest": queue.longest},
        )
        yield counters(
            "mural_router_queue_refused",
            "Refused since the tenant's queue was full, or since there was no capacity in time.",
            "reason",
            {"full": queue.full, "late": queue.late},
        )
        limits = self._router.limiter.snapshot(0)
        yield counters(
            "mural_router_limit_refused",
            "Refused since a tenant's limit was met.",
            "limit",
            {str(kind): count for kind, count in limits.refused.items()},
        )
        yield gauges(
            "mural_router_limits",
            "Whether limits are counted with other routers, and for how long that is out of reach.",
            "what",
            {"shared": float(limits.shared), "away_seconds": limits.away_s or 0.0},
        )

    def _settings(self) -> Iterator[Metric]:
        router, numbers = self._router, self._router.config.numbers
        reloads = {"taken": numbers.reloads, "refused": numbers.refused}
        yield counters("mural_router_settings_reloads", "Changed settings files.", "as", reloads)
        stale = {"settings": float(numbers.stale)}
        files = self._files()
        stale |= {name: float(numbers.stale) for name, numbers in files.items()}
        yield gauges(
            "mural_router_file_stale",
            "1: what lies on disk is not what is in force.",
            "file",
            stale,
        )
        now = time.time()
        yield gauges(
            "mural_router_file_age_seconds",
            "Since it was taken.",
            "file",
            {name: now - numbers.loaded_at.timestamp() for name, numbers in files.items()},
        )
        yield counters(
            "mural_router_version_lookups_failed",
            "Look-ups of aliases that the store could not answer.",
            "source",
            {"store": router.versions.failed},
        )
        if router.log is not None:
            lines = {"written": router.log.written, "lost": router.log.lost}
            yield counters("mural_router_access_log_lines", "Lines of the access log.", "as", lines)

    def _files(self) -> dict[str, WatchNumbers]:
        router = self._router
        named = {
            "tenants": router.tenants,
            "aliases": router.aliases,
            "objects": router.objects if isinstance(router.objects, FileObjects) else None,
        }
        read = {name: file.numbers for name, file in named.items() if file is not None}
        return read | {name: watch.numbers for name, watch in router.file_watches().items()}

    def _objects(self) -> Iterator[Metric]:
        objects = self._router.objects
        states = () if objects is None else objects.states()
        yield gauges(
            "mural_router_objects",
            "What objects have put in force: tenants, their keys, adapters, aliases.",
            "kind",
            {state.kind: state.in_force for state in states},
        )
        yield gauges(
            "mural_router_objects_refused",
            "Objects that do not count; /debug/objects says why.",
            "kind",
            {state.kind: len(state.refused) for state in states},
        )
        yield gauges(
            "mural_router_objects_kept",
            "Objects that cannot be read, whose last readable state stays in force; "
            "/debug/objects says why.",
            "kind",
            {state.kind: len(state.kept) for state in states},
        )
        yield gauges(
            "mural_router_objects_stale",
            "1: they cannot be followed now, and what was known stays in force.",
            "kind",
            {state.kind: float(state.stale) for state in states},
        )
        yield counters(
            "mural_router_kubernetes_calls",
            "Calls of the API server, each watch one.",
            "verb",
            self._router.cluster.calls,
        )

    def _proxy(self) -> Iterator[Metric]:
        if self._router.proxy is None:
            return
        state = self._router.proxy.state()
        yield gauges(
            "mural_router_connections",
            "Open connections.",
            "side",
            {"client": state.connections, "replica_idle": state.idle_replica_connections},
        )
        yield gauges(
            "mural_router_http_in_flight",
            "Requests that are not answered to the end, and the bytes of their bodies.",
            "what",
            {"requests": state.requests, "buffered_bytes": state.buffered_bytes},
        )
        yield counters(
            "mural_router_http",
            "Requests on the clients' port, those refused as no proper HTTP, and connections that "
            "were opened to replicas.",
            "what",
            {
                "requests": state.requests_total,
                "refused": state.refused_total,
                "replica_connections": state.replica_connections_opened,
            },
        )
