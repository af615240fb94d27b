"""EndpointSlices of an API server by hand: what a real one does rarely is done here at will."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.config import cluster_config
from mural_router.cluster import Cluster
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.kubernetes import KubernetesDiscovery, KubernetesPlace, parse_kubernetes
from mural_router.fleet.places import open_discovery

HTTP_AND_CONTROL = ({"name": "http", "port": 8000}, {"name": "control", "port": 8001})


def pod(name: str, address: str = "10.0.0.1", **conditions: Any) -> dict[str, Any]:
    return {
        "addresses": [address],
        "conditions": conditions,
        "targetRef": {"kind": "Pod", "name": name},
    }


def slice_of(name: str, *pods: dict[str, Any], **more: Any) -> dict[str, Any]:
    fields = {"addressType": "IPv4", "endpoints": list(pods), "ports": list(HTTP_AND_CONTROL)}
    return {"metadata": {"name": name}} | fields | more


@pytest.fixture
def api(kube_api):
    return kube_api


class Told:
    """``await told()``: the next set of endpoints."""

    def __init__(self) -> None:
        self.sets: asyncio.Queue[tuple[Endpoint, ...]] = asyncio.Queue()

    async def __call__(self) -> tuple[Endpoint, ...]:
        return await asyncio.wait_for(self.sets.get(), 20)


@pytest.fixture
async def told(api):
    client = KubeClient(api.config(token="the-pods-own-token"))
    discovery = KubernetesDiscovery(KubernetesPlace("mural"), lambda: client)
    told = Told()

    async def follow() -> None:
        async for endpoints in discovery.watch():
            told.sets.put_nowait(endpoints)

    following = asyncio.create_task(follow())

    async with client:
        yield told
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_pods_are_replicas_with_both_ports(api, told):
    api.objects["s"] = slice_of("s", pod("mural-1", "10.0.0.2"), pod("mural-0"))
    first, second = await told()
    assert first == Endpoint(name="mural-0", host="10.0.0.1", port=8000, control_port=8001)
    assert second.name == "mural-1"
    asked = api.asked[0]
    assert asked.path == "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
    assert asked.query["labelSelector"] == "kubernetes.io/service-name=mural"
    assert asked.headers["authorization"] == "Bearer the-pods-own-token"


async def test_all_pods_of_a_service_have_its_weight(api):
    api.objects["s"] = slice_of("s", pod("a"), pod("b", "10.0.0.2"))
    async with KubeClient(api.config(token="the-pods-own-token")) as client:
        place = parse_kubernetes("kubernetes://mural,weight=2")
        watch = KubernetesDiscovery(place, lambda: client).watch()
        found = await asyncio.wait_for(anext(watch), 20)
        assert [(each.name, each.weight) for each in found] == [("a", 2.0), ("b", 2.0)]
        await watch.aclose()


async def test_changes_come_without_asking_again(api, told):
    assert await told() == ()
    await api.watched()
    api.put(slice_of("s", pod("a", ready=False)))
    assert [(each.name, each.ready) for each in await told()] == [("a", False)]
    api.put(slice_of("s", pod("a", ready=True)))
    assert [(each.name, each.ready) for each in await told()] == [("a", True)]
    api.put(slice_of("s", pod("a", ready=True, terminating=True)))
    assert [(each.name, each.ready) for each in await told()] == [("a", False)]
    api.remove("s")
    assert await told() == ()
    assert api.lists() == 1
    assert api.since() == ["10"]


@pytest.mark.parametrize("cut", [False, True])
async def test_a_watch_that_ends_goes_on_where_it_was(api, told, cut):
    api.objects["s"] = slice_of("s", pod("a"))
    await told()
    await api.watched()
    api.put(slice_of("s", pod("b")))
    await told()
    api.end(cut=cut)
    await api.watched()
    assert api.lists() == 1
    assert api.since() == ["10", "11"]
    api.put(slice_of("s", pod("c")))
    assert [each.name for each in await told()] == ["c"]


async def test_what_the_server_has_forgotten_is_listed_again(api, told):
    api.objects["s"] = slice_of("s", pod("a"))
    await told()
    await api.watched()
    api.objects = {"t": slice_of("t", pod("b"))}
    api.send("ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
    # What was there before the list is not what is there after it.
    assert [each.name for each in await told()] == ["b"]
    assert api.lists() == 2


async def test_while_the_server_refuses_what_was_found_stays(api, told, caplog):
    api.objects["s"] = slice_of("s", pod("a"))
    await told()
    await api.watched()
    api.refusal = (403, "endpointslices is forbidden")
    api.end(cut=True)
    for _ in range(3):
        api.refused.clear()
        await asyncio.wait_for(api.refused.wait(), 20)
    assert told.sets.empty()
    api.refusal = None
    await api.watched()
    api.put(slice_of("s", pod("b")))
    assert [each.name for each in await told()] == ["b"]
    assert caplog.text.count("endpointslices is forbidden") == 1


async def test_a_server_that_refuses_from_the_start_is_an_empty_fleet_until_it_does_not(api, told):
    api.refusal = (401, "Unauthorized")
    assert await told() == ()
    api.refusal = None
    api.objects["s"] = slice_of("s", pod("a"))
    assert [each.name for each in await told()] == ["a"]


async def test_a_watch_that_dies_ends_discovery(api, monkeypatch):
    async def die(self, changed):
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr("mural_resolvers.kubernetes.watch.Watch.run", die)
    async with KubeClient(api.config()) as client:
        discovery = KubernetesDiscovery(KubernetesPlace("mural"), lambda: client)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            await asyncio.wait_for(anext(discovery.watch()), 20)


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        # The same pod by both families: IPv4.
        (
            [
                slice_of("a6", pod("a", "2001:db8::1"), addressType="IPv6"),
                slice_of("z4", pod("a", "10.0.0.9")),
            ],
            [("a", "10.0.0.9", True)],
        ),
        # In two slices for a moment, while the controller moves it: the ready entry counts.
        (
            [slice_of("s1", pod("a", ready=False)), slice_of("s2", pod("a", "10.0.0.2"))],
            [("a", "10.0.0.2", True)],
        ),
        # Readiness that is not told is to be taken for ready.
        ([slice_of("s", pod("a"))], [("a", "10.0.0.1", True)]),
        # No pod behind it: its address is its name.
        (
            [slice_of("s", {"addresses": ["10.0.0.5"]})],
            [("10.0.0.5", "10.0.0.5", True)],
        ),
        # Ports that are not there, endpoints that are null.
        ([slice_of("s", pod("a"), ports=[{"name": "http", "port": 8000}])], []),
        ([slice_of("s", pod("a"), ports=None)], []),
        ([slice_of("s", endpoints=None)], []),
    ],
)
async def test_slices_are_read_as_the_api_means_them(api, told, slices, expected):
    api.objects = {each["metadata"]["name"]: each for each in slices}
    assert [(each.name, each.host, each.ready) for each in await told()] == expected


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("kubernetes://mural", KubernetesPlace("mural")),
        (
            "kubernetes://vllm.prod,engine=vllm,port=8000,tls=on",
            KubernetesPlace("vllm", "prod", "vllm", "8000", tls=True),
        ),
        (
            "kubernetes://mural,port=api,control=8001",
            KubernetesPlace("mural", port="api", control_port="8001"),
        ),
        ("kubernetes://mural,weight=0.5", KubernetesPlace("mural", weight=0.5)),
    ],
)
def test_a_service_is_written_as_a_url(text, place):
    assert parse_kubernetes(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "kubernetes://",
        "kubernetes://Mural",
        "kubernetes://mural.",
        "kubernetes://mural.prod.svc",
        "kubernetes://mural/prod",
        "kubernetes://mural,port=a_b",
        "kubernetes://mural,weight=-1",
        "kubernetes://mural,engine=vllm,control=x",
        "kubernetes://mural,engine=x",
        "kubernetes://mural,tls=1",
        "mural",
    ],
)
def test_what_is_no_service_is_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_kubernetes(text)


def test_without_a_cluster_it_says_so_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="no Kubernetes"):
        cluster_config()
    with pytest.raises(ValueError, match="no Kubernetes"):
        open_discovery(["kubernetes://mural"], Cluster())
