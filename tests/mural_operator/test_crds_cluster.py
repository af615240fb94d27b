"""The custom resources at a real API server, as a person with kubectl meets them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

CRDS = Path(__file__).resolve().parents[2] / "charts/mural/crds"
AT_ONCE = 6
SHA256 = "0" * 64
KEY = f"mural_{'a' * 16}_{'b' * 43}"

Fields = dict[str, Any]
Case = tuple[str, Fields, str]
"""A kind, what is put into a spec that is right, and what a person is told (empty: nothing)."""


@pytest.fixture
async def installed(cluster: Any) -> Any:
    """The cluster with our resources."""
    await cluster.apply(CRDS)
    names = [f"crd/{path.stem}.mural.dev" for path in CRDS.glob("*.yaml")]
    await cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names)
    return cluster


RIGHT: dict[str, Fields] = {
    "Adapter": {"pool": "smol", "tenant": "acme", "version": "v1"},
    "AdapterAlias": {"tenant": "acme", "alias": "stable", "versions": [{"version": "v1"}]},
    "ServingPool": {"selector": {"matchLabels": {"app": "mural"}}},
    "Tenant": {},
}


def made(kind: str, called: str = "one", **spec: object) -> Fields:
    """An object that is right but for what is changed; None takes a field away."""
    fields = {key: value for key, value in (RIGHT[kind] | spec).items() if value is not None}
    return {
        "apiVersion": "mural.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": called},
        "spec": fields,
    }


async def mismatch(cluster: Any, told: str, body: Fields, *command: str) -> str | None:
    """What is wrong with kubectl's answer: it must be a refusal with these words, or none."""
    status, _, said = await cluster.run(
        "kubectl", "-n", cluster.namespace, *command, told=json.dumps(body).encode()
    )
    if status == 0:
        return f"{body} went through" if told else None
    # A key in the wrong place must not go further than it has.
    return None if told and told in said and KEY not in said else f"{body}: {said}"


async def every_mismatch(found: Iterable[Coroutine[Any, Any, str | None]]) -> list[str]:
    """All of them, some asked for at a time."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(each: Coroutine[Any, Any, str | None]) -> str | None:
        async with limit:
            return await each

    return [wrong for wrong in await asyncio.gather(*map(one, found)) if wrong]


def placed(**placement: object) -> Fields:
    return {"placement": placement}


ADAPTERS: list[Case] = [
    ("Adapter", {}, ""),
    ("Adapter", {"tenant": "a", "name": "sql.v2_x-y", "version": "V1.0_rc-1"}, ""),
    ("Adapter", {"digest": f"sha256:{SHA256}", "source": "s3/prod", "base": "org/base"}, ""),
    ("Adapter", placed(replicas=0), ""),
    ("Adapter", placed(replicas="All", level="slot", pinned=False, priority=1000), ""),
    ("Adapter", placed(minReplicas=0, maxReplicas=3), ""),
    ("Adapter", placed(podSelector={"matchLabels": {"zone": "a"}}), ""),
    ("Adapter", {"prewarm": "Disk"}, ""),
    ("Adapter", {"pool": None}, "spec.pool: Required value"),
    ("Adapter", {"tenant": None}, "spec.tenant: Required value"),
    ("Adapter", {"version": None}, "spec.version: Required value"),
    ("Adapter", {"version": "latest"}, "latest is an alias: name the version that is meant"),
    ("Adapter", {"version": "a..b"}, "must not contain '..'"),
    ("Adapter", {"version": "../../etc"}, "spec.version in body should match"),
    ("Adapter", {"version": "v1\n"}, "spec.version in body should match"),
    ("Adapter", {"version": "v" * 129}, "Too long: may not be more than 128"),
    ("Adapter", {"version": f"v{KEY}"}, "an API key must not stand here"),
    ("Adapter", {"tenant": "Acme"}, "spec.tenant in body should match"),
    ("Adapter", {"tenant": "acme/x"}, "spec.tenant in body should match"),
    ("Adapter", {"tenant": "_aliases"}, "spec.tenant in body should match"),
    ("Adapter", {"name": "a" * 64}, "Too long: may not be more than 63"),
    ("Adapter", {"digest": SHA256}, "spec.digest in body should match"),
    ("Adapter", {"source": "s3://id:secret@host/x"}, "spec.source in body should match"),
    ("Adapter", {"token": "x"}, 'unknown field "spec.token"'),
    ("Adapter", placed(replicas="all"), "a number from 0 to 1000, or All"),
    ("Adapter", placed(replicas=-1), "a number from 0 to 1000, or All"),
    ("Adapter", placed(replicas=1001), "a number from 0 to 1000, or All"),
    (
        "Adapter",
        placed(replicas=2, minReplicas=1, maxReplicas=3),
        "give either replicas or minReplicas and maxReplicas",
    ),
    ("Adapter", placed(minReplicas=1), "minReplicas and maxReplicas come together"),
    ("Adapter", placed(minReplicas=3, maxReplicas=2), "minReplicas is more than maxReplicas"),
    ("Adapter", placed(level="disk"), 'Unsupported value: "disk"'),
    ("Adapter", {"prewarm": "Host"}, 'Unsupported value: "Host"'),
]
ALIASES: list[Case] = [
    ("AdapterAlias", {}, ""),
    ("AdapterAlias", {"alias": "latest"}, ""),
    (
        "AdapterAlias",
        {"versions": [{"version": "v1", "weight": 9}, {"version": "v2", "weight": 0}]},
        "",
    ),
    ("AdapterAlias", {"alias": "v1"}, "an alias cannot stand for itself"),
    ("AdapterAlias", {"alias": "v/1"}, "spec.alias in body should match"),
    ("AdapterAlias", {"versions": []}, "should have at least 1 items"),
    ("AdapterAlias", {"versions": [{"version": "latest"}]}, "latest is an alias"),
    (
        "AdapterAlias",
        {"versions": [{"version": "v1", "weight": 0}]},
        "at least one version must have a weight above 0",
    ),
    ("AdapterAlias", {"versions": [{"version": "v1"}, {"version": "v1"}]}, "Duplicate value"),
    (
        "AdapterAlias",
        {"versions": [{"version": "v1", "weight": -1}]},
        "should be greater than or equal to 0",
    ),
]
SECRET = {"name": "s", "key": "token"}
POOLS: list[Case] = [
    ("ServingPool", {}, ""),
    ("ServingPool", {"controlTokenSecret": SECRET, "sources": ["s3", "hub"]}, ""),
    ("ServingPool", {"controlTls": {"caSecret": SECRET, "serverName": "mural"}}, ""),
    ("ServingPool", {"engine": "vllm", "apiKeySecret": SECRET}, ""),
    ("ServingPool", {"capacity": {"adapters": 8, "bytes": 2**40}}, ""),
    ("ServingPool", {"selector": {"matchLabels": {}}}, "should have at least 1 properties"),
    ("ServingPool", {"selector": {}}, "spec.selector.matchLabels: Required value"),
    ("ServingPool", {"engine": "sglang"}, 'Unsupported value: "sglang"'),
    ("ServingPool", {"port": 0}, "should be greater than or equal to 1"),
    (
        "ServingPool",
        {"engine": "vllm", "controlTokenSecret": SECRET},
        "controlTokenSecret is of the control API, which engine vllm does not have",
    ),
    ("ServingPool", {"apiKeySecret": SECRET}, "apiKeySecret is for engine vllm"),
    ("ServingPool", {"controlToken": "x"}, 'unknown field "spec.controlToken"'),
]
HASHED = {"id": "a" * 16, "sha256": SHA256}
TENANTS: list[Case] = [
    ("Tenant", {}, ""),
    ("Tenant", {"tenant": "a_b", "weight": 0.5, "namespaces": ["team-a"], "base": False}, ""),
    ("Tenant", {"keys": [{"secretRef": SECRET}, HASHED]}, ""),
    ("Tenant", {"keys": [HASHED | {"expires": "2027-01-31T12:00:00Z"}]}, ""),
    ("Tenant", {"grants": ["globex", "globex/sql:v1", "@sql*"], "public": ["sql", "*"]}, ""),
    ("Tenant", {"limits": {"requestsPerMinute": 60, "bytes": "2Gi"}}, ""),
    ("Tenant", {"limits": {"queueLength": 0, "adapters": 0, "bytes": 0}}, ""),
    ("Tenant", {"keys": [KEY]}, "must be of type object"),
    ("Tenant", {"keys": [{"key": KEY}]}, 'unknown field "spec.keys[0].key"'),
    ("Tenant", {"keys": [{"id": KEY, "sha256": SHA256}]}, "may not be more than 32"),
    ("Tenant", {"keys": [HASHED | {"sha256": KEY}]}, "may not be more than 64"),
    (
        "Tenant",
        {"keys": [HASHED | {"secretRef": SECRET}]},
        "give either secretRef or id and sha256",
    ),
    ("Tenant", {"keys": [{}]}, "give either secretRef or id and sha256"),
    ("Tenant", {"keys": [{"id": "a" * 16}]}, "id and sha256 come together"),
    ("Tenant", {"keys": [HASHED, HASHED]}, "an id stands here twice"),
    ("Tenant", {"keys": [HASHED | {"expires": "soon"}]}, "must be of type date-time"),
    ("Tenant", {"weight": 0}, "should be greater than 0"),
    ("Tenant", {"grants": ["not a grant"]}, "spec.grants[0] in body should match"),
    ("Tenant", {"limits": {"requestsPerMinute": 0}}, "should be greater than or equal to 1"),
    ("Tenant", {"limits": {"queueLength": -1}}, "should be greater than or equal to 0"),
    ("Tenant", {"limits": {"bytes": "much"}}, "a number of bytes, or a size such as 2Gi"),
    ("Tenant", {"namespaces": ["Team"]}, "spec.namespaces[0] in body should match"),
]


@pytest.mark.parametrize(
    "cases", [ADAPTERS, ALIASES, POOLS, TENANTS], ids=["adapters", "aliases", "pools", "tenants"]
)
async def test_objects_are_taken_or_refused_in_words_that_say_why(
    installed: Any, cases: list[Case]
) -> None:
    async def wrong(case: Case) -> str | None:
        kind, spec, told = case
        body = made(kind, **spec)
        return await mismatch(installed, told, body, "create", "--dry-run=server", "-f", "-")

    assert await every_mismatch(wrong(case) for case in cases) == []


CHANGES: list[tuple[str, Fields, Fields, str]] = [
    ("Adapter", {}, {"version": "v2"}, "version is immutable: make another Adapter"),
    ("Adapter", {}, {"tenant": "globex"}, "tenant is immutable"),
    ("Adapter", {}, {"name": "sql"}, "name is immutable"),
    ("Adapter", {"source": "s3"}, {"source": "hub"}, "source is immutable"),
    ("Adapter", {}, {"source": "hub"}, "source is immutable"),
    ("Adapter", {"source": "s3"}, {"source": None}, "source is immutable"),
    ("Adapter", {}, {"digest": f"sha256:{SHA256}"}, ""),
    (
        "Adapter",
        {"digest": f"sha256:{SHA256}"},
        {"digest": f"sha256:{'1' * 64}"},
        "digest is immutable once it is set",
    ),
    ("Adapter", {"digest": f"sha256:{SHA256}"}, {"digest": None}, "digest is immutable"),
    ("Adapter", {}, {"pool": "other", "placement": {"replicas": 3}, "base": "b"}, ""),
    ("AdapterAlias", {}, {"alias": "canary"}, "alias is immutable"),
    ("AdapterAlias", {}, {"versions": [{"version": "v2"}]}, ""),
    ("ServingPool", {}, {"engine": "vllm"}, "engine is immutable"),
    ("Tenant", {}, {"tenant": "acme"}, "tenant is immutable"),
    ("Tenant", {"tenant": "acme"}, {"tenant": "globex"}, "tenant is immutable"),
    ("Tenant", {}, {"weight": 2}, ""),
]


async def test_what_identifies_never_changes_and_the_rest_may(installed: Any) -> None:
    async def wrong(at: int, kind: str, before: Fields, change: Fields, told: str) -> str | None:
        name = f"change-{at}"
        await installed.apply(made(kind, name, **before))
        patch = ("patch", kind.lower(), name, "--type=merge", "--patch-file=/dev/stdin")
        return await mismatch(installed, told, {"spec": change}, *patch)

    assert await every_mismatch(wrong(at, *case) for at, case in enumerate(CHANGES)) == []


async def test_a_tenants_id_has_the_length_that_ids_have(installed: Any) -> None:
    name = "t" * 64
    said = await installed.refusal("create", "-f", "-", told=made("Tenant", name))
    assert "give spec.tenant" in said
    await installed.kubectl("create", "-f", "-", told=made("Tenant", name, tenant="t"))


async def test_what_is_left_out_has_its_default(installed: Any) -> None:
    await installed.apply(made("Adapter"))
    found = await installed.get("adapter", "one")
    assert found["spec"] == {
        **RIGHT["Adapter"],
        "name": "default",
        "placement": {"level": "host", "pinned": True, "priority": 100},
        "prewarm": "None",
    }


async def test_a_status_cannot_be_written_beside_a_spec_nor_a_spec_beside_a_status(
    installed: Any,
) -> None:
    await installed.apply(made("Adapter") | {"status": {"ready": "9/9"}})
    assert "status" not in await installed.get("adapter", "one")
    patch = {"spec": {"pool": "stolen"}, "status": {"ready": "1/1"}}
    await installed.kubectl(
        *("patch", "adapter", "one", "--type=merge", "--subresource=status"),
        "--patch-file=/dev/stdin",
        told=patch,
    )
    found = await installed.get("adapter", "one")
    assert found["status"] == {"ready": "1/1"}
    assert found["spec"]["pool"] == "smol"


async def test_the_table_of_adapters_tells_what_people_ask(installed: Any) -> None:
    await installed.apply(made("Adapter", placement={"replicas": 2}))
    status = {
        "ready": "2/2",
        "rank": 16,
        "reason": "Ready",
        "digest": f"sha256:{SHA256}",
    }
    await installed.kubectl(
        *("patch", "adapter", "one", "--type=merge", "--subresource=status"),
        "--patch-file=/dev/stdin",
        told={"status": status},
    )
    head, row = (await installed.kubectl("get", "adapters")).splitlines()
    assert head.split() == ["NAME", "TENANT", "VERSION", "READY", "RANK", "AGE", "REASON"]
    name, tenant, version, ready, rank, _, reason = row.split()
    assert (name, tenant, version) == ("one", "acme", "v1")
    assert (ready, rank, reason) == ("2/2", "16", "Ready")
    wide, _ = (await installed.kubectl("get", "adp", "-o", "wide")).splitlines()
    assert {"ADAPTER", "POOL", "DIGEST"} <= set(wide.split())


async def test_the_other_tables_and_the_category_show_all_kinds(installed: Any) -> None:
    await installed.apply(
        *(made(kind) for kind in RIGHT if kind != "AdapterAlias"),
        made(
            "AdapterAlias",
            versions=[{"version": "v1", "weight": 9}, {"version": "v2", "weight": 1}],
        ),
    )
    for short, columns in {
        "ada": ["NAME", "TENANT", "ADAPTER", "ALIAS", "VERSIONS", "AGE", "REASON"],
        "spool": ["NAME", "BASE", "ENGINE", "READY", "ADAPTERS", "AGE", "REASON"],
        "ten": ["NAME", "WEIGHT", "KEYS", "AGE", "REASON"],
    }.items():
        head = (await installed.kubectl("get", short)).splitlines()[0]
        assert head.split() == columns
    aliases = await installed.kubectl("get", "adapteraliases")
    assert '{"version":"v1","weight":9}' in aliases
    assert '{"version":"v2","weight":1}' in aliases
    every = await installed.kubectl("get", "mural", "-o", "name")
    assert sorted(line.partition(".")[0] for line in every.split()) == [
        "adapter",
        "adapteralias",
        "servingpool",
        "tenant",
    ]


async def test_explain_says_what_a_field_is_for(installed: Any) -> None:
    said = await installed.kubectl("explain", "adapter.spec.placement.replicas")
    assert "A number of replicas, or All." in said
