"""EndpointSlices of a real API server, written by the real controller (``make test-cluster``)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightkube.config.kubeconfig import KubeConfig

from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.config import cluster_config
from mural_router.cluster import Cluster
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.kubernetes import KubernetesDiscovery, parse_kubernetes
from mural_router.fleet.places import open_discovery

pytestmark = pytest.mark.cluster

WAIT_S = 90.0
SEEN_WITHIN_S = 5.0
"""After the API server knows it; as in test_seen_in_time.py."""

SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "mural"},
    "spec": {
        "clusterIP": "None",
        "selector": {"app": "mural"},
        "ports": [{"name": "http", "port": 8000}, {"name": "control", "port": 8001}],
    },
}
DEPLOYMENT = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "mural"},
    "spec": {
        "replicas": 2,
        "selector": {"matchLabels": {"app": "mural"}},
        "template": {
            "metadata": {"labels": {"app": "mural"}},
            "spec": {"containers": [{"name": "mural", "image": "mural.local/server:1"}]},
        },
    },
}
READER = [
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": {"name": "router"},
        "rules": [
            {
                "apiGroups": ["discovery.k8s.io"],
                "resources": ["endpointslices"],
                "verbs": ["list", "watch"],
            }
        ],
    },
    {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "router"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "router"},
        "subjects": [{"kind": "ServiceAccount", "name": "router"}],
    },
]


class Followed:
    """What a running discovery told last."""

    def __init__(self, discovery: KubernetesDiscovery) -> None:
        self.endpoints: tuple[Endpoint, ...] = ()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._follow(discovery))

    async def _follow(self, discovery: KubernetesDiscovery) -> None:
        async for self.endpoints in discovery.watch():
            self._changed.set()

    async def first(self) -> tuple[Endpoint, ...]:
        async with asyncio.timeout(WAIT_S):
            await self._changed.wait()
        return self.endpoints

    async def until(self, holds: Callable[[tuple[Endpoint, ...]], bool]) -> tuple[Endpoint, ...]:
        async with asyncio.timeout(WAIT_S):
            while not holds(self.endpoints):
                await self._changed.wait()
                self._changed.clear()
        return self.endpoints

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


@pytest.fixture
async def follow(cluster: Any) -> AsyncIterator[Callable[..., Followed]]:
    """``follow(config=None)``: the endpoints of the service ``mural``."""
    running: list[tuple[Followed, KubeClient]] = []

    def start(config: Path | None = None) -> Followed:
        place = parse_kubernetes(f"kubernetes://mural.{cluster.namespace}")
        single = cluster_config() if config is None else KubeConfig.from_file(config).get()
        assert single is not None
        client = KubeClient(single)
        followed = Followed(KubernetesDiscovery(place, lambda: client))
        running.append((followed, client))
        return followed

    yield start
    for followed, client in running:
        await followed.close()
        await client.__aexit__(None, None, None)


def config_with(token: str, cluster: Any, folder: Path) -> Path:
    """The cluster's configuration for whoever holds a token."""
    config = yaml.safe_load(Path(cluster.environment["KUBECONFIG"]).read_text())
    for user in config["users"]:
        user["user"] = {"token": token}
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def ready(number: int) -> Callable[[tuple[Endpoint, ...]], bool]:
    return lambda endpoints: len(endpoints) == number and all(each.ready for each in endpoints)


async def pods(cluster: Any) -> dict[str, str]:
    """Address by name."""
    found = json.loads(await cluster.kubectl("get", "pods", "-o", "json"))["items"]
    return {each["metadata"]["name"]: each["status"].get("podIP", "") for each in found}


async def test_the_pods_of_a_service_are_its_replicas_and_follow_its_scale(cluster, follow):
    followed = follow()
    await cluster.apply(SERVICE, DEPLOYMENT)
    found = await followed.until(ready(2))
    assert {each.name: each.host for each in found} == await pods(cluster)
    assert {(each.port, each.control_port) for each in found} == {(8000, 8001)}
    await cluster.kubectl("scale", "deployment/mural", "--replicas=3")
    await followed.until(ready(3))
    gone = found[0].name
    await cluster.kubectl("delete", "pod", gone)
    await followed.until(
        lambda endpoints: ready(3)(endpoints) and gone not in {each.name for each in endpoints}
    )
    await cluster.kubectl("scale", "deployment/mural", "--replicas=0")
    await followed.until(lambda endpoints: endpoints == ())


async def test_a_pod_that_is_not_ready_says_so_in_time(cluster, follow):
    manual = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": "by-hand", "labels": {"kubernetes.io/service-name": "mural"}},
        "addressType": "IPv4",
        "ports": SERVICE["spec"]["ports"],
        "endpoints": [{"addresses": ["10.1.2.3"], "conditions": {"ready": True}}],
    }
    followed = follow()
    await cluster.apply(manual)
    await followed.until(ready(1))
    for conditions in ({"ready": False}, {"ready": True}, {"ready": True, "terminating": True}):
        expected = conditions == {"ready": True}
        manual["endpoints"] = [{"addresses": ["10.1.2.3"], "conditions": conditions}]
        await cluster.apply(manual)
        async with asyncio.timeout(SEEN_WITHIN_S):
            await followed.until(
                lambda endpoints, expected=expected: (
                    [each.ready for each in endpoints] == [expected]
                )
            )


async def test_a_killed_api_server_takes_nothing_away_and_is_followed_again(cluster, follow):
    followed = follow()
    await cluster.apply(SERVICE, DEPLOYMENT)
    before = await followed.until(ready(2))
    await asyncio.to_thread(cluster.kill_api_server)
    await asyncio.to_thread(cluster.start)
    assert followed.endpoints == before
    await cluster.kubectl("scale", "deployment/mural", "--replicas=4")
    await followed.until(ready(4))


async def test_list_and_watch_are_all_the_rights_that_it_needs(cluster, follow, tmp_path, caplog):
    await cluster.apply(SERVICE, DEPLOYMENT)
    await cluster.kubectl("create", "serviceaccount", "router")
    token = (await cluster.kubectl("create", "token", "router")).strip()
    followed = follow(config_with(token, cluster, tmp_path))
    # The empty set is told when the first try has failed.
    assert await followed.first() == ()
    assert "is forbidden" in caplog.text
    await cluster.apply(*READER)
    await followed.until(ready(2))


async def test_a_place_in_the_settings_is_opened_with_the_clusters_configuration(cluster):
    await cluster.apply(SERVICE, DEPLOYMENT)
    opened = Cluster()
    watch = open_discovery([f"kubernetes://mural.{cluster.namespace}"], opened).watch()
    async with asyncio.timeout(WAIT_S):
        async for endpoints in watch:
            if ready(2)(endpoints):
                break
    await watch.aclose()
    assert opened.calls == {"list": 1, "watch": 1}
    await opened.close()
