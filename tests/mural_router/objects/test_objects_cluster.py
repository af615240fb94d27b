"""``mural route --objects kubernetes`` at a real API server, with the rights that it needs."""

from __future__ import annotations

import asyncio
import base64
import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import yaml

from mural_resolvers.kubernetes.tenants import keys_json
from mural_resolvers.tenants import KeyRecord, MintedKey, mint_key

pytestmark = pytest.mark.cluster

WAIT_S = 90.0
CRDS = Path(__file__).parents[3] / "charts/mural/crds"
API = "mural.dev/v1alpha1"
PAGES = {
    "/health": b"",
    "/metrics": b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n",
    "/v1/models": b'{"object":"list","data":[{"id":"base","parent":null}]}',
}


async def pod(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As much of a vLLM pod as a router looks at; its answers are what it was asked."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
            length = re.search(r"content-length: (\d+)", head)
            body = await reader.readexactly(int(length[1])) if length else b""
            page = PAGES.get(head.split(" ", 2)[1], body)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(page) + page)
    except (asyncio.IncompleteReadError, ConnectionError):
        pass  # The router has gone.
    finally:
        writer.close()


class Route:
    """A router process; what it is asked is asked until it says what is waited for."""

    def __init__(
        self, process: asyncio.subprocess.Process, log: list[str], client: httpx.AsyncClient
    ):
        self.process = process
        self.log = log
        self.url = self.admin = ""
        self._client = client

    async def ask(self, key: MintedKey, model: str = "base") -> httpx.Response:
        return await self._client.post(
            f"{self.url}/v1/completions",
            headers={"authorization": f"Bearer {key.key}"},
            json={"model": model, "prompt": "hello"},
        )

    async def until_status(self, key: MintedKey, status: int) -> None:
        await until(lambda: self._is(key, status))

    async def _is(self, key: MintedKey, status: int) -> bool:
        return (await self.ask(key)).status_code == status

    async def version(self, key: MintedKey, model: str) -> str:
        """The exact version that answered."""
        answer = await self.ask(key, model)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == answer.headers["x-mural-adapter"]
        return str(answer.headers["x-mural-adapter"])

    async def placement(self, model: str) -> dict[str, Any]:
        found = await self._client.get(f"{self.admin}/debug/placement", params={"model": model})
        return dict(found.json())

    async def page(self, path: str) -> httpx.Response:
        return await self._client.get(f"{self.admin}{path}")


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)


def thing(kind: str, name: str, **spec: Any) -> dict[str, Any]:
    return {"apiVersion": API, "kind": kind, "metadata": {"name": name}, "spec": spec}


def secret(**keys: MintedKey) -> dict[str, Any]:
    """As the operator writes it."""
    text = keys_json({t: [KeyRecord(key.key_id, key.sha256)] for t, key in keys.items()})
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "mural-router-keys"},
        "data": {"keys.json": base64.b64encode(text).decode()},
    }


def tenant(*namespaces: str, name: str = "acme") -> dict[str, Any]:
    keys = [{"secretRef": {"name": "acme", "key": "key"}}]
    return thing("Tenant", name, keys=keys, namespaces=namespaces)


def alias(version: str) -> dict[str, Any]:
    versions = [{"version": version}]
    return thing("AdapterAlias", "stable", tenant="acme", alias="stable", versions=versions)


def adapter(name: str = "v1", **placement: Any) -> dict[str, Any]:
    return thing("Adapter", name, pool="main", tenant="acme", version=name, placement=placement)


def rules(*more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A Role of the router, its account and what binds them."""
    group = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": {"name": "router"},
            "rules": [{**rule, "verbs": ["list", "watch"]} for rule in more],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "router"},
            "roleRef": {"apiGroup": group, "kind": "Role", "name": "router"},
            "subjects": [{"kind": "ServiceAccount", "name": "router", "namespace": "placeholder"}],
        },
    ]


DECLARED = {"apiGroups": ["mural.dev"], "resources": ["adapters", "adapteraliases"]}
TENANTS = {"apiGroups": ["mural.dev"], "resources": ["tenants"]}
KEYS = {"apiGroups": [""], "resources": ["secrets"], "resourceNames": ["mural-router-keys"]}


async def bound(at: Any, account_of: str, *more: Mapping[str, Any]) -> None:
    role, binding = rules(*more)
    binding["subjects"][0]["namespace"] = account_of
    await at.apply(role, binding)


@dataclass
class Stage:
    """The router's own namespace, a team's, and one that nobody has let in."""

    home: Any
    team: Any
    evil: Any


@pytest.fixture
async def stage(cluster: Any) -> Stage:
    await cluster.apply(CRDS)
    for kind in ("tenants", "adapters", "adapteraliases"):
        name = f"crd/{kind}.mural.dev"
        await cluster.kubectl("wait", "--for=condition=Established", name, "--timeout=60s")
    spaces = []
    for name in ("team", "evil"):
        space = f"{cluster.namespace}-{name}"
        await cluster.kubectl("create", "namespace", space)
        spaces.append(replace(cluster, namespace=space))
    return Stage(cluster, *spaces)


@pytest.fixture
async def start(stage: Stage, tmp_path: Path) -> AsyncIterator[Callable[..., Awaitable[Route]]]:
    """A router with its own ServiceAccount, which watches all three namespaces."""
    home = stage.home.namespace
    await stage.home.kubectl("create", "serviceaccount", "router")
    await bound(stage.home, home, DECLARED, TENANTS, KEYS)
    for space in (stage.team, stage.evil):
        await bound(space, home, DECLARED)
    token = (await stage.home.kubectl("create", "token", "router")).strip()
    config = yaml.safe_load(await asyncio.to_thread(stage.home.kubeconfig.read_text))
    for user in config["users"]:
        user["user"] = {"token": token}
    for context in config["contexts"]:
        context["context"]["namespace"] = home
    path = tmp_path / "kubeconfig"
    await asyncio.to_thread(path.write_text, yaml.safe_dump(config))
    pods = [await asyncio.start_server(pod, "127.0.0.1", 0) for _ in range(3)]
    ports = [each.sockets[0].getsockname()[1] for each in pods]
    running: list[Route] = []
    async with httpx.AsyncClient(timeout=30) as client:

        async def begin(*flags: str) -> Route:
            watched = [f"--watch-namespace={each.namespace}" for each in vars(stage).values()]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "mural_router.commands", "--port=0", "--admin-port=0"),
                *(f"--replica=http://127.0.0.1:{port},engine=vllm" for port in ports),
                *("--objects=kubernetes", "--host=127.0.0.1", *watched, *flags),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"KUBECONFIG": str(path)},
            )
            route = Route(process, [], client)
            running.append(route)
            async with asyncio.timeout(WAIT_S):
                assert process.stderr is not None
                while not route.url:
                    line = (await process.stderr.readline()).decode()
                    assert line, route.log
                    route.log.append(line)
                    if found := re.search(r"admin pages on (http://\S+)", line):
                        route.admin = found[1]
                    if found := re.search(r"routing on (http://\S+)", line):
                        route.url = found[1]
            return route

        yield begin
        for each in running:
            each.process.terminate()
            await asyncio.wait_for(each.process.communicate(), 60)
        for listening in pods:
            listening.close()


async def ready(route: Route) -> None:
    async def is_ready() -> bool:
        return (await route.page("/ready")).status_code == 200

    await until(is_ready)


async def test_a_key_is_good_from_its_objects_on_and_no_longer_than_they_are(stage, start):
    route = await start()
    await ready(route)
    key, other = mint_key(), mint_key()
    assert (await route.ask(key)).status_code == 401
    await stage.home.apply(tenant(stage.team.namespace), secret(acme=key))
    await route.until_status(key, 200)
    await stage.home.apply(secret(acme=other))
    await route.until_status(key, 401)
    assert (await route.ask(other)).status_code == 200
    await stage.home.kubectl("delete", "tenant", "acme", "--wait=false")
    await route.until_status(other, 401)
    calls = (await route.page("/metrics")).text
    # One list and one watch for each of: tenants, keys, and two kinds in three namespaces.
    assert 'mural_router_kubernetes_calls_total{verb="list"} 8.0' in calls
    assert 'mural_router_kubernetes_calls_total{verb="watch"} 8.0' in calls


async def test_a_moved_alias_and_another_k_hold_as_soon_as_they_are_known(stage, start):
    key = mint_key()
    await stage.home.apply(tenant(stage.team.namespace), secret(acme=key))
    await stage.team.apply(alias("v4"), adapter(replicas=2))
    route = await start()
    await ready(route)
    assert await route.version(key, "acme:stable") == "acme:v4"
    found = await route.placement("acme:v1")
    assert (found["declared"], found["k"], found["reason"]) == (2, 2, "resident")
    assert sum(row["home"] for row in found["rows"]) == 2
    for version in ("v3", "v4", "v3"):
        await stage.team.apply(alias(version))

        async def moved(version: str = version) -> bool:
            return await route.version(key, "acme:stable") == f"acme:{version}"

        await until(moved)
    status = {"status": {"desiredReplicas": 3}}
    patch = (
        "--subresource=status",
        "--type=merge",
        f"--patch={msgspec.json.encode(status).decode()}",
    )
    await stage.team.kubectl("patch", "adapter", "v1", *patch)

    async def published() -> bool:
        return (await route.placement("acme:v1"))["k"] == 3

    await until(published)


async def test_while_the_api_server_is_away_all_that_was_known_stays_in_force(stage, start):
    key, other = mint_key(), mint_key()
    await stage.home.apply(tenant(stage.team.namespace), secret(acme=key))
    await stage.team.apply(alias("v4"))
    route = await start()
    await ready(route)
    assert await route.version(key, "acme:stable") == "acme:v4"
    await asyncio.to_thread(stage.home.kill_api_server)

    async def stale() -> bool:
        text = (await route.page("/metrics")).text
        return 'mural_router_objects_stale{kind="tenants"} 1.0' in text

    await until(stale)
    assert await route.version(key, "acme:stable") == "acme:v4"
    assert (await route.ask(other)).status_code == 401
    assert (await route.page("/ready")).status_code == 200
    await asyncio.to_thread(stage.home.start)
    await stage.home.apply(secret(acme=other))
    await route.until_status(key, 401)
    assert await route.version(other, "acme:stable") == "acme:v4"


async def test_other_peoples_objects_say_nothing_for_a_tenant(stage, start):
    key = mint_key()
    await stage.home.apply(tenant(stage.team.namespace), secret(acme=key))
    # A tenant of the same id, which would let its own namespace in, and what would then count.
    await stage.evil.apply(tenant(stage.evil.namespace), alias("v9"), adapter(replicas=3))
    route = await start()
    await ready(route)
    assert (await route.placement("acme:v1"))["declared"] is None
    assert await route.version(key, "acme:stable") == "acme:stable", (
        "an exact name, for all it knows"
    )
    await stage.team.apply(alias("v1"), adapter(replicas=2))

    async def counts() -> bool:
        return (await route.placement("acme:v1"))["declared"] == 2

    await until(counts)

    async def moved() -> bool:
        return await route.version(key, "acme:stable") == "acme:v1"

    await until(moved)
    found = (await route.page("/debug/objects")).json()
    refused = {each["kind"]: set(each["refused"]) for each in found["kinds"]}
    assert refused == {
        "tenants": set(),
        "keys": set(),
        "adapters": {f"{stage.evil.namespace}/v1"},
        "aliases": {f"{stage.evil.namespace}/stable"},
    }


async def test_without_the_right_to_list_tenants_it_is_not_ready_and_says_why(stage, start):
    key = mint_key()
    await stage.home.apply(tenant(), secret(acme=key))
    await stage.home.kubectl("delete", "rolebinding", "router")
    route = await start()
    answer = await route.page("/ready")
    assert answer.status_code == 503
    assert "tenants are not known yet" in answer.text
    assert (await route.ask(key)).status_code == 503
    log = "".join(route.log)
    assert "is forbidden" in log
    assert "not ready" in log
    await bound(stage.home, stage.home.namespace, DECLARED, TENANTS, KEYS)
    await ready(route)
    assert (await route.ask(key)).status_code == 200
