"""The operator on a real API server, over simulated servers as its pods (``make test-cluster``)."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.kubernetes.paths import ADAPTERS, LEASES, SECRETS
from mural_server.protocol import Load
from tests.mural_operator.operated import Operated, condition, operated, shipped_account
from tests.mural_operator.simulated_server import Knobs, Refusal

pytestmark = pytest.mark.cluster

WRITES = ("create", "update", "patch", "delete")


@pytest.fixture
async def kube(cluster: Any, tmp_path: Path) -> AsyncIterator[Operated]:
    """A namespace of the test's own, with a tenant that may declare adapters there.

    Operators have the rights that the chart gives them, and no other.
    """
    account = await shipped_account(cluster, tmp_path)
    async with operated(cluster.namespace, account) as found:
        await found.tenant()
        yield found


def ready(found: dict[str, Any], name: str) -> str:
    return condition(found.get(name, {}), "Ready")["status"]


async def test_an_adapter_that_is_declared_is_resident_and_its_object_says_so(kube, cluster):
    servers = await kube.pods(3)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1", placement={"replicas": 2})
        found = await kube.ready("v1")
    status = found["v1"]["status"]
    holding = [each for each in servers if "acme:v1" in each.resident]
    assert len(holding) == 2
    assert all(each.resident["acme:v1"].pinned for each in holding)
    assert all(each.declared == ("acme:v1",) for each in holding)
    assert (status["ready"], status["desiredReplicas"]) == ("2/2", 2)
    assert status["digest"] == f"sha256:{holding[0].resident['acme:v1'].digest}"
    shown = await cluster.kubectl("get", "adapters")
    head, row = shown.strip().splitlines()
    assert "TENANT" in head
    assert {"acme", "v1", "2/2"} <= set(row.split())
    pools = await kube.pools.until(lambda found: found.get("pool", {}).get("status"))
    assert pools["pool"]["status"]["ready"] == "3/3"


async def test_a_pod_that_dies_is_replaced_by_another_within_seconds(kube):
    await kube.pods(3)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1", placement={"replicas": 1})
        await kube.ready("v1")
        [home] = [name for name, each in kube.servers.items() if "acme:v1" in each.resident]
        others = [each for name, each in kube.servers.items() if name != home]
        loop = asyncio.get_running_loop()
        began = loop.time()
        await kube.remove_pod(home)
        waiting = [
            asyncio.create_task(each.until(lambda one: "acme:v1" in one.resident))
            for each in others
        ]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        print(f"resident elsewhere {loop.time() - began:.2f} s after a pod's death")
        for each in waiting:
            each.cancel()
        assert sum("acme:v1" in each.resident for each in others) == 1


async def test_a_process_that_restarts_in_its_pod_gets_its_adapters_again(kube):
    [server] = await kube.pods(1)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        await kube.ready("v1")
        loop = asyncio.get_running_loop()
        began = loop.time()
        await server.restart()
        await server.until(lambda one: "acme:v1" in one.resident)
        print(f"resident again {loop.time() - began:.2f} s after a restart")
        assert server.declared == ("acme:v1",)
        await server.until(lambda one: one.ready)


async def test_an_adapter_that_is_lost_is_loaded_again(kube):
    [server] = await kube.pods(1)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        await kube.ready("v1")
        for level in ("disk", None):
            server.lose("acme:v1", level=level)
            await server.until(lambda one: "acme:v1" in one.resident)


async def test_deletion_drains_and_then_the_object_goes(kube):
    [server] = await kube.pods(1, knobs=Knobs(unload_delay_s=1.0))
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        await kube.ready("v1")
        await kube.delete("Adapter", "v1")
        found = await kube.adapters.until(lambda found: "v1" not in found or _is_going(found["v1"]))
        if "v1" in found:
            assert "acme:v1" in server.adapters
        await kube.adapters.until(lambda found: "v1" not in found)
        assert server.adapters == {}
        assert server.count("remove", "acme:v1") == 1


def _is_going(found: dict[str, Any]) -> bool:
    return "deletionTimestamp" in found["metadata"]


async def test_deletion_waits_for_nobody_who_is_gone(kube):
    await kube.pods(1)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        await kube.adapter("v2")
        await kube.ready("v1", "v2")
        await kube.remove_pod("server-0")
        await kube.delete("Adapter", "v1")
        await kube.adapters.until(lambda found: "v1" not in found)
        await kube.delete("ServingPool", "pool")
        found = await kube.adapters.until(lambda found: found["v2"]["status"]["reason"] == "NoPool")
        assert "There is no ServingPool pool" in condition(found["v2"], "Placed")["message"]
        await kube.delete("Adapter", "v2")
        await kube.adapters.until(lambda found: "v2" not in found)


async def test_what_a_pod_refuses_is_told_with_the_reason_and_keeps_nothing_else_waiting(
    kube, cluster
):
    [server] = await kube.pods(1)
    server.knobs.refusals["acme:wide"] = Refusal(422, "rank 128 is over the limit 64")
    server.knobs.refusals["acme:gone"] = Refusal(404, "no source has it")
    await kube.pool()
    async with kube.operator():
        for name in ("wide", "gone", "fine"):
            await kube.adapter(name)
        await kube.ready("fine")
        found = await kube.adapters.until(
            lambda found: (
                {found[each]["status"].get("reason") for each in ("wide", "gone")}
                == {"Unusable", "NotFound"}
            )
        )
        assert "rank 128 is over the limit 64" in condition(found["wide"], "Compatible")["message"]
        await server.until(lambda one: one.declared == ("acme:fine",))
        asked = server.count("resident", "acme:wide")
        assert asked == 1
        # Another object is another question.
        server.knobs.refusals.clear()
        await kube.adapter("wide", placement={"priority": 200})
        await kube.ready("wide")
        events = await cluster.kubectl("describe", "adapter", "wide")
        assert "Unusable" in events


async def test_a_slow_pod_keeps_no_other_waiting(kube):
    slow, quick = await kube.pods(2)
    slow.knobs.load_delay_s = 3600
    await kube.pool()
    async with kube.operator():
        for at in range(6):
            await kube.adapter(f"v{at}", placement={"replicas": "All"})
        await quick.until(lambda one: len(one.resident) == 6)
        assert slow.resident == {}
        slow.knobs.load_delay_s = 0.0
        await slow.restart()
        await kube.ready(*(f"v{at}" for at in range(6)))


async def test_a_pod_that_lies_is_not_believed(kube):
    [server] = await kube.pods(1, knobs=Knobs(phantoms={"acme:v1"}))
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        found = await kube.adapters.until(
            lambda found: (
                "ReplicaRefuses" in found.get("v1", {}).get("status", {}).get("reason", "")
            )
        )
        assert ready(found, "v1") == "False"
        assert server.count("resident", "acme:v1") <= 4
        server.knobs.phantoms.clear()
        server.lose("acme:v1", level=None)
        await server.restart()
        await kube.ready("v1")


async def test_a_pod_that_restarts_during_a_load_gets_it_from_the_beginning(kube):
    [server] = await kube.pods(1, knobs=Knobs(load_delay_s=3600))
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        await server.until(lambda one: "acme:v1" in one.adapters)
        server.knobs.load_delay_s = 0.0
        await server.restart()
        await kube.ready("v1")


async def test_a_new_pod_has_its_adapters_before_it_is_ready(kube):
    await kube.pods(1)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1", placement={"replicas": "All"})
        await kube.ready("v1")
        new = await kube.pod("new", knobs=Knobs(await_declared=True, load_delay_s=0.5), ready=False)
        assert not new.ready
        await new.until(lambda one: one.ready)
        assert "acme:v1" in new.resident
        await kube.set_ready("new")
        await kube.adapters.until(lambda found: found["v1"]["status"]["ready"] == "2/2")


async def test_a_pod_that_two_pools_select_is_the_older_one_s_alone(kube):
    [server] = await kube.pods(1)
    await kube.pool("pool")
    await kube.pools.until(lambda found: "pool" in found)
    async with kube.operator():
        await kube.adapter("v1")
        await kube.ready("v1")
        await kube.pool("zwei")
        await kube.adapter("v2", pool="zwei")
        found = await kube.pools.until(
            lambda found: found.get("zwei", {}).get("status", {}).get("reason")
        )
        assert found["zwei"]["status"]["reason"] == "NoPods"
        assert server.declared == ("acme:v1",)


async def test_a_namespace_that_no_tenant_lists_may_declare_nothing(kube):
    [server] = await kube.pods(1)
    await kube.pool()
    await kube.tenant(namespaces=["elsewhere"])
    async with kube.operator():
        await kube.adapter("v1")
        await kube.adapters.until(
            lambda found: found.get("v1", {}).get("status", {}).get("reason") == "NotAllowed"
        )
        assert server.adapters == {}
        await kube.tenant()
        await kube.ready("v1")
        await kube.tenant(namespaces=["elsewhere"])
        await server.until(lambda one: one.adapters == {})


async def test_another_object_for_the_same_version_is_told_that_it_conflicts(kube):
    [server] = await kube.pods(1)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        await kube.ready("v1")
        await kube.adapter("younger", version="v1")
        await kube.adapters.until(
            lambda found: condition(found.get("younger", {}), "Conflict")["status"] == "True"
        )
        # The older one goes, and what it had loaded is the younger one's.
        await kube.delete("Adapter", "v1")
        await kube.ready("younger")
        assert server.count("remove") == 0


async def test_what_is_declared_on_a_pod_and_in_no_object_is_taken_away(kube):
    [server] = await kube.pods(1)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        await kube.ready("v1")
    # The object goes while nobody looks.
    await kube.apply("Adapter", "v1", {"pool": "pool", "tenant": "acme", "version": "v1"})
    await kube.client.patch(
        ADAPTERS.named(kube.namespace, "v1"), {"metadata": {"finalizers": None}}
    )
    await kube.delete("Adapter", "v1")
    await kube.adapters.until(lambda found: "v1" not in found)
    assert "acme:v1" in server.resident
    async with kube.operator():
        await server.until(lambda one: one.adapters == {} and one.declared == ())


async def test_vllm_pods_are_warmed_and_what_they_cannot_tell_is_unknown(kube):
    [server] = await kube.pods(1, engine="vllm")
    await kube.pool(engine="vllm")
    async with kube.operator():
        await kube.adapter("v1")
        found = await kube.adapters.until(
            lambda found: (
                ready(found, "v1") == "Unknown"
                and condition(found["v1"], "Ready")["reason"] == "EngineCannotTell"
            )
        )
        assert found["v1"]["status"]["ready"] == "?/1"
        assert server.count("complete", "acme:v1") == 1
        await kube.delete("Adapter", "v1")
        await kube.adapters.until(lambda found: "v1" not in found)
        assert server.adapters == {}


async def test_the_control_token_is_read_from_its_secret_and_a_new_one_is_taken_over(kube):
    await kube.secret("control", token="first")
    [server] = await kube.pods(1, token="first")
    await kube.pool(controlTokenSecret={"name": "control", "key": "token"})
    async with kube.operator():
        await kube.adapter("v1")
        await kube.ready("v1")
        server.token = "second"
        await kube.secret("control", token="second")
        await server.restart()
        await server.until(lambda one: "acme:v1" in one.resident)


async def test_routers_are_handed_hashes_of_keys_and_the_tenant_is_told(kube):
    key = "mural_AAAABBBB_" + "c" * 43
    await kube.secret("keys", one=key)
    await kube.tenant(keys=[{"secretRef": {"name": "keys", "key": "one"}}])
    async with kube.operator():
        found = await kube.tenants.until(lambda found: found.get("acme", {}).get("status"))
        path = SECRETS.named(kube.namespace, "mural-router-keys")
        secret = json.loads(await kube.client.get(path))
    told = base64.b64decode(secret["data"]["keys.json"]).decode()
    assert key not in told
    if found["acme"]["status"]["keys"]:
        assert "AAAABBBB" in told


async def test_an_api_server_that_dies_takes_no_adapter_along_and_is_told_the_truth_then(
    kube, cluster
):
    servers = await kube.pods(3)
    await kube.pool()
    names = [f"v{at}" for at in range(20)]
    async with kube.operator() as operator:
        for name in names:
            await kube.adapter(name, placement={"replicas": 2})
        # In the midst of it, and again when all is well.
        for _ in range(2):
            await asyncio.to_thread(cluster.kill_api_server)
            lost = [(server, name) for server in servers for name in list(server.resident)[:2]]
            for server, name in lost:
                server.lose(name, level=None)
            await asyncio.to_thread(cluster.start)
            for server, name in lost:
                await server.until(lambda one, name=name: name in one.resident)
            found = await kube.ready(*names)
            assert {found[name]["status"]["ready"] for name in names} == {"2/2"}
        assert sum(server.count("remove") for server in servers) == 0
        # Five watches go on where they were, or list once more.
        assert operator.client.calls["list"] <= 4 * 5
        await kube.delete("Adapter", "v0")
        await kube.adapters.until(lambda found: "v0" not in found)


async def test_a_status_that_someone_else_writes_is_mended(kube):
    await kube.pods(1)
    await kube.pool()
    async with kube.operator():
        await kube.adapter("v1")
        truth = (await kube.ready("v1"))["v1"]["status"]
        lies = {"desiredReplicas": 999, "ready": "9/9", "conditions": [], "replicas": []}
        path = ADAPTERS.status(kube.namespace, "v1")
        await kube.client.patch(path, {"status": lies | {"digest": None}})
        found = await kube.adapters.until(
            lambda found: found["v1"]["status"].get("ready") == "1/1" and ready(found, "v1")
        )
        # Since when it is Ready is not known any more.
        assert found["v1"]["status"] | {"conditions": truth["conditions"]} == truth


async def test_at_rest_nothing_is_written(kube):
    servers = await kube.pods(2)
    await kube.pool()
    async with kube.operator() as operator:
        for at in range(5):
            await kube.adapter(f"v{at}", placement={"replicas": 2})
        await kube.ready(*(f"v{at}" for at in range(5)))
        calls = operator.client.calls
        await asyncio.sleep(3.0)
        before = {verb: calls[verb] for verb in calls}
        for at in range(40):
            servers[at % 2].set_load(Load(running=at))
            await asyncio.sleep(0.25)
        await asyncio.sleep(10.0)
        writes = {verb: calls[verb] - before.get(verb, 0) for verb in WRITES}
        # A Lease is renewed, which is an update: eight a dozen seconds.
        renewals = writes.pop("update")
        assert not any(writes.values()), writes
        assert renewals <= 24
        assert calls["list"] == before["list"]


# -- several operators ----------------------------------------------------------------------------


class Process:
    """``mural operate`` on its own."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def end(self) -> int:
        async with asyncio.timeout(30):
            return await self.process.wait()


@pytest.fixture
async def start(kube: Operated) -> AsyncIterator[Any]:
    """``await start(name)``: a process that does not outlive the test."""
    running: list[Process] = []

    async def begin(name: str) -> Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "mural_operator.commands", "--namespace", kube.namespace, "--no-admin"),
            env=os.environ | {"MURAL_POD_NAME": name, "KUBECONFIG": str(kube.kubeconfig)},
        )
        running.append(Process(name, process))
        return running[-1]

    yield begin
    for each in running:
        if each.process.returncode is None:
            each.signal(signal.SIGKILL)
            await each.end()


async def lease(kube: Operated) -> dict[str, Any]:
    path = LEASES.named(kube.namespace, "mural-operator")
    return json.loads(await kube.client.get(path))["spec"]


async def two_operators(kube: Operated, start: Any) -> tuple[Process, Process]:
    """One that leads and one that waits, over a pool in which all is well."""
    processes = {name: await start(name) for name in ("one", "two")}
    await kube.adapter("v1")
    await kube.ready("v1")
    holder = (await lease(kube))["holderIdentity"].partition("_")[0]
    return processes.pop(holder), next(iter(processes.values()))


async def test_a_killed_operator_is_replaced_by_the_other_within_seconds(kube, start):
    [server] = await kube.pods(1)
    await kube.pool()
    leader, other = await two_operators(kube, start)
    before = await lease(kube)
    loop = asyncio.get_running_loop()
    began = loop.time()
    leader.signal(signal.SIGKILL)
    await leader.end()
    server.lose("acme:v1", level=None)
    await server.until(lambda one: "acme:v1" in one.resident)
    print(f"healed {loop.time() - began:.2f} s after the operator was killed")
    found = await lease(kube)
    assert found["holderIdentity"].startswith(f"{other.name}_")
    assert found["leaseTransitions"] == before["leaseTransitions"] + 1
    assert server.count("resident", "acme:v1") == 2


async def test_an_operator_that_slept_through_the_end_of_its_term_does_nothing_more(kube, start):
    [server] = await kube.pods(1)
    await kube.pool()
    leader, _ = await two_operators(kube, start)
    leader.signal(signal.SIGSTOP)
    server.lose("acme:v1", level=None)
    await server.until(lambda one: "acme:v1" in one.resident)
    loads = server.count("resident", "acme:v1")
    server.lose("acme:v1", level=None)
    leader.signal(signal.SIGCONT)
    for more in range(1, 6):
        await server.until(lambda one: "acme:v1" in one.resident)
        assert server.count("resident", "acme:v1") == loads + more
        server.lose("acme:v1", level=None)
    await server.until(lambda one: "acme:v1" in one.resident)


async def test_an_operator_that_is_told_to_end_gives_the_lease_back(kube, start):
    [server] = await kube.pods(1)
    await kube.pool()
    leader, other = await two_operators(kube, start)
    loop = asyncio.get_running_loop()
    began = loop.time()
    leader.signal(signal.SIGTERM)
    assert await leader.end() == 0
    server.lose("acme:v1", level=None)
    await server.until(lambda one: "acme:v1" in one.resident)
    print(f"healed {loop.time() - began:.2f} s after the operator was told to end")
    assert (await lease(kube))["holderIdentity"].startswith(f"{other.name}_")
