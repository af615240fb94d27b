"""Replicas that are killed, frozen, drained and full, and a router that ends: what clients see."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable

import httpx
import openai
import psutil
import pytest

PATIENCE_S = 300.0
QUEUE_WAIT_S = 3


@pytest.fixture
def routed(running, tenants, start_router):
    return start_router(
        *(flag for replica in running for flag in ("--replica", replica.flag)),
        *("--tenants-file", str(tenants.path), "--stale-after-s", "6"),
        *("--queue-wait-s", str(QUEUE_WAIT_S)),
        "--no-access-log",
    )


def body(model: str, **more: object) -> dict[str, object]:
    asked = {"model": model, "prompt": "once upon a time", "max_tokens": 8, "ignore_eos": True}
    return asked | more


def plain(routed, tenants) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {tenants.keys['acme']}"}
    return httpx.AsyncClient(base_url=routed.url, headers=headers, timeout=PATIENCE_S)


def home_of(routed, running, model: str):
    name = routed.get(f"/debug/placement?model={model}").json()["choice"]
    return next(replica for replica in running if replica.name == name)


def core_of(replica) -> psutil.Process:
    """The process of the engine core, without which nothing is generated."""
    children = psutil.Process(replica.process.process.pid).children()
    return next(child for child in children if "resource_tracker" not in " ".join(child.cmdline()))


def freeze(replica) -> list[psutil.Process]:
    whole = psutil.Process(replica.process.process.pid)
    frozen = [whole, *whole.children(recursive=True)]
    for process in frozen:
        process.suspend()
    return frozen


async def until(holds: Callable[[], bool]) -> None:
    """Ask other processes again and again, since they have no event for us."""
    async with asyncio.timeout(PATIENCE_S):
        while not await asyncio.to_thread(holds):  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.05)


async def first_event(lines) -> str:
    async for line in lines:
        if line.startswith("data: "):
            return line
    raise AssertionError("the stream has no event")


async def test_kill_9_ends_streams_with_an_error_and_sends_the_rest_elsewhere_until_it_is_back(
    routed, running, tenants
):
    async with plain(routed, tenants) as client:
        assert (await client.post("/v1/completions", json=body("acme:v1"))).status_code == 200
        home = home_of(routed, running, "acme:v1")
        core = core_of(home)
        streaming = body("acme:v1", stream=True, max_tokens=400)
        async with client.stream("POST", "/v1/completions", json=streaming) as answer:
            lines = answer.aiter_lines()
            await first_event(lines)
            core.suspend()
            waiting = [
                asyncio.create_task(client.post("/v1/completions", json=body("acme:v1")))
                for _ in range(8)
            ]
            await until(
                lambda: routed.count("mural_router_replica_in_flight", replica=home.name) >= 2
            )
            home.process.kill()
            core.kill()
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] != "data: [DONE]"
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"]
        for answer in await asyncio.gather(*waiting):
            assert answer.status_code == 200, answer.text
        again = await client.post("/v1/completions", json=body("acme:v1"))
        assert again.status_code == 200
        assert again.headers["x-mural-replica"] != home.name
        assert routed.count("mural_router_retries_total", outcome="made") >= 1
        home.start()
        await until(lambda: home_of(routed, running, "acme:v1") is home)
        back = await client.post("/v1/completions", json=body("acme:v1"))
        assert back.headers["x-mural-replica"] == home.name


async def test_what_waits_for_a_frozen_replica_is_asked_elsewhere_and_its_streams_go_on_after(
    routed, running, tenants
):
    async with plain(routed, tenants) as client:
        home = home_of(routed, running, "acme:v1")
        streaming = body("acme:v1", stream=True, max_tokens=300)
        async with client.stream("POST", "/v1/completions", json=streaming) as answer:
            lines = answer.aiter_lines()
            await first_event(lines)
            frozen = freeze(home)
            try:
                # Sent before anybody could know: they were to wait for 120 s.
                at_once = [client.post("/v1/completions", json=body("acme:v1")) for _ in range(4)]
                for early in await asyncio.gather(*at_once):
                    assert early.status_code == 200, early.text
                    assert early.headers["x-mural-replica"] != home.name
                assert routed.count("mural_router_retries_total", outcome="made") >= 1
                assert routed.count("mural_router_replica_stale", replica=home.name) == 1
                other = await client.post("/v1/completions", json=body("acme:v1"))
                assert other.status_code == 200
                assert other.headers["x-mural-replica"] != home.name
            finally:
                for process in frozen:
                    process.resume()
            assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_replica_that_drains_loses_no_request(routed, running, tenants):
    async with plain(routed, tenants) as client:
        home = home_of(routed, running, "acme:v1")
        stop = asyncio.Event()
        statuses: list[int] = []

        async def keep_asking() -> None:
            while not stop.is_set():
                answer = await client.post("/v1/completions", json=body("acme:v1"))
                statuses.append(answer.status_code)

        asking = [asyncio.create_task(keep_asking()) for _ in range(4)]
        await until(lambda: len(statuses) > 10)
        assert await asyncio.to_thread(home.process.end) == 0
        before = len(statuses)
        await until(lambda: len(statuses) > before + 10)
        stop.set()
        await asyncio.gather(*asking)
        assert set(statuses) == {200}


async def test_a_full_fleet_answers_503_in_time_and_everything_it_took(routed, running, tenants):
    async with plain(routed, tenants) as client:
        warm = [client.post("/v1/completions", json=body("tiny")) for _ in range(8)]
        await asyncio.gather(*warm)
        cores = [core_of(replica) for replica in running]
        for core in cores:
            core.suspend()
        try:
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=body("tiny", n=16)))
                for _ in range(8)
            ]
            # Those that wait at the router are refused together, as they were asked.
            await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED, timeout=20)
            done, pending = await asyncio.wait(asked, timeout=2)
            refused = [task.result() for task in done]
            assert refused
            for answer in refused:
                assert answer.status_code == 503
                assert int(answer.headers["retry-after"]) >= 1
                assert answer.json()["error"]["code"] == "unavailable"
        finally:
            for core in cores:
                core.resume()
        for task in pending:
            assert (await task).status_code == 200


async def test_a_router_that_ends_lets_its_streams_finish(routed, tenants):
    async with plain(routed, tenants) as client:
        streaming = body("acme:v1", stream=True, max_tokens=300)
        async with client.stream("POST", "/v1/completions", json=streaming) as answer:
            lines = answer.aiter_lines()
            await first_event(lines)
            routed.process.send(signal.SIGTERM)
            await asyncio.to_thread(routed.process.wait_for, "shutting down")
            assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert routed.process.wait() == 0


async def test_a_tenant_over_its_limit_gets_429_with_the_time_to_come_back(
    running, tenants, start_router
):
    text = tenants.path.read_text().replace(
        "- id: acme\n", "- id: acme\n  limits: {requests_per_minute: 3}\n"
    )
    tenants.path.write_text(text)
    router = start_router("--replica", running[0].flag, "--tenants-file", str(tenants.path))
    async with router.client(tenants.keys["acme"]) as client:
        for _ in range(3):
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)
        with pytest.raises(openai.RateLimitError) as refused:
            await client.completions.create(model="tiny", prompt="x", max_tokens=1)
        assert 1 <= int(refused.value.response.headers["retry-after"]) <= 61
        assert refused.value.code == "rate_limit_exceeded"
    async with router.client(tenants.keys["globex"]) as client:
        await client.completions.create(model="tiny", prompt="x", max_tokens=1)
