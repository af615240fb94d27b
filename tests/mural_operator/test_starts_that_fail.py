"""What an operator says, and how it recovers, where the API server does not let it do its work."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import pytest

from mural_resolvers.kubernetes.client import KubeError
from mural_resolvers.kubernetes.complaint import Complaint
from tests.mural_operator.memory_cluster import InMemory, hurry, in_memory

WAIT_S = 20.0
KEY = "mural_AAAABBBB_" + "c" * 43


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch, caplog) -> AsyncIterator[InMemory]:
    """Three adapters on a pod, and a tenant with a key."""
    hurry(monkeypatch)
    monkeypatch.setattr("mural_resolvers.kubernetes.watch.RETRY_FIRST_S", 0.01)
    monkeypatch.setattr("mural_resolvers.kubernetes.watch.RETRY_MOST_S", 0.05)
    for name in ("RETRY_FIRST_S", "RETRY_MOST_S"):
        monkeypatch.setattr(f"mural_operator.statuses.{name}", 0.05)
    monkeypatch.setattr("mural_operator.tenants_worker.RETRY_S", 0.05)
    monkeypatch.setattr("mural_operator.executor.delay_s", lambda *_: 0.05)
    caplog.set_level(logging.INFO)
    async with in_memory() as found:
        await found.pods(1)
        await found.secret("keys", one=KEY)
        await found.tenant(keys=[{"secretRef": {"name": "keys", "key": "one"}}])
        for name in ("v1", "v2", "v3"):
            await found.adapter(name)
        yield found


async def until(holds: Callable[[], object]) -> None:
    """Look until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def warnings(caplog) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("verb", "what", "said"),
    [
        ("list", "pods", "pods cannot be watched"),
        ("watch", "adapters", "adapters of mural cannot be watched"),
        ("get", "leases", "the Lease mural/mural-operator cannot be reached"),
        ("patch", "adapters", "the finalizer of the adapters, without which none is loaded,"),
        ("patch", "tenants", "the status of objects of the kind tenant cannot be written"),
        ("create", "secrets", "the Secret mural-router-keys, by which routers know keys,"),
    ],
)
async def test_a_right_that_is_missing_is_one_line_and_not_ready_until_it_is_there(
    kube, caplog, verb, what, said
):
    async with kube.operator() as operator:
        operator.client.forbidden.add((verb, what))
        await until(lambda: said in (operator._not_ready() or ""))
        await asyncio.sleep(0.1)
        about = [line for line in warnings(caplog) if line.startswith(said)]
        assert len(about) == 1, about
        assert "403" in about[0]
        assert about[0].endswith(
            "give the account this right, which the chart's roles have (helm upgrade)"
        )
        assert not any(record.exc_info for record in caplog.records)
        if verb == "list":
            assert not operator.leading
        operator.client.forbidden.clear()
        await kube.ready("v1", "v2", "v3")
        await until(lambda: operator._not_ready() is None)


async def test_statuses_of_many_objects_are_one_line_and_one_that_they_are_mended(kube, caplog):
    async with kube.operator() as operator:
        await kube.ready("v1", "v2", "v3")
        operator.client.forbidden.add(("patch", "adapters"))
        for server in kube.servers.values():
            for name in ("acme:v1", "acme:v2", "acme:v3"):
                server.knobs.misreported[name] = "e" * 64
            await server.restart()
        said = "the status of objects of the kind adapter cannot be written"
        await until(lambda: said in (operator._not_ready() or ""))
        await asyncio.sleep(0.1)
        assert sum(said in line for line in warnings(caplog)) == 1
        operator.client.forbidden.clear()
        await until(lambda: operator._not_ready() is None)
        told = [record.getMessage() for record in caplog.records]
        assert told.count("the status of objects of the kind adapter can be written again") == 1


async def test_events_and_secrets_that_are_refused_leave_it_ready(kube, caplog):
    async with kube.operator() as operator:
        operator.client.forbidden |= {("create", "events"), ("get", "secrets/keys")}
        await kube.adapter("v4", placement={"replicas": 2})
        await kube.ready("v1")
        await until(lambda: any("events cannot be recorded" in one for one in warnings(caplog)))
        assert sum("the Secret keys cannot be read" in line for line in warnings(caplog)) == 1
        assert operator._not_ready() is None


async def test_who_cannot_list_all_leaves_the_lease_to_one_that_can(kube):
    async with kube.operator("one") as blind:
        blind.client.forbidden.add(("list", "pods"))
        await until(lambda: "pods" in (blind._not_ready() or ""))
        async with kube.operator("two") as able:
            await until(lambda: able.leading)
            await kube.ready("v1")
            assert not blind.leading
            blind.client.forbidden.clear()
            await until(lambda: blind._not_ready() is None)
            assert able.leading


async def test_a_lease_that_someone_else_holds_is_no_trouble(kube, caplog):
    holder = {"holderIdentity": "somebody", "leaseDurationSeconds": 60}
    about = {"metadata": {"name": "mural-operator"}, "spec": holder}
    kube.api.put("/apis/coordination.k8s.io/v1/namespaces/mural/leases", about)
    async with kube.operator() as operator:
        await until(lambda: operator._not_ready() is None)
        await until(lambda: "the Lease is held by somebody" in caplog.text)
        assert not operator.leading
        assert warnings(caplog) == []


def test_a_complaint_is_repeated_now_and_then_and_when_its_cause_is_another(caplog, monkeypatch):
    now = 1000.0
    monkeypatch.setattr("mural_resolvers.kubernetes.complaint.time.monotonic", lambda: now)
    caplog.set_level(logging.INFO)
    complaint = Complaint(logging.getLogger("x"), "pods cannot be watched", "pods are watched")
    refused, away = KubeError(403, "Forbidden", "no"), KubeError(0, "NoAnswer", "no answer")
    assert complaint.note(refused)
    for _ in range(100):
        assert not complaint.note(refused)
        assert not complaint.note(away)
    assert len(caplog.records) == 2
    now += 301
    complaint.note(refused)
    assert len(caplog.records) == 3
    for _ in range(100):
        complaint.over()
        assert complaint.note(refused)
    assert [record.levelname for record in caplog.records[3:]] == ["INFO"]
    now += 11
    complaint.note(refused)
    assert [record.levelname for record in caplog.records[4:]] == ["WARNING"]


@pytest.mark.parametrize(
    ("error", "what_to_do"),
    [
        (KubeError(0, "NoAnswer", "no answer from https://a (ConnectError)"), "NetworkPolicy"),
        (KubeError(0, "NoAnswer", "[SSL: CERTIFICATE_VERIFY_FAILED]"), "certificate authority"),
        (KubeError(401, "Unauthorized", "Unauthorized"), "not accepted any more"),
        (KubeError(403, "Forbidden", "you may not"), "helm upgrade"),
        (KubeError(404, "NotFound", 'namespaces "x" not found'), "make the namespace"),
        (KubeError(404, "Not Found", "Not Found"), "charts/mural/crds"),
    ],
)
def test_a_complaint_says_what_to_do(caplog, error, what_to_do):
    Complaint(logging.getLogger("x"), "it fails", "it works").note(error)
    [line] = caplog.messages
    assert line.startswith("it fails: ")
    assert what_to_do in line
    assert "\n" not in line
