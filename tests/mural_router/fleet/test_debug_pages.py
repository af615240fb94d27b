"""What the admin port tells of replicas and of a choice: the names that the guide explains."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import httpx
import msgspec
import pytest

from mural_router.admin.app import create_admin_app
from mural_router.config import Config
from mural_router.limits.local import LocalLimiter
from mural_router.running import Router
from mural_router.settings import Secrets
from mural_server.protocol import AdapterStatus, Load

BOUND_S = 20.0


@pytest.mark.parametrize(("host_bytes", "believed"), [(4096, 1000), (0, None)])
async def test_fleet_and_placement_call_one_thing_by_one_name(state_server, host_bytes, believed):
    """Of who does not say what it has room for, no size is believed."""
    server = await state_server()
    told = AdapterStatus(
        name="acme:v1", digest="", level="slot", rank=8, bytes=1000, requests=2, load=1.23456
    )
    server.snapshot = msgspec.structs.replace(
        server.snapshot,
        adapters={told.name: told},
        limits=msgspec.structs.replace(server.snapshot.limits, host_bytes=host_bytes),
        load=Load(running=2, kv_usage=0.12345, tokens_per_s=9.87654),
    )
    port = server.endpoint.port
    address = f"http://127.0.0.1:{port},control={port}"
    router = Router(Config(None, {"replicas": [address]}, Secrets()), LocalLimiter())
    following = asyncio.create_task(router.fleet.run())
    transport = httpx.ASGITransport(create_admin_app(router))
    try:
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://admin") as pages,
            asyncio.timeout(BOUND_S),
        ):
            while not any(  # noqa: ASYNC110 - the test's own pace
                each.ready for each in router.fleet.fleet.replicas
            ):
                await asyncio.sleep(0.005)
            (replica,) = (await pages.get("/debug/fleet")).json()["replicas"]
            placed = (await pages.get("/debug/placement?model=acme:v1")).json()
            other = (await pages.get("/debug/placement?model=acme:v9")).json()
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await router.close()
    assert (replica["sequences"], replica["cost"]) == (2, 2.32)
    assert (replica["kv_usage"], replica["tokens_per_s"]) == (0.123, 9.877)
    assert (replica["max_cpu_loras"], replica["max_lora_rank"], replica["max_num_seqs"]) == (
        8,
        8,
        4,
    )
    assert replica["host_bytes"] == (host_bytes or None), "0: unknown"
    (adapter,) = replica["adapters"].values()
    assert adapter["tokens_per_s"] == 1.235
    assert (placed["known"], placed["rank"], placed["bytes"]) == (True, 8, believed)
    assert (placed["cost"], placed["rank_cost"]) == (1.16, 0.02)
    (row,) = placed["rows"]
    assert (row["sequences"], row["cost"], row["max_cpu_loras"]) == (2, 2.32, 8)
    assert (row["wanted"], row["wanted_bytes"], row["residency"]) == (1, 1000, "slot")
    assert (other["known"], other["rank"], other["rows"][0]["residency"]) == (False, None, "absent")
    old = {"load", "limit", "estimated_load", "estimated_cost"}
    assert not old & (replica.keys() | adapter.keys() | row.keys())
