"""A running operator, and objects that an edit has spoilt: told so, and nothing is unloaded."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from mural_operator.reconcile import FINALIZER
from mural_resolvers.kubernetes.paths import ADAPTERS, SERVING_POOLS, TENANTS
from tests.mural_operator.memory_cluster import InMemory, hurry, in_memory
from tests.mural_operator.operated import condition


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InMemory]:
    hurry(monkeypatch)
    async with in_memory() as found:
        yield found


def edit(kube: InMemory, resource, name: str, spec) -> None:
    """As a schema of another day lets it through."""
    kube.api.change(resource.named("mural", name), {"spec": spec})


def reason(name: str, *expected: str):
    return lambda found: found.get(name, {}).get("status", {}).get("reason") in expected


def ready(name: str, expected: str):
    return lambda found: found.get(name, {}).get("status", {}).get("ready") == expected


async def test_a_spoilt_adapter_stays_says_so_and_heals_until_the_operator_starts_anew(kube):
    [server] = await kube.pods(1)
    await kube.adapter("v1")
    async with kube.operator():
        await kube.ready("v1")
        edit(kube, ADAPTERS, "v1", {"placement": {"replicas": "Some"}})
        found = (await kube.adapters.until(reason("v1", "Malformed")))["v1"]
        accepted = condition(found, "Accepted")
        assert accepted["status"] == "False"
        assert "replicas" in accepted["message"]
        assert condition(found, "Ready")["status"] == "False"
        assert (found["status"]["ready"], found["status"]["desiredReplicas"]) == ("1/1", 1)
        server.lose("acme:v1", level=None)
        await server.until(lambda it: "acme:v1" in it.resident)
        await kube.adapters.until(ready("v1", "1/1"))
    async with kube.operator():
        await kube.adapters.until(ready("v1", "?/1"))
        assert server.resident.keys() == {"acme:v1"}
        assert server.count("remove") == 0
        # What is deleted goes all the same.
        await kube.adapter("v2")
        await kube.ready("v2")
        await kube.delete("Adapter", "v2")
        await kube.adapters.until(lambda it: "v2" not in it)
        edit(kube, ADAPTERS, "v1", {"placement": {"replicas": 1}})
        found = (await kube.adapters.until(reason("v1", "Ready")))["v1"]
        assert condition(found, "Accepted")["status"] == ""
        assert server.resident.keys() == {"acme:v1"}
        assert server.count("resident", "acme:v1") == 2
        assert server.count("remove") == 1
    events = [each for key, each in kube.api.objects.items() if "/events/" in key]
    assert "Malformed" in {each["reason"] for each in events}


async def test_a_spoilt_adapter_is_unloaded_when_it_is_deleted(kube):
    [server] = await kube.pods(1)
    await kube.adapter("v1")
    async with kube.operator():
        await kube.ready("v1")
        edit(kube, ADAPTERS, "v1", {"placement": {"replicas": "Some"}})
        await kube.adapters.until(reason("v1", "Malformed"))
        await kube.delete("Adapter", "v1")
        await kube.adapters.until(lambda found: "v1" not in found)
        await server.until(lambda it: not it.resident)


async def test_an_adapter_that_never_could_be_read_goes_when_it_is_deleted(kube):
    await kube.pods(1)
    await kube.adapter("v1", pool=7)
    kube.api.change(ADAPTERS.named("mural", "v1"), {"metadata": {"finalizers": [FINALIZER]}})
    async with kube.operator():
        await kube.adapters.until(reason("v1", "Malformed"))
        await kube.delete("Adapter", "v1")
        await kube.adapters.until(lambda it: "v1" not in it)


@pytest.mark.parametrize(
    "spec",
    [
        {"grants": ["no!"]},
        pytest.param({"weight": "much"}, marks=pytest.mark.slow),
        pytest.param({"namespaces": 7}, marks=pytest.mark.slow),
    ],
)
async def test_a_tenant_that_is_not_accepted_has_nothing_unloaded(kube, spec):
    [server] = await kube.pods(1)
    await kube.adapter("v1")
    async with kube.operator():
        await kube.ready("v1")
        edit(kube, TENANTS, "acme", spec)
        await kube.tenants.until(reason("acme", "Malformed"))
        # It is kept as before, not only left there.
        server.lose("acme:v1", level=None)
        await server.until(lambda it: "acme:v1" in it.resident)
        await kube.ready("v1")
    async with kube.operator():
        await kube.adapter("v2", pool="none")
        await kube.adapters.until(reason("v2", "NoPool"))
        await kube.adapters.until(reason("v1", "Ready", "TenantNotAccepted"))
        assert "acme:v1" in server.resident
        assert server.count("remove") == 0


@pytest.mark.slow
async def test_a_spoilt_pool_goes_on_as_it_was_and_is_left_alone_after_a_restart(kube):
    [server] = await kube.pods(1)
    await kube.adapter("v1")
    async with kube.operator():
        await kube.ready("v1")
        edit(kube, SERVING_POOLS, "pool", {"capacity": {"adapters": "many"}})
        found = (await kube.pools.until(reason("pool", "Malformed")))["pool"]
        assert condition(found, "Healthy")["status"] == "True"
        assert "capacity" in condition(found, "Accepted")["message"]
        server.lose("acme:v1", level=None)
        await server.until(lambda it: "acme:v1" in it.resident)
        await kube.ready("v1")
    async with kube.operator():
        found = (await kube.adapters.until(reason("v1", "PoolMalformed")))["v1"]
        assert found["status"]["desiredReplicas"] == 1
        await kube.pools.until(ready("pool", "?"))
        assert "acme:v1" in server.resident
        edit(kube, SERVING_POOLS, "pool", {"capacity": {"adapters": 5}})
        await kube.ready("v1")
        assert server.count("remove") == 0
