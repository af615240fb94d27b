"""While no status can be written, what shall be done is done; then the statuses say how it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest

from mural_operator.metrics import Metrics
from mural_operator.status_writer import StatusWriter
from mural_operator.statuses import PARALLEL, Statuses
from mural_operator.tenancy import TenantVerdict
from mural_operator.troubles import Troubles
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.objects import ObjectMeta
from tests.kubernetes_api import FakeAPI
from tests.mural_operator.memory_cluster import InMemory, MemoryClient, in_memory

REFUSED = {
    409: KubeError(409, "Conflict", "not the last version"),
    403: KubeError(403, "Forbidden", "no right"),
    429: KubeError(429, "TooManyRequests", "later", retry_after_s=2.0),
    500: KubeError(500, "InternalError", "etcd"),
    0: KubeError(0, "NoAnswer", "no answer"),
}


class Refusing(MemoryClient):
    """Refuses statuses and finalizers, for as long as there is a refusal."""

    refusal: KubeError | None = None
    refused: int = 0

    async def patch(self, path: str, body: Any, **more: Any) -> bytes:
        if self.refusal is not None and "/adapters/" in path:
            self.refused += 1
            raise self.refusal
        return await super().patch(path, body, **more)


@pytest.fixture
async def kube() -> AsyncIterator[InMemory]:
    async with in_memory() as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("status", REFUSED)
async def test_adapters_come_and_go_while_no_status_can_be_written(kube, status):
    client = Refusing(kube.api)
    kube.api.client = lambda: client
    [server] = await kube.pods(1)
    await kube.adapter("v0")
    async with kube.operator():
        await kube.ready("v0")
        client.refusal, began = REFUSED[status], time.monotonic()
        names = [f"v{at}" for at in range(1, 7)]
        for name in names:
            await kube.adapter(name)
        wanted = {f"acme:{name}" for name in names}
        await server.until(lambda it: wanted <= it.resident.keys())
        server.lose("acme:v1", level=None)
        await server.until(lambda it: wanted <= it.resident.keys())
        await kube.delete("Adapter", "v0")
        await server.until(lambda it: "acme:v0" not in it.resident)
        await asyncio.sleep(1.0)
        # Of each of seven objects a status and a finalizer, less and less often.
        rounds = 2 + (time.monotonic() - began) / 0.4
        assert client.refused <= 7 * 2 * 2 * rounds
        client.refusal = None
        # The finalizer of the one that is deleted was refused, too.
        await kube.adapters.until(lambda found: "v0" not in found)
        await kube.ready(*names)


async def test_a_retry_after_of_the_api_server_is_kept_by_all_statuses_together(
    kube_api: FakeAPI,
):
    """Over real sockets, as `KubeClient` has it."""
    seen = {"metadata": {"uid": "1", "resourceVersion": "5"}, "status": {"keys": 0}}
    found = TenantVerdict((), 1, "Accepted")
    kube_api.answer(200, seen, times=PARALLEL)
    # More than a client waits for by itself.
    kube_api.answer(429, b"{}", times=PARALLEL, retry_after="6")
    metrics = Metrics(watches=dict, calls=dict, leading=lambda: True, adapters=dict)
    async with KubeClient(kube_api.config()) as client:
        writer, statuses = StatusWriter(client, metrics=metrics), Statuses(lambda: True, Troubles())
        for at in range(20):
            meta = ObjectMeta(f"tenant-{at}", "prod", "1", "5", 1)
            statuses.put(f"tenant {at}", "5", found, partial(writer.write_tenant, meta, found))
        running = asyncio.create_task(statuses.run())
        await asyncio.sleep(0.3)
        running.cancel()
    assert [each.method for each in kube_api.asked].count("PATCH") == PARALLEL
    assert len(kube_api.asked) == 2 * PARALLEL
