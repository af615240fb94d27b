"""What the operator writes of its own, at a real API server: the Lease, statuses, Events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mural_operator.conditions import Condition, said
from mural_operator.election import Election
from mural_operator.events import EventRecorder
from mural_operator.metrics import Metrics
from mural_operator.status_writer import StatusWriter
from mural_operator.unreadable import UnreadableAdapter
from mural_operator.verdict import MAX_REPLICAS, AdapterVerdict, ReplicaEntry, of_unreadable
from mural_resolvers.kubernetes.client import JsonObject, KubeClient, KubeError
from mural_resolvers.kubernetes.config import cluster_config
from mural_resolvers.kubernetes.objects import Adapter, read_adapter
from mural_resolvers.kubernetes.paths import ADAPTERS

pytestmark = pytest.mark.cluster

CRDS = Path(__file__).resolve().parents[2] / "charts/mural/crds"
WAIT_S = 90.0


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[KubeClient]:
    async with KubeClient(cluster_config()) as client:
        yield client


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(watches=dict, calls=dict, leading=lambda: True, adapters=dict)


class Line:
    """A candidate's way to the API server, which can be cut."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self.cut = False

    async def get(self, path: str) -> bytes:
        self._check()
        return await self._client.get(path)

    async def create(self, path: str, body: JsonObject) -> bytes:
        self._check()
        return await self._client.create(path, body)

    async def replace(self, path: str, body: JsonObject) -> bytes:
        self._check()
        return await self._client.replace(path, body)

    def _check(self) -> None:
        if self.cut:
            raise KubeError(0, "NoAnswer", "cut")


class Standing:
    """A candidate whose work is to be seen."""

    def __init__(self, client: KubeClient, namespace: str, identity: str) -> None:
        self.line = Line(client)
        self.election = Election(self.line, name="mural", namespace=namespace, identity=identity)
        self.acts = asyncio.Event()
        self.ended = asyncio.Event()
        self._run = asyncio.create_task(self.election.run())
        self._lead = asyncio.create_task(self.election.lead(self._work))

    async def _work(self) -> None:
        self.ended.clear()
        self.acts.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.acts.clear()
            self.ended.set()

    async def end(self) -> None:
        """Gracefully: the work, then the candidacy."""
        for task in (self._lead, self._run):
            task.cancel()
            await asyncio.wait({task}, timeout=10)


async def test_one_leads_and_the_next_follows_at_its_end(cluster: Any, client: KubeClient) -> None:
    first = Standing(client, cluster.namespace, "operator-0")
    async with asyncio.timeout(WAIT_S):
        await first.acts.wait()
        second = Standing(client, cluster.namespace, "operator-1")
        spec = (await cluster.get("lease", "mural"))["spec"]
        assert spec["holderIdentity"] == "operator-0"
        assert not second.acts.is_set()
        await first.end()
        assert first.ended.is_set()
        await second.acts.wait()
        spec = (await cluster.get("lease", "mural"))["spec"]
        assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("operator-1", 1)
        await second.end()
    assert (await cluster.get("lease", "mural"))["spec"]["holderIdentity"] == ""


async def test_one_that_vanishes_is_followed_when_its_lease_lapses(
    cluster: Any, client: KubeClient
) -> None:
    first = Standing(client, cluster.namespace, "operator-0")
    async with asyncio.timeout(WAIT_S):
        await first.acts.wait()
        second = Standing(client, cluster.namespace, "operator-1")
        first.line.cut = True
        await second.acts.wait()
        # It stopped by itself, before that.
        assert first.ended.is_set()
        await second.end()
        await first.end()


async def test_who_is_written_over_stops_acting(cluster: Any, client: KubeClient) -> None:
    first = Standing(client, cluster.namespace, "operator-0")
    async with asyncio.timeout(WAIT_S):
        await first.acts.wait()
        patch = {"spec": {"holderIdentity": "somebody"}}
        await cluster.kubectl(
            *("patch", "lease", "mural", "--type=merge", "--patch-file=/dev/stdin"), told=patch
        )
        await first.ended.wait()
        assert first.election.leader == "somebody"
        await first.end()


@pytest.fixture
async def adapter(cluster: Any, client: KubeClient) -> Adapter:
    """One that is declared."""
    await cluster.apply(CRDS)
    names = [f"crd/{path.stem}.mural.dev" for path in CRDS.glob("*.yaml")]
    await cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
    await cluster.apply(
        {
            "apiVersion": "mural.dev/v1alpha1",
            "kind": "Adapter",
            "metadata": {"name": "acme-v1"},
            "spec": {"pool": "smol", "tenant": "acme", "version": "v1"},
        }
    )
    return await seen(client, cluster.namespace)


async def seen(client: KubeClient, namespace: str) -> Adapter:
    return read_adapter(json.loads(await client.get(ADAPTERS.named(namespace, "acme-v1"))))


def found(ready: int, truth: Any) -> AdapterVerdict:
    reason = "Ready" if truth == "True" else "Loading"
    return AdapterVerdict(
        conditions=(Condition("Ready", truth, reason, f"Resident on {ready} of 2 replicas."),),
        replicas=(ReplicaEntry("pod-0", "host", pinned=True, digest="a" * 64),),
        desired=2,
        ready_replicas=ready,
        ready=f"{ready}/2",
        digest="a" * 64,
        rank=16,
        bytes=9_800_000,
        reason=reason,
    )


async def test_a_status_is_taken_as_it_is_written_and_not_written_again(
    cluster: Any, client: KubeClient, metrics: Metrics, adapter: Adapter
) -> None:
    writer = StatusWriter(client, metrics=metrics)
    await writer.write_adapter(adapter.metadata, found(1, "False"))
    await writer.write_adapter(adapter.metadata, found(2, "True"))
    (_, row) = (await cluster.kubectl("get", "adapters")).splitlines()
    assert row.split()[:5] == ["acme-v1", "acme", "v1", "2/2", "16"]
    await cluster.kubectl("wait", "--for=condition=Ready", "--timeout=60s", "adapter/acme-v1")
    patches = client.calls["patch"]
    # Nothing that the API server dropped or added makes it look another.
    for by in (writer, StatusWriter(client, metrics=metrics)):
        await by.write_adapter((await seen(client, cluster.namespace)).metadata, found(2, "True"))
    assert client.calls["patch"] == patches


async def test_a_status_goes_over_a_change_that_came_between(
    cluster: Any, client: KubeClient, metrics: Metrics, adapter: Adapter
) -> None:
    writer = StatusWriter(client, metrics=metrics)
    await writer.write_adapter(adapter.metadata, found(1, "False"))
    adapter = await seen(client, cluster.namespace)
    await cluster.kubectl("label", "adapter", "acme-v1", "team=blue")
    await writer.write_adapter(adapter.metadata, found(2, "True"))
    fields = await cluster.get("adapter", "acme-v1")
    assert fields["metadata"]["labels"] == {"team": "blue"}
    assert fields["status"]["ready"] == "2/2"


async def test_what_an_object_that_cannot_be_read_is_told_is_shown_by_kubectl(
    cluster: Any, client: KubeClient, metrics: Metrics, adapter: Adapter
) -> None:
    message = "spec.placement.replicas: All or a whole number is wanted, not 'x'."
    unread = UnreadableAdapter(adapter.metadata, message, "smol", adapter.status)
    await StatusWriter(client, metrics=metrics).write_adapter(
        adapter.metadata, of_unreadable(unread)
    )
    (_, row) = (await cluster.kubectl("get", "adapters")).splitlines()
    assert row.split()[3] == "?"
    assert row.split()[-1] == "Malformed"
    shown = await cluster.kubectl("describe", "adapter", "acme-v1")
    assert message in shown
    assert "Accepted" in shown


async def test_the_largest_status_is_taken(
    cluster: Any, client: KubeClient, metrics: Metrics, adapter: Adapter
) -> None:
    """Of a pool of a thousand pods with the longest names, each with the longest of errors."""
    error = said("𝕏" * 9000)
    replicas = tuple(
        ReplicaEntry(f"{at:04}-{'p' * 248}", "host", True, "d" * 64, error)
        for at in range(MAX_REPLICAS)
    )
    writer = StatusWriter(client, metrics=metrics)
    for ready in (1, 2):
        await writer.write_adapter(
            (await seen(client, cluster.namespace)).metadata,
            replace(found(ready, "False"), replicas=replicas),
        )
    status = (await cluster.get("adapter", "acme-v1"))["status"]
    assert (len(status["replicas"]), status["ready"]) == (MAX_REPLICAS, "2/2")


async def test_events_are_shown_by_kubectl_describe(
    cluster: Any, client: KubeClient, metrics: Metrics, adapter: Adapter
) -> None:
    recorder = EventRecorder(client, metrics=metrics, instance="operator-0")
    sending = asyncio.create_task(recorder.run())
    for _ in range(3):
        recorder.note(adapter, "Adapter", "Warning", "NotFound", "No source has acme/default:v1.")
    await cluster.kubectl(
        *("wait", "--for=create", "--timeout=60s", "events.v1.events.k8s.io"),
        "--field-selector=reason=NotFound",
    )
    shown = await cluster.kubectl("describe", "adapter", "acme-v1")
    assert "NotFound" in shown
    assert "No source has acme/default:v1." in shown
    assert metrics.events_dropped == 0
    (event,) = (await cluster.get("events.v1.events.k8s.io"))["items"]
    assert event["series"]["count"] == 3
    sending.cancel()
