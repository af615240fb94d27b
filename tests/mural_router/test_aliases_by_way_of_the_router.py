"""A tenant points an alias elsewhere through the router: its next request finds that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mural_resolvers.tenants import mint_key
from mural_router.settings import Secrets
from tests.mural_router.router_in_front import router_in_front
from tests.mural_server.api import scripted_server

engine = scripted_server.engine
start_server = scripted_server.start_server
adapter_dir = scripted_server.adapter_dir

TOKEN = "the-token-of-this-test's-router"
KEY = mint_key()


@pytest.fixture
async def client(
    start_server: Any, adapter_dir: Path, tmp_path: Path
) -> AsyncIterator[httpx.AsyncClient]:
    """acme's, of a router in front of one server, with the store that both read."""
    server = await start_server(
        auth="router",
        router_token=TOKEN,
        adapter_dir=str(adapter_dir),
        upload_store=str(adapter_dir),
        upload_dir=str(tmp_path / "quarantine"),
    )
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(
        f"tenants: [{{id: acme, keys: [{{id: {KEY.key_id}, sha256: {KEY.sha256}}}]}}]"
    )
    async with router_in_front(
        server,
        Secrets(router_token=TOKEN),
        {"authorization": f"Bearer {KEY.key}"},
        tenants_file=str(tenants),
        store=str(adapter_dir),
        # Nothing becomes old by itself within this test.
        versions={"ttl_s": 3600.0},
    ) as client:
        yield client


async def test_roll_out_and_roll_back_hold_for_the_next_request(client: httpx.AsyncClient) -> None:
    alias = "/v1/adapters/acme/default/aliases/stable"
    for version in ("v1", "v2", "v1"):
        changed = await client.put(alias, json={"versions": [{"version": version}]})
        assert changed.status_code == 200, changed.text
        for _ in range(2):
            # The second one goes the express way, where there is one.
            asked = {"model": "acme:stable", "prompt": "Hi", "max_tokens": 2}
            answer = await client.post("/v1/completions", json=asked)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == f"acme:{version}"
            assert answer.headers["x-mural-adapter"] == f"acme:{version}"
    assert (await client.delete(alias)).status_code == 200
    gone = await client.post("/v1/completions", json={"model": "acme:stable", "prompt": "Hi"})
    assert gone.status_code == 404
