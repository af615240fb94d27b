"""An operator that waits for the Lease: it knows all, does nothing, and takes over at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from mural_server.protocol import Load
from tests.mural_operator.memory_cluster import InMemory, hurry, in_memory, paths, short_lease

WAIT_S = 20.0
WRITES = {"create", "update", "patch", "delete"}


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InMemory]:
    hurry(monkeypatch)
    short_lease(monkeypatch)
    async with in_memory() as found:
        yield found


async def until(holds: Callable[[], object]) -> None:
    """Look until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def figures(operator) -> list[str]:
    text = operator.metrics.exposition().decode()
    return [line for line in text.splitlines() if line.startswith("mural_operator_")]


async def test_who_waits_follows_every_pod_and_reads_alone(kube):
    servers = await kube.pods(2)
    await kube.secret("control", token="t")
    for server in servers:
        server.token = "t"
    await kube.pool(controlTokenSecret={"name": "control", "key": "token"})
    key = "mural_AAAABBBB_" + "c" * 43
    await kube.secret("keys", one=key)
    await kube.tenant(keys=[{"secretRef": {"name": "keys", "key": "one"}}])
    async with kube.operator("one") as leader:
        await until(lambda: leader.leading)
        async with kube.operator("two") as waiting:
            await kube.adapter("v1", placement={"replicas": 2})
            await kube.ready("v1")
            await until(lambda: all(server.connections == 2 for server in servers))
            for server in servers:
                server.lose("acme:v1", level=None)
                server.set_load(Load(running=3))
            await kube.adapter("v2", placement={"replicas": "All"})
            await kube.ready("v1", "v2")
            await kube.delete("Adapter", "v2")
            await kube.adapters.until(lambda found: "v2" not in found)

            assert not waiting.leading
            assert waiting.client.calls.keys() == {"get", "list", "watch"}
            # Of Secrets those of pools alone.
            assert not waiting._fleet.secrets.knows({"keys"})
            for server in servers:
                assert server.connections == 2
                assert server.count("resident", "acme:v1") == 2
                assert server.count("remove") == 1
            told = figures(waiting)
            assert "mural_operator_leading 0.0" in told
            led = ("adapters{", "reconcile", "action_seconds", "refusals", "status_writes")
            assert not [
                line
                for line in told
                if line.startswith(tuple(f"mural_operator_{each}" for each in led))
            ]
            assert [line for line in figures(leader) if "mural_operator_adapters{" in line]


async def test_who_takes_over_acts_at_once_on_what_it_has_heard(kube):
    servers = await kube.pods(3)
    async with kube.operator("one") as leader:
        await until(lambda: leader.leading)
        async with kube.operator("two") as waiting:
            await kube.adapter("v1", placement={"replicas": "All"})
            await kube.ready("v1")
            await until(lambda: all(server.connections == 2 for server in servers))
            lists = waiting.client.calls["list"]
            leader.client.lost = True
            await until(lambda: not leader.leading)
            servers[0].lose("acme:v1", level=None)
            assert "acme:v1" not in servers[0].resident
            await until(lambda: waiting.leading)
            await servers[0].until(lambda one: "acme:v1" in one.resident)
            # No pod was asked anew how it is, nothing listed anew.
            assert [server.connections for server in servers] == [2, 2, 2]
            assert waiting.client.calls["list"] == lists
            assert servers[1].count("resident") == servers[2].count("resident") == 1
            leader.client.lost = False


async def test_a_term_that_ends_leaves_the_followers_and_takes_its_figures_along(kube):
    servers = await kube.pods(1)
    async with kube.operator("one") as operator:
        await kube.adapter("v1")
        await kube.ready("v1")
        assert [line for line in figures(operator) if "mural_operator_adapters{" in line]
        # Somebody else takes the Lease.
        path = next(path for path in kube.api.objects if "/leases/" in path)
        kube.api.change(path, {"spec": {"holderIdentity": "somebody", "leaseDurationSeconds": 60}})
        await until(lambda: not operator.leading)
        await until(lambda: not [one for one in figures(operator) if "reconciles_total{" in one])
        assert not [line for line in figures(operator) if "mural_operator_adapters{" in line]
        writes = paths(operator.client.writes, but="/leases/")
        servers[0].lose("acme:v1", level=None)
        await asyncio.sleep(0.3)
        assert paths(operator.client.writes, but="/leases/") == writes
        assert servers[0].count("resident") == 1
        assert servers[0].connections == 1
        kube.api.change(path, {"spec": {"holderIdentity": ""}})
        await servers[0].until(lambda one: "acme:v1" in one.resident)
        assert servers[0].connections == 1


async def test_pools_that_go_are_followed_no_more(kube):
    servers = await kube.pods(2)
    async with kube.operator() as operator:
        await until(lambda: all(server.connections == 1 for server in servers))
        await kube.delete("ServingPool", "pool")
        await until(lambda: operator._fleet.follower("pool", "server-0") is None)
        assert not operator._fleet._pools
