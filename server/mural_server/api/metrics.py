"""``/metrics``: the names that gateways read from vLLM, the proposed residency ones, and ours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from mural_resolvers.audit import AuditLog
from mural_resolvers.disk_cache import CacheUsage
from mural_resolvers.fetcher import AdapterFetcher
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.tenants import TenantAccounts, TenantsFile
from mural_resolvers.uploads import UploadCounts
from mural_server.api.admission import Admission
from mural_server.api.traffic import LabelledTokens, Traffic
from mural_server.catalog import AdapterCatalog
from mural_server.engine.client import EngineClient

__all__ = ["AccessCollector", "Metrics", "SourcesCollector", "UploadsCollector"]

FIRST_TOKEN_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
TOKEN_BUCKETS_S = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0),
)
USAGE_S = 1.0
LATENCY_BUCKETS_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class Metrics:
    """Histograms and counters of the API process, and a reading of the core at each scrape."""

    def __init__(
        self,
        client: EngineClient,
        catalog: AdapterCatalog,
        admission: Admission,
        traffic: Traffic,
        *,
        max_adapter_labels: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = CollectorRegistry()
        self._model = catalog.served[0]
        self.traffic = traffic
        self.adapter_tokens = LabelledTokens(traffic, max_adapter_labels)
        self._registry.register(
            _CoreCollector(client, catalog, admission, self.adapter_tokens, clock)
        )
        self.first_token_s = self._histogram(
            "vllm:time_to_first_token_seconds",
            "From the arrival of a request to its first token, queue and load included.",
            FIRST_TOKEN_BUCKETS_S,
        )
        self.queued_s = self._histogram(
            "vllm:request_queue_time_seconds",
            "From the arrival of a request to the step that first computed some of it.",
            FIRST_TOKEN_BUCKETS_S,
        )
        self.inter_token_s = self._histogram(
            "vllm:inter_token_latency_seconds",
            "Between two steps that gave a request tokens.",
            TOKEN_BUCKETS_S,
        )
        self.latency_s = self._histogram(
            "vllm:e2e_request_latency_seconds",
            "From the arrival of a request to its last token.",
            LATENCY_BUCKETS_S,
        )
        self._success = Counter(
            "vllm:request_success",
            "Sequences that ended by themselves.",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        self._refused = Counter(
            "mural:http_errors",
            "Requests answered with an error.",
            ("status",),
            registry=self._registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(name, text, ("model_name",), buckets=buckets, registry=self._registry)
        return family.labels(self._model)

    def finished(self, reason: str) -> None:
        """Count one sequence that ended with ``stop`` or ``length``."""
        self._success.labels(self._model, reason).inc()

    def error(self, status: int) -> None:
        """Count one error answer."""
        self._refused.labels(str(status)).inc()

    def add(self, collector: Collector) -> None:
        """Have a further collector read at each scrape."""
        self._registry.register(collector)

    def exposition(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self._registry)


class _CoreCollector(Collector):
    """Reads the core's latest snapshot whenever it is scraped."""

    def __init__(
        self,
        client: EngineClient,
        catalog: AdapterCatalog,
        admission: Admission,
        adapter_tokens: LabelledTokens,
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._admission = admission
        self._adapter_tokens = adapter_tokens
        self._clock = clock
        self._model = catalog.served[0]

    def describe(self) -> list[Metric]:
        # Without this the registry would collect, and touch the core, when registering.
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._cache()
        yield from self._counters()
        yield from self._lora_activity()
        yield from self._residency()
        yield from self._by_adapter()

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _load(self) -> Iterator[Metric]:
        stats = self._client.stats()
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch.", stats.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences not started.", stats.waiting)
        yield self._gauge(
            "mural:num_requests_paused", "Sequences that gave their slot away.", stats.paused
        )
        yield self._gauge(
            "mural:open_sequences", "Sequences accepted over HTTP.", self._admission.open_sequences
        )
        yield self._gauge("mural:engine_alive", "1 while the core lives.", self._client.alive)

    def _cache(self) -> Iterator[Metric]:
        stats = self._client.stats()
        yield self._gauge("vllm:kv_cache_usage_perc", "KV blocks in use, 0 to 1.", stats.kv_usage)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache, in labels.",
            labels=["block_size", "num_gpu_blocks"],
        )
        info = self._client.info
        config.add_metric([str(info.block_size), str(info.num_blocks)], 1)
        yield config

    def _counters(self) -> Iterator[Metric]:
        stats = self._client.stats()
        for name, text, value in (
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            ("vllm:prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            ("vllm:prompt_tokens", "Prompt tokens computed.", stats.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", stats.generation_tokens),
            ("vllm:num_preemptions", "Sequences put back for lack of blocks.", stats.preemptions),
            ("mural:engine_steps", "Steps of the core.", stats.steps),
        ):
            yield self._counter(name, text, value)

    def _lora_activity(self) -> Iterator[Metric]:
        stats = self._client.stats()
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters at work, in labels; the value is the time of the reading.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        # Absent until there is an adapter: readers take that for "none yet".
        if stats.adapters or stats.running_adapters or stats.waiting_adapters:
            family.add_metric(
                [
                    str(self._client.info.max_loras),
                    ",".join(sorted(set(stats.running_adapters))),
                    ",".join(sorted(set(stats.waiting_adapters))),
                ],
                self._clock(),
            )
        yield family

    def _residency(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "1 for each resident adapter.",
            labels=["adapter_name", "level", "pinned", "rank"],
        )
        in_slots: set[str] = set()
        for view in self._catalog.view():
            if view.state == "disk":
                continue
            level = "gpu" if view.state == "slot" else "cpu"
            if level == "gpu":
                in_slots.add(view.digest)
            loaded.add_metric([view.name, level, str(view.pinned).lower(), str(view.rank)], 1)
        yield loaded
        yield self._gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters in slots.", len(in_slots))
        yield self._gauge("vllm:max_gpu_lora_adapters", "Slots.", self._client.info.max_loras)

    def _by_adapter(self) -> Iterator[Metric]:
        prompt = CounterMetricFamily(
            "mural:adapter_prompt_tokens", "Prompt tokens by adapter.", labels=["adapter_name"]
        )
        generation = CounterMetricFamily(
            "mural:adapter_generation_tokens",
            "Tokens generated, by adapter.",
            labels=["adapter_name"],
        )
        for name, prompt_tokens, generation_tokens in self._adapter_tokens.totals():
            prompt.add_metric([name], prompt_tokens)
            generation.add_metric([name], generation_tokens)
        yield prompt
        yield generation


class AccessCollector(Collector):
    """What became of the tenants file, of their limits and of the audit log."""

    def __init__(
        self, tenants: TenantsFile | None, accounts: TenantAccounts, audit: AuditLog
    ) -> None:
        self._tenants = tenants
        self._accounts = accounts
        self._audit = audit

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        if self._tenants is not None:
            yield from self._of_the_file(self._tenants)
        limited = CounterMetricFamily(
            "mural:rate_limited", "Requests over a limit of their tenant.", labels=["limit"]
        )
        for kind in ("requests", "tokens", "concurrency"):
            limited.add_metric([kind], self._accounts.refused[kind])
        yield limited
        records = CounterMetricFamily(
            "mural:audit_records",
            "Actions of admins, by whether they could be noted.",
            labels=["result"],
        )
        numbers = self._audit.numbers
        records.add_metric(["written"], numbers.written)
        records.add_metric(["failed"], numbers.failed)
        yield records

    def _of_the_file(self, tenants: TenantsFile) -> Iterator[Metric]:
        numbers = tenants.numbers
        reloads = CounterMetricFamily(
            "mural:tenants_file_reloads",
            "Changed contents of the tenants file, by whether they were taken.",
            labels=["result"],
        )
        reloads.add_metric(["taken"], numbers.reloads)
        reloads.add_metric(["refused"], numbers.refused)
        yield reloads
        yield GaugeMetricFamily(
            "mural:tenants_file_stale",
            "1 while the tenants file is refused and an earlier content is in force.",
            value=numbers.stale,
        )
        yield GaugeMetricFamily(
            "mural:tenants_file_loaded_timestamp_seconds",
            "When the content in force was read.",
            value=numbers.loaded_at.timestamp(),
        )


class SourcesCollector(Collector):
    """What downloads cost, and what the disk cache held when that was last read."""

    def __init__(self, registry: LoRAResolverRegistry) -> None:
        self._registry = registry
        self._usage: CacheUsage | None = None
        self._reading: asyncio.Task[CacheUsage | None] | None = None

    async def refresh(self) -> None:
        """Read the cache's usage, beside the loop; wait for a busy or hung disk a moment only."""
        fetcher = self._registry.fetcher
        if fetcher is None:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(fetcher.usage(), name="cache usage")
        await asyncio.wait({self._reading}, timeout=USAGE_S)
        if self._reading.done():
            self._usage = self._reading.result()

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        down = GaugeMetricFamily(
            "mural:adapter_source_down",
            "1 while a source of adapters could not be asked a moment ago.",
            labels=["source"],
        )
        for name in self._registry.source_names:
            down.add_metric([name], float(self._registry.is_down(name)))
        yield down
        fetcher = self._registry.fetcher
        if fetcher is not None:
            yield from _fetches(fetcher)
            yield from _cache(self._usage)


def _fetches(fetcher: AdapterFetcher) -> Iterator[Metric]:
    counts, under_way = fetcher.counts, fetcher.under_way
    fetches = CounterMetricFamily(
        "mural:adapter_fetches",
        "Described versions, by how they came onto this machine.",
        labels=["result"],
    )
    fetches.add_metric(["cached"], counts.hits)
    fetches.add_metric(["downloaded"], counts.downloads)
    fetches.add_metric(["failed"], counts.failures)
    fetches.add_metric(["rate_limited"], counts.rate_limited)
    yield fetches
    yield CounterMetricFamily(
        "mural:adapter_downloaded_bytes",
        "Bytes of whole versions that were downloaded.",
        value=counts.downloaded_bytes,
    )
    yield GaugeMetricFamily(
        "mural:adapter_downloads_running", "Downloads that run now.", value=len(under_way)
    )
    yield GaugeMetricFamily(
        "mural:adapter_downloads_missing_bytes",
        "Bytes that the running downloads still have to bring.",
        value=sum(fetch.total - fetch.done for fetch in under_way),
    )


def _cache(usage: CacheUsage | None) -> Iterator[Metric]:
    if usage is None:
        return
    yield GaugeMetricFamily(
        "mural:adapter_cache_bytes", "Bytes in the disk cache.", value=usage.bytes
    )
    yield GaugeMetricFamily(
        "mural:adapter_cache_quota_bytes", "The disk cache's quota.", value=usage.quota
    )
    yield GaugeMetricFamily(
        "mural:adapter_cache_versions", "Versions in the disk cache.", value=usage.versions
    )


class UploadsCollector(Collector):
    """What became of uploads. A reason is an error's code, of which there are few."""

    def __init__(self, counts: UploadCounts) -> None:
        self._counts = counts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counts = self._counts
        uploads = CounterMetricFamily(
            "mural:uploads",
            "Uploads of adapters, by whether they were new, there already, or refused.",
            labels=["result"],
        )
        uploads.add_metric(["created"], counts.created)
        uploads.add_metric(["unchanged"], counts.unchanged)
        uploads.add_metric(["refused"], counts.refused.total())
        yield uploads
        refusals = CounterMetricFamily(
            "mural:upload_refusals", "Refused uploads, by the error's code.", labels=["reason"]
        )
        for reason, count in sorted(counts.refused.items()):
            refusals.add_metric([reason], count)
        yield refusals
        yield CounterMetricFamily(
            "mural:uploaded_bytes", "Bytes of new uploads.", value=counts.created_bytes
        )
        yield CounterMetricFamily(
            "mural:uploads_removed", "Uploads that were deleted or expired.", value=counts.removed
        )
