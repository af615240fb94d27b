"""Aliases through a running router, two routers that agree, and names that mean harm."""

from __future__ import annotations

import asyncio
import json
import random

import psutil
import pytest

from mural_resolvers.open_store import open_store
from mural_resolvers.versions import AliasTarget

ROLLED_BACK_WITHIN_S = 30.0
"""What the store said holds for 5 s and serves for as long again while it is asked anew; the rest
is for a busy machine."""
HOSTILE_NAMES = 10_000


@pytest.fixture
def flags(running, tenants, fleet_store):
    return (
        *(flag for replica in running for flag in ("--replica", replica.flag)),
        *("--tenants-file", str(tenants.path), "--store", str(fleet_store)),
        "--no-access-log",
    )


async def served(client, model: str, user: str) -> str:
    answer = await client.completions.create(model=model, prompt="x", max_tokens=1, user=user)
    return answer.model


async def test_a_canary_is_sticky_by_user_grows_and_rolls_back_without_a_restart(
    flags, tenants, fleet_store, start_router
):
    store = open_store(str(fleet_store))
    split = [AliasTarget("v1", 50), AliasTarget("v2", 50)]
    await store.set_alias("acme", "default", "stable", split)
    router = start_router(*flags)
    users = [f"user-{at}" for at in range(12)]
    async with router.client(tenants.keys["acme"]) as client:
        first = {user: await served(client, "acme:stable", user) for user in users}
        assert set(first.values()) == {"acme:v1", "acme:v2"}
        assert first == {user: await served(client, "acme:stable", user) for user in users}
        await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1)])
        async with asyncio.timeout(ROLLED_BACK_WITHIN_S):
            for user in [user for user in users if first[user] == "acme:v2"]:
                while await served(client, "acme:stable", user) != "acme:v1":  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
        assert await served(client, "acme", "anyone") == "acme:v3"
    for version in ("v1", "v2"):
        assert router.count(
            "mural_router_adapter_requests_total", adapter=f"acme:{version}", outcome="ok"
        )
    await store.set_alias("acme", "default", "stable", [])


async def test_two_routers_send_every_adapter_to_the_same_home(flags, tenants, start_router):
    one, two = start_router(*flags), start_router(*flags)
    choices = [
        [
            router.get(f"/debug/placement?model=acme:version-{at}").json()["choice"]
            for at in range(40)
        ]
        for router in (one, two)
    ]
    assert choices[0] == choices[1]
    assert len(set(choices[0])) == 2
    for version in ("v1", "v2", "v3"):
        homes = set()
        for router in (one, two):
            async with router.client(tenants.keys["globex"]) as client:
                raw = await client.completions.with_raw_response.create(
                    model=f"globex:{version}", prompt="x", max_tokens=1
                )
                homes.add(raw.headers["x-mural-replica"])
        assert len(homes) == 1


def hostile_names(count: int) -> list[object]:
    chance = random.Random(5)
    alphabet = "ab:/.\\\x00\n\r %\u202e\ud7ff\U0001f600_-A@*?{}'\"<>"
    fixed: list[object] = [
        *("", ":", "/", "..", "acme:../../etc/passwd", "acme/..:v1", "acme:v1/../v2", "%2e%2e"),
        *("acme:_aliases.json", "acme:v1\r\nx-mural-tenant: globex", "a" * 20_000, "acme:" * 99),
        *("globex:v1", "globex/default", "@x", "*", "acme:*", "\ufeffacme:v1", "ACME:v1"),
        *(None, 1, 1e308, True, [], {}, ["acme:v1"], {"model": "acme:v1"}),
    ]
    made = ["".join(chance.choices(alphabet, k=chance.randrange(1, 40))) for _ in range(count)]
    own = [f"acme:{''.join(chance.choices('abcdef0123456789', k=12))}" for _ in range(count // 10)]
    return [*fixed, *own, *made][:count]


async def ask_all(host: str, port: int, key: str, names: list[object]) -> list[int]:
    """One connection, kept: the status of each."""
    statuses = []
    reader, writer = await asyncio.open_connection(host, port)
    for name in names:
        body = json.dumps({"model": name, "prompt": "x", "max_tokens": 1}).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n"
            b"content-length: %d\r\n\r\n%b" % (key.encode(), len(body), body)
        )
        head = await reader.readuntil(b"\r\n\r\n")
        statuses.append(int(head.split()[1]))
        length = next(
            int(line.split(b":")[1])
            for line in head.lower().split(b"\r\n")
            if line.startswith(b"content-length")
        )
        answer = await reader.readexactly(length)
        assert b"Traceback" not in answer
        assert key.encode() not in answer
    writer.close()
    return statuses


async def test_ten_thousand_hostile_names_are_refused_and_leave_nothing(
    flags, tenants, start_router
):
    router = start_router(*flags)
    host, port = router.url.removeprefix("http://").split(":")
    names, key = hostile_names(HOSTILE_NAMES), tenants.keys["acme"]
    process = psutil.Process(router.process.process.pid)
    statuses = await ask_all(host, int(port), key, names[:2_000])
    before = process.memory_info().rss
    parts = [names[2_000 + at :: 4] for at in range(4)]
    for found in await asyncio.gather(*(ask_all(host, int(port), key, part) for part in parts)):
        statuses += found
    assert set(statuses) <= {400, 403, 404, 429, 503}
    assert {400, 403, 404} <= set(statuses)
    assert process.memory_info().rss - before < 32 << 20
    assert router.count("mural_router_adapter_requests_total", adapter="acme:v1", outcome="ok") == 0
    labels = router.get("/metrics").text.count("mural_router_adapter_requests_total{")
    assert labels <= 3 * 51
    async with router.client(key) as client:
        assert await served(client, "acme:v1", "x") == "acme:v1"
