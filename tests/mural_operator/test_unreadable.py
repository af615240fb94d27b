"""Objects that a schema of another day let through: nothing is lost because of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest

from mural_operator.cluster import Cluster, Wakes
from mural_operator.unreadable import (
    Unreadable,
    UnreadableAdapter,
    UnreadableTenant,
    read_adapter_or_not,
    read_alias_or_not,
    read_pool_or_not,
    read_tenant_or_not,
)
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.objects import Adapter, ServingPool

Object = dict[str, Any]

META = {"name": "a", "namespace": "mural", "uid": "1", "generation": 4}
POOL = {"selector": {"matchLabels": {"app": "server"}}}
ODD: dict[str, Any] = {"placement": {"replicas": "Some"}}


def an_adapter(name: str = "v1", pool: object = "pool", **spec: object) -> Object:
    return {
        "metadata": META | {"name": name},
        "spec": {"pool": pool, "tenant": "acme", "version": name} | spec,
    }


def a_tenant(name: str, created: str = "2026-01-01T00:00:00Z", **spec: object) -> Object:
    return {"metadata": META | {"name": name, "creationTimestamp": created}, "spec": spec}


def read(decode: Callable[[bytes], Any], fields: Object) -> Any:
    return decode(json.dumps(fields).encode())


# -- reading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "pool"),
    [
        (an_adapter(tenant="Not A Tenant"), "pool"),
        (an_adapter(**ODD), "pool"),
        (an_adapter(pool=7), ""),
        ({"metadata": META | {"name": "v1"}, "spec": []}, ""),
    ],
)
def test_an_adapter_is_known_by_what_can_be_read_of_it(fields, pool):
    found = read(read_adapter_or_not, fields | {"status": {"desiredReplicas": 2}})
    assert isinstance(found, UnreadableAdapter)
    assert (found.metadata.key, found.pool) == ("mural/v1", pool)
    assert found.status.desired_replicas == 2
    assert found.message


def test_an_odd_status_which_is_ours_to_write_spoils_no_adapter():
    found = read(read_adapter_or_not, an_adapter() | {"status": {"rank": "eight"}})
    assert isinstance(found, Adapter)
    assert found.status.rank == 0
    found = read(read_adapter_or_not, an_adapter(**ODD) | {"status": 7})
    assert isinstance(found, UnreadableAdapter)
    assert "placement" in found.message


@pytest.mark.parametrize(
    ("fields", "owner", "namespaces"),
    [
        (a_tenant("acme", namespaces=["team"], weight="much"), "acme", {"team"}),
        (a_tenant("a", tenant="acme", namespaces=["team"], keys=7), "acme", {"team"}),
        (a_tenant("acme", namespaces="team"), "acme", set()),
        (a_tenant("acme", tenant=7, namespaces=["team"]), None, {"team"}),
        ({"metadata": META, "spec": []}, None, set()),
    ],
)
def test_a_tenant_is_known_by_what_can_be_read_of_it(fields, owner, namespaces):
    found = read(read_tenant_or_not, fields)
    assert isinstance(found, UnreadableTenant)
    assert (found.id, found.namespaces) == (owner, namespaces)


@pytest.mark.parametrize(
    ("decode", "spec"),
    [(read_alias_or_not, {"tenant": "acme"}), (read_pool_or_not, {"selector": []})],
)
def test_aliases_and_pools_are_known_by_their_metadata(decode, spec):
    found = read(decode, {"metadata": META, "spec": spec})
    assert isinstance(found, Unreadable)
    assert found.metadata.key == "mural/a"


def test_what_an_object_says_goes_into_a_message_bounded_and_without_keys():
    key = "mural_abcdefgh_" + "s" * 43
    found = read(read_adapter_or_not, an_adapter(prewarm=f"{key}\x1b" + "x" * 5000))
    assert key not in found.message
    assert found.message.isprintable()
    assert len(found.message) < 400


@pytest.mark.parametrize("decode", [read_adapter_or_not, read_tenant_or_not, read_pool_or_not])
def test_what_has_no_metadata_is_refused_as_a_whole(decode):
    with pytest.raises(ValueError, match="metadata"):
        read(decode, {"spec": []})


# -- what stays in force --------------------------------------------------------------------------


class Api(KubeClient):
    """Stands for the API server: what is listed, and events as they are sent."""

    def __init__(self) -> None:
        self.objects: dict[str, list[Object]] = defaultdict(list)
        self._events: dict[str, asyncio.Queue[bytes | None]] = defaultdict(asyncio.Queue)
        self._version = 1

    async def get(self, path: str, params: object = None) -> bytes:
        kind = path.rpartition("/")[2]
        found = {"metadata": {"resourceVersion": "1"}, "items": self.objects[kind]}
        return json.dumps(found).encode()

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, params: object, *, silence_s: float
    ) -> AsyncGenerator[AsyncIterator[bytes], None]:
        yield self._lines(self._events[path.rpartition("/")[2]])

    async def _lines(self, events: asyncio.Queue[bytes | None]) -> AsyncIterator[bytes]:
        while (line := await events.get()) is not None:
            yield line

    def send(self, kind: str, event: str, each: Object) -> None:
        self._version += 1
        each = each | {"metadata": each["metadata"] | {"resourceVersion": str(self._version)}}
        self._events[kind].put_nowait(json.dumps({"type": event, "object": each}).encode())

    def list_again(self, kind: str, objects: list[Object]) -> None:
        self.objects[kind] = objects
        gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410}}
        self._events[kind].put_nowait(json.dumps(gone).encode())
        self._events[kind].put_nowait(None)


class Watched(Wakes):
    """A cluster that is running."""

    def __init__(self) -> None:
        self.api = Api()
        self.cluster = Cluster(self.api, "mural", None)
        self.cluster.tell(self)
        self.all_told = 0
        """How often all pools were told."""
        self._told = asyncio.Event()

    def pools(self) -> None:
        self.all_told += 1
        self._told.set()

    def pool(self, name: str) -> None:
        self._told.set()

    def tenants(self) -> None:
        self._told.set()

    aliases = tenants

    async def until(self, holds: Callable[[Cluster], object]) -> Cluster:
        async with asyncio.timeout(20):
            await self.cluster.synced()
            while not holds(self.cluster):
                await self._told.wait()
                self._told.clear()
        return self.cluster


@pytest.fixture
async def watched(monkeypatch) -> AsyncIterator[Watched]:
    monkeypatch.setattr("mural_resolvers.kubernetes.watch.RETRY_FIRST_S", 0.001)
    monkeypatch.setattr("mural_resolvers.kubernetes.watch.RETRY_MOST_S", 0.01)
    found = Watched()
    found.api.objects["servingpools"] = [{"metadata": META | {"name": "pool"}, "spec": POOL}]
    found.api.objects["adapters"] = [an_adapter("v1"), an_adapter("v2")]
    found.api.objects["tenants"] = [a_tenant("acme", namespaces=["team"])]
    running = asyncio.create_task(found.cluster.run())
    await found.until(lambda _: True)
    yield found
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


LATER = META | {"generation": 5}


async def test_an_adapter_stands_as_it_could_last_be_read_until_it_can_be_again(watched):
    spoilt = an_adapter("v1", pool="other", **ODD)
    spoilt["metadata"] |= {"generation": 5, "finalizers": ["x/y"]}
    watched.api.send("adapters", "MODIFIED", spoilt)
    cluster = await watched.until(lambda it: it.outdated_adapters)
    [first, _] = cluster.adapters_of("pool")
    assert (first.spec.version, first.spec.placement.replicas) == ("v1", None)
    # Its end, its finalizers and its version are those that it has now.
    assert (first.metadata.generation, first.metadata.finalizers) == (5, ("x/y",))
    assert first.metadata.resource_version == "2"
    assert cluster.outdated_adapters["mural/v1"].generation == 4
    assert (cluster.unreadable_adapters, cluster.complete) == ((), True)

    watched.api.list_again("adapters", [spoilt, an_adapter("v3")])
    cluster = await watched.until(lambda it: "mural/v3" in it._by_pool._pool)
    assert [each.spec.version for each in cluster.adapters_of("pool")] == ["v1", "v3"]
    assert set(cluster.outdated_adapters) == {"mural/v1"}

    watched.api.send("adapters", "MODIFIED", an_adapter("v1", placement={"replicas": 2}))
    cluster = await watched.until(lambda it: not it.outdated_adapters)
    assert cluster.adapters_of("pool")[0].spec.placement.replicas == 2


async def test_what_another_object_of_the_name_once_said_does_not_stand(watched):
    other = an_adapter("v1", **ODD)
    other["metadata"]["uid"] = "2"
    watched.api.send("adapters", "MODIFIED", other)
    cluster = await watched.until(lambda it: it.unreadable_adapters)
    assert [each.spec.version for each in cluster.adapters_of("pool")] == ["v2"]
    assert not cluster.complete
    watched.api.send("adapters", "DELETED", other)
    assert (await watched.until(lambda it: not it.unreadable_adapters)).complete
    watched.api.send("adapters", "ADDED", an_adapter("v1", **ODD))
    assert not (await watched.until(lambda it: it.unreadable_adapters)).complete


async def test_while_an_adapter_never_could_be_read_no_pool_is_completely_known(watched):
    # Nor while nothing at all of one can be read: the key is all there is.
    for odd in (an_adapter("v9", pool="elsewhere", **ODD), {"metadata": META | {"uid": 7}}):
        watched.api.send("adapters", "ADDED", odd)
        cluster = await watched.until(lambda it: not it.complete)
        assert len(cluster.adapters_of("pool")) == 2
        watched.all_told = 0
        watched.api.send("adapters", "DELETED", odd)
        await watched.until(lambda it: it.complete)
        assert watched.all_told


async def test_a_pool_stands_as_it_could_last_be_read(watched):
    watched.api.objects["pods"] = []
    pod = {"metadata": META | {"name": "p", "labels": {"app": "server"}}, "status": {}}
    watched.api.send("pods", "ADDED", pod)
    await watched.until(lambda it: it.pods_of("pool"))
    watched.api.send(
        "servingpools", "MODIFIED", {"metadata": LATER | {"name": "pool"}, "spec": {"selector": 1}}
    )
    cluster = await watched.until(lambda it: it.outdated_pools)
    pool = cluster.pool("pool")
    assert isinstance(pool, ServingPool)
    assert pool.spec.selector.match_labels == {"app": "server"}
    assert (pool.metadata.generation, cluster.outdated_pools["pool"].generation) == (5, 4)
    assert [each.metadata.name for each in cluster.pods_of("pool")] == ["p"]
    assert cluster.complete


async def test_a_pool_that_never_could_be_read_is_none_that_does_not_exist(watched):
    odd = {"metadata": META | {"name": "odd"}, "spec": {"selector": 1}}
    watched.api.send("servingpools", "ADDED", odd)
    cluster = await watched.until(lambda it: not it.complete)
    assert isinstance(cluster.pool("odd"), Unreadable)
    assert cluster.pool("missing") is None
    assert cluster.pool_names == {"pool", "odd"}
    assert set(cluster.pools) == {"pool"}
    watched.all_told = 0
    watched.api.send("servingpools", "DELETED", odd)
    await watched.until(lambda it: it.complete)
    assert watched.all_told


async def test_a_tenant_stands_as_it_could_last_be_read(watched):
    spoilt = {"metadata": LATER | {"name": "acme"}, "spec": {"namespaces": 7}}
    watched.api.send("tenants", "MODIFIED", spoilt)
    cluster = await watched.until(lambda it: it.outdated_tenants)
    assert [each.spec.namespaces for each in cluster.tenants] == [("team",)]
    assert cluster.owners.allow("acme", "team")
    assert cluster.owners.may_allow("acme")
    assert cluster.unreadable_tenants == ()


async def test_no_younger_tenant_takes_the_place_of_one_that_never_could_be_read(watched):
    old = a_tenant("globex", namespaces=["team"], keys=7)
    young = a_tenant("intruder", "2026-01-02T00:00:00Z", tenant="globex", namespaces=["evil"])
    watched.api.list_again("tenants", [young, old])
    cluster = await watched.until(lambda it: it.unreadable_tenants)
    assert cluster.owners.namespaces == {"globex": frozenset({"team"})}
    assert [each.id for each in cluster.tenants] == ["globex"]
