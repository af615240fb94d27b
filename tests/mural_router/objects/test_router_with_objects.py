"""A router over an objects file: what it goes by, and what its pages tell of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import mint_key
from mural_router.admin.app import create_admin_app
from mural_router.config import Config
from mural_router.limits.local import LocalLimiter
from mural_router.objects import KindState
from mural_router.placement import PlacementRequest
from mural_router.running import Router
from mural_router.settings import Secrets

KEY = mint_key()
OBJECTS = f"""\
apiVersion: mural.dev/v1alpha1
kind: Tenant
metadata: {{name: acme}}
spec: {{keys: [{{id: {KEY.key_id}, sha256: {KEY.sha256}}}]}}
---
apiVersion: mural.dev/v1alpha1
kind: Adapter
metadata: {{name: v1}}
spec: {{pool: main, tenant: acme, version: v1, placement: {{replicas: 2}}}}
---
apiVersion: mural.dev/v1alpha1
kind: AdapterAlias
metadata: {{name: stable, namespace: elsewhere}}
spec: {{tenant: acme, alias: stable, versions: [{{version: v1}}]}}
"""
ALIASES = "acme: {stable: [{version: v1}]}"


def router_over(**flags: object) -> Router:
    return Router(Config(None, flags, Secrets()), LocalLimiter())


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Router]:
    path = tmp_path / "objects.yaml"
    path.write_text(OBJECTS)
    router = router_over(objects=str(path))
    yield router
    await router.close()


@pytest.fixture
async def pages(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_admin_app(router))
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as client:
        yield client


async def test_keys_and_k_are_those_of_the_objects(router: Router) -> None:
    principal = router.routing._auth.principal((f"Bearer {KEY.key}",))
    assert principal.tenant == "acme"
    assert router.dispatch.declared(PlacementRequest("acme/default:v1")) == 2
    assert router.dispatch.declared(PlacementRequest("acme/default:v2")) is None
    assert router.dispatch.declared(PlacementRequest(None)) is None
    assert router.objects is not None
    assert router.versions.overlay is router.objects.declared


async def test_the_debug_page_says_what_is_in_force_and_what_is_not(
    pages: httpx.AsyncClient,
) -> None:
    found = (await pages.get("/debug/objects")).json()
    assert found["source"].endswith("objects.yaml")
    assert found["not_ready"] is None
    kinds = {each["kind"]: each for each in found["kinds"]}
    assert {kind: each["in_force"] for kind, each in kinds.items()} == {
        "tenants": 1,
        "keys": 1,
        "adapters": 1,
        "aliases": 0,
    }
    assert "elsewhere" in kinds["aliases"]["refused"]["elsewhere/stable"]
    assert KEY.sha256 not in str(found)


async def test_metrics_count_objects_and_say_when_the_file_is_stale(
    router: Router, pages: httpx.AsyncClient, tmp_path: Path
) -> None:
    lines = (await pages.get("/metrics")).text.splitlines()
    assert 'mural_router_objects{kind="keys"} 1.0' in lines
    assert 'mural_router_objects_refused{kind="aliases"} 1.0' in lines
    assert 'mural_router_objects_stale{kind="tenants"} 0.0' in lines
    assert 'mural_router_file_stale{file="objects"} 0.0' in lines
    await asyncio.to_thread((tmp_path / "objects.yaml").write_text, "kind: Nonsense")
    assert router.objects is not None
    for _ in range(2):
        await router.objects.look()  # type: ignore[attr-defined]  # a file's
    lines = (await pages.get("/metrics")).text.splitlines()
    assert 'mural_router_objects_stale{kind="tenants"} 1.0' in lines
    assert 'mural_router_file_stale{file="objects"} 1.0' in lines
    assert 'mural_router_objects{kind="keys"} 1.0' in lines, "what was known stays in force"


async def test_objects_that_are_kept_as_they_were_are_counted_and_named(
    router: Router, pages: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoilt = {f"mural/t{at}": "weight: a number is wanted." for at in range(2_000)}
    state = KindState("tenants", 2_000, {}, spoilt, stale=False)
    monkeypatch.setattr(router.objects, "states", lambda: (state,))
    (found,) = (await pages.get("/debug/objects")).json()["kinds"]
    assert found["kept"]["mural/t0"] == "weight: a number is wanted."
    assert (len(found["kept"]), found["kept_known"]) == (1_000, 2_000)
    lines = (await pages.get("/metrics")).text.splitlines()
    kept = [line for line in lines if line.startswith("mural_router_objects_kept{")]
    assert kept == ['mural_router_objects_kept{kind="tenants"} 2000.0']


async def test_a_refused_aliases_file_is_stale_in_the_metrics(tmp_path: Path) -> None:
    path = tmp_path / "aliases.yaml"
    await asyncio.to_thread(path.write_text, ALIASES)
    router = router_over(aliases_file=str(path))
    create_admin_app(router)
    assert b'mural_router_file_stale{file="aliases"} 0.0' in router.metrics.exposition()
    assert b"mural_router_objects{" not in router.metrics.exposition()
    await asyncio.to_thread(path.write_text, "acme: 5")
    assert router.aliases is not None
    for _ in range(2):
        await router.aliases.poll()
    assert b'mural_router_file_stale{file="aliases"} 1.0' in router.metrics.exposition()
    await router.close()


async def test_another_aliases_file_of_changed_settings_holds_at_once(tmp_path: Path) -> None:
    for name, version in (("one", "v1"), ("two", "v2")):
        text = ALIASES.replace("v1", version)
        await asyncio.to_thread((tmp_path / name).write_text, text)
    settings = tmp_path / "router.yaml"
    await asyncio.to_thread(settings.write_text, f"aliases_file: {tmp_path}/one")
    config = Config(settings, {}, Secrets())
    router = Router(config, LocalLimiter())
    stable = parse_name("acme:stable")
    assert (await router.versions.resolve(stable)).name.version == "v1"
    await asyncio.to_thread(settings.write_text, f"aliases_file: {tmp_path}/two")
    for _ in range(2):
        await config.poll(router.take_over)
    assert (await router.versions.resolve(stable)).name.version == "v2"
    await router.close()


async def test_a_bad_objects_file_is_told_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "objects.yaml"
    await asyncio.to_thread(path.write_text, "kind: Nonsense")
    with pytest.raises(InvalidInput, match="Document 1"):
        router_over(objects=str(path))
