"""Statuses are written when they differ, at the version that they were compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from mural_operator.alias_verdict import AliasVerdict
from mural_operator.conditions import Condition
from mural_operator.metrics import Metrics
from mural_operator.pool_verdict import PoolVerdict
from mural_operator.status_writer import StatusWriter
from mural_operator.tenancy import TenantVerdict
from mural_operator.verdict import AdapterVerdict, ReplicaEntry
from mural_resolvers.kubernetes.client import JsonObject, KubeError, PatchKind
from mural_resolvers.kubernetes.objects import (
    read_adapter,
    read_alias,
    read_pool,
    read_tenant,
)
from mural_resolvers.kubernetes.paths import ADAPTERS

READY = Condition("Ready", "True", "Ready", "Resident on 2 of 2 replicas.")
LOADING = Condition("Ready", "False", "Loading", "Resident on 1 of 2 replicas.")
FOUND = AdapterVerdict(
    conditions=(READY,),
    replicas=(
        ReplicaEntry("pod-b", "host", pinned=True, digest="b" * 64),
        ReplicaEntry("pod-a", "absent", last_error="no room"),
    ),
    desired=2,
    ready_replicas=2,
    ready="2/2",
    digest="b" * 64,
    rank=16,
    bytes=1024,
    reason="Ready",
)


class Api:
    """One object, as the API server keeps it."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.object: dict[str, Any] | None = fields
        self.asked: list[str] = []
        self.manager = ""
        self.failing: list[KubeError] = []
        """For the next patches."""

    def touch(self) -> None:
        """Somebody changes its labels."""
        assert self.object is not None
        metadata = self.object["metadata"]
        metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)

    async def get(self, path: str) -> bytes:
        self.asked.append("get")
        if self.object is None:
            raise KubeError(404, "NotFound", "gone")
        return json.dumps(self.object).encode()

    async def patch(
        self, path: str, body: JsonObject, *, kind: PatchKind, params: Mapping[str, str]
    ) -> bytes:
        self.asked.append("patch")
        assert path.endswith("/status")
        assert kind == "merge"
        self.manager = params["fieldManager"]
        if self.failing:
            raise self.failing.pop()
        if self.object is None:
            raise KubeError(404, "NotFound", "gone")
        metadata, status = body["metadata"], body["status"]
        assert isinstance(metadata, dict)
        assert isinstance(status, dict)
        if metadata["resourceVersion"] != self.object["metadata"]["resourceVersion"]:
            raise KubeError(409, "Conflict", "the object has been modified")
        merged = self.object.get("status", {}) | status
        self.object["status"] = {name: value for name, value in merged.items() if value is not None}
        self.touch()
        return json.dumps(self.object).encode()

    @property
    def status(self) -> dict[str, Any]:
        assert self.object is not None
        found: dict[str, Any] = self.object["status"]
        return found


class Clock:
    def __init__(self) -> None:
        self.now = datetime(2027, 1, 31, 12, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.now


def fields(**spec: object) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "a",
            "namespace": "team",
            "uid": "1",
            "resourceVersion": "5",
            "generation": 3,
        },
        "spec": spec,
    }


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(watches=dict, calls=dict, leading=lambda: True, adapters=dict)


@pytest.fixture
def api() -> Api:
    return Api(fields(pool="p", tenant="acme", version="v1"))


@pytest.fixture
def writer(api: Api, metrics: Metrics, clock: Clock) -> StatusWriter:
    return StatusWriter(api, metrics=metrics, now=clock)


def count(metrics: Metrics, outcome: str) -> float:
    labels = {"kind": "Adapter", "outcome": outcome}
    return metrics.registry.get_sample_value("mural_operator_status_writes_total", labels) or 0.0


async def test_a_verdict_becomes_the_status(api: Api, writer: StatusWriter) -> None:
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    assert api.status == {
        "observedGeneration": 3,
        "desiredReplicas": 2,
        "readyReplicas": 2,
        "ready": "2/2",
        "digest": f"sha256:{'b' * 64}",
        "rank": 16,
        "bytes": 1024,
        "reason": "Ready",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "observedGeneration": 3,
                "lastTransitionTime": "2027-01-31T12:00:00Z",
                "reason": "Ready",
                "message": "Resident on 2 of 2 replicas.",
            }
        ],
        "replicas": [
            {"pod": "pod-a", "level": "absent", "pinned": False, "lastError": "no room"},
            {"pod": "pod-b", "level": "host", "pinned": True, "digest": f"sha256:{'b' * 64}"},
        ],
    }
    assert api.manager == "mural-operator"


async def test_the_same_verdict_is_not_written_again(
    api: Api, writer: StatusWriter, clock: Clock
) -> None:
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    api.asked.clear()
    clock.now += timedelta(minutes=5)
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    # What this one wrote is known: not even a look is taken.
    assert api.asked == []
    turned = replace(FOUND, replicas=FOUND.replicas[::-1])
    await writer.write_adapter(read_adapter(api.object).metadata, turned)
    assert api.asked == []


async def test_what_another_leader_wrote_is_read_and_not_written_again(
    api: Api, writer: StatusWriter, metrics: Metrics, clock: Clock
) -> None:
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    api.asked.clear()
    clock.now += timedelta(minutes=5)
    await StatusWriter(api, metrics=metrics, now=clock).write_adapter(
        read_adapter(api.object).metadata, FOUND
    )
    assert api.asked == ["get"]
    assert api.status["conditions"][0]["lastTransitionTime"] == "2027-01-31T12:00:00Z"


async def test_a_conditions_time_changes_with_its_truth_alone(
    api: Api, writer: StatusWriter, clock: Clock
) -> None:
    await writer.write_adapter(
        read_adapter(api.object).metadata, replace(FOUND, conditions=(LOADING,))
    )
    clock.now += timedelta(minutes=1)
    other = replace(LOADING, reason="NoRoom", message="Full.")
    await writer.write_adapter(
        read_adapter(api.object).metadata, replace(FOUND, conditions=(other,))
    )
    (condition,) = api.status["conditions"]
    assert condition["reason"] == "NoRoom"
    assert condition["lastTransitionTime"] == "2027-01-31T12:00:00Z"
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    (condition,) = api.status["conditions"]
    assert condition["lastTransitionTime"] == "2027-01-31T12:01:00Z"


async def test_what_holds_no_more_is_taken_away(api: Api, writer: StatusWriter) -> None:
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    nothing = AdapterVerdict((LOADING,), (), 2, 0, "0/2", "", 0, 0, "Loading")
    await writer.write_adapter(read_adapter(api.object).metadata, nothing)
    assert not {"digest", "rank", "bytes"} & api.status.keys()
    assert api.status["replicas"] == []


async def test_an_object_that_was_changed_meanwhile_is_looked_at_again(
    api: Api, writer: StatusWriter, metrics: Metrics
) -> None:
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    seen = read_adapter(api.object)
    api.touch()
    await writer.write_adapter(seen.metadata, replace(FOUND, conditions=(LOADING,)))
    assert api.status["conditions"][0]["reason"] == "Loading"
    assert api.asked[-3:] == ["patch", "get", "patch"]
    assert count(metrics, "conflict") == 1
    assert count(metrics, "ok") == 2


async def test_a_conflict_without_end_is_left_to_the_next_turn(
    api: Api, writer: StatusWriter
) -> None:
    api.failing = [KubeError(409, "Conflict", "again"), KubeError(409, "Conflict", "first")]
    with pytest.raises(KubeError):
        await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    assert api.status["reason"] == "Ready"


async def test_an_object_that_is_gone_is_no_error(
    api: Api, writer: StatusWriter, metrics: Metrics
) -> None:
    seen = read_adapter(api.object)
    api.object = None
    await writer.write_adapter(seen.metadata, FOUND)
    assert count(metrics, "gone") == 1


async def test_another_object_of_the_same_name_is_left_alone(
    api: Api, writer: StatusWriter
) -> None:
    seen = read_adapter(api.object)
    assert api.object is not None
    api.object["metadata"] |= {"uid": "2", "resourceVersion": "9"}
    await writer.write_adapter(seen.metadata, FOUND)
    assert "status" not in api.object


async def test_an_api_server_without_an_answer_is_the_callers_to_judge(
    api: Api, writer: StatusWriter, metrics: Metrics
) -> None:
    api.failing = [KubeError(0, "NoAnswer", "no answer within 10 s")]
    with pytest.raises(KubeError):
        await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    assert count(metrics, "error") == 1


async def test_words_are_no_longer_than_the_schema_takes(api: Api, writer: StatusWriter) -> None:
    long = Condition("Ready", "False", "R" * 500, "m" * 10_000)
    entry = ReplicaEntry("pod", "absent", last_error="e" * 5000)
    found = replace(FOUND, conditions=(long,), replicas=(entry,), reason="R" * 500)
    await writer.write_adapter(read_adapter(api.object).metadata, found)
    (condition,) = api.status["conditions"]
    assert (len(condition["reason"]), len(condition["message"])) == (128, 4096)
    assert len(api.status["replicas"][0]["lastError"]) == 1024
    assert len(api.status["reason"]) == 128


async def test_every_kind_has_its_fields(metrics: Metrics, clock: Clock) -> None:
    accepted = (Condition("Accepted", "True", "Accepted", "Routers obey it."),)
    alias = Api(fields(tenant="acme", alias="stable", versions=[{"version": "v1"}]))
    await StatusWriter(alias, metrics=metrics, now=clock).write_alias(
        read_alias(alias.object).metadata, AliasVerdict(accepted, "Accepted")
    )
    assert alias.status.keys() == {"observedGeneration", "conditions", "reason"}
    tenant = Api(fields())
    await StatusWriter(tenant, metrics=metrics, now=clock).write_tenant(
        read_tenant(tenant.object).metadata, TenantVerdict(accepted, 2, "Accepted")
    )
    assert tenant.status["keys"] == 2
    pool = Api(fields(selector={"matchLabels": {"a": "b"}}))
    await StatusWriter(pool, metrics=metrics, now=clock).write_pool(
        read_pool(pool.object).metadata,
        PoolVerdict(accepted, "smol", "abc", 3, 2, "2/3", 7, "Starting"),
    )
    told = {name: pool.status[name] for name in ("base", "specHash", "replicas", "readyReplicas")}
    assert told == {"base": "smol", "specHash": "abc", "replicas": 3, "readyReplicas": 2}
    assert (pool.status["ready"], pool.status["adapters"]) == ("2/3", 7)


async def test_nothing_is_kept_of_an_object_that_is_gone(api: Api, writer: StatusWriter) -> None:
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    writer.forget(ADAPTERS, "team/a")
    assert not writer._known
    # One that is written about again is read first, as by a new leader.
    api.asked.clear()
    await writer.write_adapter(read_adapter(api.object).metadata, FOUND)
    assert api.asked == ["get"]
