"""A tenant points an alias elsewhere through the router: its next request finds that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from mural_resolvers.tenants import mint_key
from mural_router.config import Config
from mural_router.limits.local import LocalLimiter
from mural_router.proxy import start
from mural_router.running import Router
from mural_router.settings import Secrets
from tests.mural_server.api import scripted_server

engine = scripted_server.engine
start_server = scripted_server.start_server
adapter_dir = scripted_server.adapter_dir

BOUND_S = 20.0
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
    flags = {
        "replicas": [f"http://127.0.0.1:{server.port},control={server.control_port}"],
        "tenants_file": str(tenants),
        "store": str(adapter_dir),
        # Nothing becomes old by itself within this test.
        "versions": {"ttl_s": 3600.0},
        "access_log": None,
        "http": {"host": "127.0.0.1", "port": 0},
    }
    async with AsyncExitStack() as held:
        router = Router(Config(None, flags, Secrets(router_token=TOKEN)), LocalLimiter())
        held.push_async_callback(router.close)
        following = asyncio.create_task(router.fleet.run())
        held.callback(following.cancel)
        async with asyncio.timeout(BOUND_S):
            heard = asyncio.Event()
            router.fleet.subscribe(lambda fleet: heard.set() if fleet.accepting else None)
            await heard.wait()
        proxy = await start(router.config.settings.http, router.routing, version="0")
        held.push_async_callback(proxy.drain, 0)
        yield await held.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{proxy.port}",
                headers={"authorization": f"Bearer {KEY.key}"},
                timeout=BOUND_S,
            )
        )


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
