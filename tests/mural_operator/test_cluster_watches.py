"""What the watches show of pods and adapters, whatever their form."""

from __future__ import annotations

import json
from typing import Any

from mural_operator.cluster import Cluster, Wakes, read_pod
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.objects import Adapter, ServingPool


class Api(KubeClient):
    """Stands for the API server: lists, and then no watch."""

    def __init__(self) -> None:
        self.objects: dict[str, list[dict[str, Any]]] = {}

    async def get(self, path: str, params: object = None) -> bytes:
        kind = path.rpartition("/")[2]
        found = {"metadata": {"resourceVersion": "1"}, "items": self.objects.get(kind, [])}
        return json.dumps(found).encode()

    def stream(self, path: str, params: object, *, silence_s: float) -> Any:
        raise KubeError(0, "NoAnswer", "no watch here")


class Woken(Wakes):
    """Notes who is woken."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def pools(self) -> None:
        self.told.append("pools")

    def pool(self, name: str) -> None:
        self.told.append(f"pool {name}")

    def tenants(self) -> None:
        self.told.append("tenants")

    def aliases(self) -> None:
        self.told.append("aliases")


def a_pod(name: str, labels: dict[str, str] | None = None, **status: object) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "mural", "labels": labels or {"app": "server"}},
        "status": {"phase": "Running", "podIP": "10.0.0.1"} | status,
    }


def a_pool(name: str, created: str, **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "mural", "creationTimestamp": created},
        "spec": {"selector": {"matchLabels": labels}},
    }


def an_adapter(name: str, pool: object = "pool", **spec: object) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "mural"},
        "spec": {"pool": pool, "tenant": "acme", "version": name} | spec,
    }


def pool_of(cluster: Cluster, name: str) -> ServingPool:
    found = cluster.pool(name)
    assert isinstance(found, ServingPool)
    return found


async def listed(api: Api) -> tuple[Cluster, Woken]:
    """The cluster after each kind was listed once."""
    import asyncio

    cluster, woken = Cluster(api, "mural", None), Woken()
    cluster.tell(woken)
    running = asyncio.create_task(cluster.run())
    async with asyncio.timeout(20):
        await cluster.synced()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return cluster, woken


def test_a_pod_is_ready_by_its_condition_and_going_by_its_deletion():
    ready = {"type": "Ready", "status": "True"}
    pod = read_pod(json.dumps(a_pod("a", conditions=[ready])).encode())
    assert (pod.ready, pod.terminating, pod.ended, pod.address) == (True, False, False, "10.0.0.1")
    going = a_pod("a", conditions=[ready | {"status": "False"}])
    going["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    pod = read_pod(json.dumps(going).encode())
    assert (pod.ready, pod.terminating) == (False, True)
    assert read_pod(json.dumps(a_pod("a", phase="Succeeded")).encode()).ended


def test_what_a_heartbeat_of_a_node_writes_is_no_change_of_a_pod():
    one, other = a_pod("a"), a_pod("a")
    one["metadata"]["resourceVersion"], other["metadata"]["resourceVersion"] = "1", "2"
    assert read_pod(json.dumps(one).encode()) == read_pod(json.dumps(other).encode())


async def test_adapters_are_of_the_pool_that_they_name_whether_there_is_one_or_not():
    api = Api()
    api.objects["adapters"] = [
        an_adapter("v2"),
        an_adapter("v1"),
        an_adapter("v3", pool="missing"),
        an_adapter("bad", tenant="!"),
        an_adapter("worse", pool=7),
    ]
    api.objects["servingpools"] = [a_pool("pool", "2026-01-01T00:00:00Z", app="server")]
    cluster, woken = await listed(api)
    assert [each.exact for each in cluster.adapters_of("pool")] == [
        "acme/default:v1",
        "acme/default:v2",
    ]
    assert cluster.pool_names == {"pool", "missing"}
    assert {each.metadata.name for each in cluster.unreadable_of("pool")} == {"bad", "worse"}
    assert {each.metadata.name for each in cluster.unreadable_of("missing")} == {"worse"}
    assert all(isinstance(each, Adapter) for each in cluster.adapters)
    assert {"pools", "tenants", "aliases"} <= set(woken.told)


async def test_a_pod_is_of_the_oldest_pool_that_selects_it_and_an_ended_one_of_none():
    api = Api()
    api.objects["servingpools"] = [
        a_pool("young", "2026-01-02T00:00:00Z", app="server"),
        a_pool("old", "2026-01-01T00:00:00Z", app="server", tier="hot"),
        a_pool("everything", "2025-01-01T00:00:00Z"),
    ]
    api.objects["pods"] = [
        a_pod("a"),
        a_pod("b", {"app": "server", "tier": "hot"}),
        a_pod("c", phase="Failed"),
        a_pod("d", {"app": "other"}),
    ]
    cluster, _ = await listed(api)
    assert [each.metadata.name for each in cluster.pods_of("young")] == ["a"]
    assert [each.metadata.name for each in cluster.pods_of("old")] == ["b"]
    assert cluster.pods_of("everything") == ()


async def test_an_address_is_of_the_youngest_pod_that_has_it():
    api = Api()
    pools = [
        a_pool("one", "2026-01-01T00:00:00Z", app="one"),
        a_pool("two", "2026-01-01T00:00:00Z", app="two"),
    ]
    api.objects["servingpools"] = pools
    dead, alive = a_pod("dead", {"app": "one"}), a_pod("alive", {"app": "two"})
    ended, other = a_pod("ended", {"app": "two"}, phase="Failed"), a_pod("other", {"app": "else"})
    times = ("2026-01-01", "2026-01-02", "2026-01-03", "2026-01-03")
    for pod, day in zip((dead, alive, ended, other), times, strict=True):
        pod["metadata"] |= {"uid": pod["metadata"]["name"], "creationTimestamp": f"{day}T00:00:00Z"}
    api.objects["pods"] = [dead, alive, ended, other]
    cluster, _ = await listed(api)
    assert cluster.targets(pool_of(cluster, "one")) == ()
    assert [each.pod for each in cluster.targets(pool_of(cluster, "two"))] == ["alive"]
    # Of a node's address more than one may make use, each at its own port.
    pools[0]["spec"] |= {"port": 9000, "controlPort": 9001}
    cluster, _ = await listed(api)
    assert [each.pod for each in cluster.targets(pool_of(cluster, "one"))] == ["dead"]
