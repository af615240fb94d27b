"""`mural route --objects FILE` before a real server: a tenant, an alias, and an admin's upload."""

from __future__ import annotations

import io
import tarfile
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from mural_resolvers.tenants import mint_key

ADMIN = "an-admin-key-of-this-test"
WAIT_S = 60.0
KEY = mint_key()
OBJECTS = f"""\
apiVersion: mural.dev/v1alpha1
kind: Tenant
metadata: {{name: acme}}
spec: {{keys: [{{id: {KEY.key_id}, sha256: {KEY.sha256}}}]}}
---
apiVersion: mural.dev/v1alpha1
kind: Adapter
metadata: {{name: v9}}
spec: {{pool: main, tenant: acme, version: v9, placement: {{replicas: All}}}}
---
apiVersion: mural.dev/v1alpha1
kind: AdapterAlias
metadata: {{name: stable}}
spec: {{tenant: acme, alias: stable, versions: [{{version: VERSION}}]}}
"""


class Routed:
    """The router, asked by the tenant and by the admin."""

    def __init__(self, router, objects: Path) -> None:
        self.router = router
        self._objects = objects

    def point(self, version: str) -> None:
        self._objects.write_text(OBJECTS.replace("VERSION", version))

    def complete(self, model: str, key: str = KEY.key) -> httpx.Response:
        body = {"model": model, "prompt": "hi", "max_tokens": 1}
        return self.ask("POST", "/v1/completions", key, json=body)

    def ask(self, method: str, path: str, key: str = ADMIN, **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} | more.pop("headers", {})
        return httpx.request(
            method, f"{self.router.url}{path}", headers=headers, timeout=WAIT_S, **more
        )


@pytest.fixture
def routed(running, start_router, tmp_path) -> Routed:
    """Before the one server that takes uploads."""
    objects = tmp_path / "objects.yaml"
    objects.write_text(OBJECTS.replace("VERSION", "v1"))
    flags = ("--replica", running[0].flag, "--objects", str(objects))
    return Routed(start_router(*flags, environment={"MURAL_API_KEY": ADMIN}), objects)


def archive(folder: Path) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            tar.add(folder / name, name)
    return data.getvalue()


def test_an_admin_uploads_for_a_tenant_which_then_asks_by_alias_and_version(routed, oracle):
    tar = {"content-type": "application/x-tar"}
    sent = routed.ask(
        "POST", "/v1/adapters/acme:v9", content=archive(oracle.folder(1)), headers=tar
    )
    assert sent.status_code == 201, sent.text
    listed = routed.ask("GET", "/v1/adapters?tenant=acme").json()["data"]
    assert [each["id"] for each in listed] == ["acme:v9"]
    whose = routed.ask("GET", "/v1/adapters")
    assert (whose.status_code, "tenant=" in whose.text) == (400, True)
    assert whose.headers["x-request-id"]
    answer = routed.complete("acme:v9")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-mural-digest"] == sent.json()["digest"]
    assert routed.ask("GET", "/v1/adapters?tenant=globex", KEY.key).status_code == 403
    placed = routed.router.get("/debug/placement?model=acme:v9").json()
    assert (placed["k"], placed["declared"] > 1) == (1, True)
    # The replica tells the router of it a moment after it has answered.
    deadline = time.monotonic() + WAIT_S
    while routed.router.get("/debug/placement?model=acme:v9").json()["reason"] != "resident":
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_changed_file_moves_the_alias_and_a_bad_one_changes_nothing(routed):
    def served() -> str:
        answer = routed.complete("acme:stable")
        assert answer.status_code == 200, answer.text
        return str(answer.headers["x-mural-adapter"])

    assert served() == "acme:v1"
    routed.point("v2")
    routed.router.process.wait_for("objects file reloaded")
    assert served() == "acme:v2", "at the next request"
    routed.point("{")
    routed.router.process.wait_for("objects file is refused")
    assert routed.router.count("mural_router_file_stale", file="objects") == 1
    assert served() == "acme:v2"
    assert routed.complete("acme:v1", mint_key().key).status_code == 401
