"""Follows one vLLM pod, which has no state stream: asks whether it lives, and for its metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from mural_resolvers.backoff import Backoff
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.follower import Follower, Listener, TlsContext
from mural_router.fleet.report import Report
from mural_router.fleet.vllm_metrics import PodMetrics, read_metrics
from mural_router.placement import base_names
from mural_server.protocol.caution import rate
from mural_server.protocol.exchange import ExchangeError, exchange

__all__ = ["VLLMFollower"]

TIMEOUT_S = 3.0
MAX_METRICS_BYTES = 2 << 20
"""The series of adapters' activity grow with a pod's age: what comes after it is not read."""
MAX_MODELS_BYTES = 4 << 20
MODELS_INTERVAL_S = 60.0
READING_SHARE = 0.1
"""Of this router's time that reading one pod's text may take: a longer text is read less often."""


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class VLLMFollower(Follower):
    """Scrapes a pod every ``interval_s``, more and more slowly while it fails.

    A pod that is alive is ready: whether it drains, its pod's conditions say.
    """

    RETRY_FIRST_S = 0.1
    RETRY_MOST_S = 2.0

    def __init__(
        self,
        endpoint: Endpoint,
        listener: Listener,
        *,
        api_key: Callable[[], str | None],
        ssl: TlsContext,
        interval_s: float,
    ) -> None:
        """``ssl`` and ``api_key`` are asked for each connection."""
        self._endpoint = endpoint
        self._listener = listener
        self._api_key = api_key
        self._ssl = ssl
        self._interval_s = interval_s
        self._backoff = Backoff(self.RETRY_FIRST_S, self.RETRY_MOST_S)
        self._base_names: tuple[str, ...] = ()
        self._names_until_s = float("-inf")
        self._generated = 0.0
        self._at_s: float | None = None

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    spent_s = await self._scrape()
            except (ExchangeError, TimeoutError) as error:
                refused = isinstance(error, ExchangeError) and error.refused
                self._listener.lost(
                    str(error) or f"no answer within {TIMEOUT_S:g} s", refused=refused
                )
                await asyncio.sleep(self._backoff.next_s())
            else:
                self._backoff.reset()
                await asyncio.sleep(max(self._interval_s, spent_s / READING_SHARE))

    async def _scrape(self) -> float:
        """Ask once and tell; gives the seconds that reading the text took."""
        alive, _ = await self._get("/health", 0)
        status, text = await self._get("/metrics", MAX_METRICS_BYTES)
        if status != 200:
            raise ExchangeError(f"/metrics answers {status}")
        began = asyncio.get_running_loop().time()
        metrics = read_metrics(text)
        spent_s = asyncio.get_running_loop().time() - began
        await self._learn_names(metrics)
        self._listener.heard(self._report(metrics, ready=alive == 200))
        return spent_s

    def _report(self, metrics: PodMetrics, *, ready: bool) -> Report:
        return Report(
            ready=ready,
            base_names=self._base_names,
            reports=metrics.reports,
            slots=metrics.slots,
            running=metrics.running,
            waiting=metrics.waiting,
            kv_usage=metrics.kv_usage,
            tokens_per_s=self._tokens_per_s(metrics.generated),
            adapters=metrics.adapters,
            dropped=metrics.dropped,
        )

    def _tokens_per_s(self, generated: float) -> float:
        """Since the last reading; 0 where the pod has begun anew meanwhile."""
        now, last = asyncio.get_running_loop().time(), self._at_s
        grown = generated - self._generated
        self._generated, self._at_s = generated, now
        return 0.0 if last is None else rate(grown / max(now - last, 1e-3))

    async def _learn_names(self, metrics: PodMetrics) -> None:
        """The base's names: all of them from the list of models, else the metrics' one."""
        now = asyncio.get_running_loop().time()
        if now < self._names_until_s:
            return
        status, body = await self._get("/v1/models", MAX_MODELS_BYTES)
        names: tuple[str, ...] = (metrics.model_name,)
        if status == 200:
            try:
                cards = msgspec.json.decode(body, type=_Cards).data
                names = tuple(card.id for card in cards if card.parent is None) or names
            except (msgspec.MsgspecError, RecursionError) as error:
                raise ExchangeError(f"a list of models that is none: {error}") from None
        self._base_names = base_names(names)
        self._names_until_s = now + MODELS_INTERVAL_S

    async def _get(self, path: str, max_bytes: int) -> tuple[int, bytes]:
        api_key = self._api_key()
        async with exchange(
            self._endpoint.host,
            self._endpoint.port,
            "GET",
            path,
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            ssl=self._ssl(),
            connect_timeout_s=TIMEOUT_S,
            answer_timeout_s=TIMEOUT_S,
        ) as answer:
            return answer.head.status, await answer.beginning(max_bytes)
