"""What a real API server does once in years, or under somebody else's load."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import pytest

from mural_resolvers.kubernetes.paths import ADAPTERS, PODS
from tests.mural_operator.memory_cluster import InMemory, hurry, in_memory

WAIT_S = 15.0
FLOOD_S = 1.5
PER_S = 10_000
EXACT = "acme/default:v1"
APART = {"MemoryClient", "MemoryApi", "EventRecorder", "Metrics"}
"""Of the test; and what counts for a while, is bounded, and has its own tests."""


@pytest.fixture
async def kube(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[InMemory]:
    hurry(monkeypatch)
    monkeypatch.setattr("mural_resolvers.kubernetes.watch.RETRY_FIRST_S", 0.01)
    monkeypatch.setattr("mural_resolvers.kubernetes.watch.RETRY_MOST_S", 0.05)
    async with in_memory() as found:
        yield found


async def until(holds: Callable[[], object]) -> None:
    """Look until something holds."""
    async with asyncio.timeout(WAIT_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_an_api_server_that_wakes_up_in_its_past_costs_no_adapter(kube):
    servers = await kube.pods(2)
    async with kube.operator() as operator:
        await kube.adapter("v1", placement={"replicas": "All"})
        await kube.ready("v1")
        backup = kube.api.snapshot()
        await kube.adapter("v2", placement={"replicas": "All"})
        await kube.ready("v1", "v2")
        # Also what nobody here does: the version goes on, and is far from where it was.
        for at in range(50):
            kube.api.put(PODS.of("elsewhere"), {"metadata": {"name": f"p{at}"}})
        kube.api.restore(backup)
        await until(lambda: [one.exact for one in operator._cluster.adapters] == [EXACT])
        await until(lambda: operator.leading)
        # What the backup has stays where it is; what it does not have is nobody's any more.
        for server in servers:
            await server.until(lambda one: set(one.resident) == {"acme:v1"})
            assert server.count("remove", "acme:v1") == 0
            assert server.count("resident", "acme:v1") == 1
        # And the work goes on, on objects of the old version.
        await kube.adapter("v3", placement={"replicas": "All"})
        await kube.ready("v1", "v3")
        assert operator._not_ready() is None


@pytest.mark.slow
async def test_a_flood_of_changes_of_others_keeps_no_adapter_waiting(kube):
    [server] = await kube.pods(1)
    pod = {
        "metadata": {"name": "other", "labels": {"app": "other"}},
        "status": {"phase": "Running"},
    }
    async with kube.operator() as operator:
        await kube.adapter("v1")
        await kube.ready("v1")
        loop = asyncio.get_running_loop()
        began, sent = loop.time(), 0
        flooding = True

        async def flood() -> None:
            nonlocal sent
            while flooding:
                for _ in range(max(0, int((loop.time() - began) * PER_S) - sent)):
                    kube.api.put(
                        PODS.of("mural"), pod | {"status": {"phase": "Running", "n": sent}}
                    )
                    sent += 1
                await asyncio.sleep(0.005)

        running = asyncio.create_task(flood())
        await asyncio.sleep(0.2)
        server.lose("acme:v1", level=None)
        lost = loop.time()
        await server.until(lambda one: "acme:v1" in one.resident)
        healed_s = loop.time() - lost
        await asyncio.sleep(FLOOD_S)
        flooding = False
        await running
        rate = sent / (loop.time() - began)
        print(f"{rate:.0f} changes a second; healed after {healed_s:.2f} s")
        assert operator.leading
        assert healed_s < 5
        await kube.adapter("v2")
        await kube.ready("v2")


async def test_an_object_as_large_as_etcd_takes_keeps_the_others_going(kube):
    [server] = await kube.pods(1)
    async with kube.operator() as operator:
        await kube.adapter("v1")
        await kube.ready("v1")
        big = {"mural.dev/note": "x" * 1_000_000}
        path = ADAPTERS.named("mural", "v1")
        for at in range(10):
            kube.api.change(path, {"metadata": {"annotations": big, "labels": {"at": str(at)}}})
        await kube.adapter("v2")
        await kube.ready("v1", "v2")
        assert server.count("resident", "acme:v1") == 1
        # What is written of it is what has changed, not all of it.
        assert operator._not_ready() is None


def _is_without(name: str, found: Mapping[str, object]) -> bool:
    return name not in found


async def churn(kube: InMemory, rng: random.Random, steps: int) -> set[str]:
    """So many random changes; the names of the adapters that there are then."""
    there: set[str] = set()
    for step in range(steps):
        name = f"v{rng.randrange(12)}"
        match rng.randrange(6):
            case 0 | 1 | 2 if name not in there:
                there.add(name)
                await kube.adapter(name, version=f"{name}-{step}", placement={"replicas": "All"})
            case 3 | 4 if name in there:
                there.discard(name)
                await kube.delete("Adapter", name)
                await kube.adapters.until(partial(_is_without, name))
            case 5:
                server = rng.choice(list(kube.servers.values()))
                await server.restart()
            case _:
                await asyncio.sleep(rng.uniform(0.0, 0.02))
    return there


def kept(operator) -> dict[str, int]:
    """How many things are in every collection that can be reached from an operator."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    # The listener is all that is there during a term.
    todo: list[tuple[str, Any]] = [("Operator", operator), ("term", operator._fleet._listener)]
    while todo:
        name, each = todo.pop()
        if id(each) in seen or type(each).__name__ in APART:
            continue
        seen.add(id(each))
        if isinstance(each, Mapping | list | tuple | set | frozenset | deque):
            sizes[name] = sizes.get(name, 0) + len(each)
            inner = each.values() if isinstance(each, Mapping) else each
            todo += [(f"{name}[]", one) for one in inner]
        elif str(type(each).__module__).startswith(("mural_", "collections", "asyncio.queues")):
            names = {*getattr(each, "__dict__", ()), *getattr(type(each), "__slots__", ())}
            found = {attr: getattr(each, attr, None) for attr in names}
            if isinstance(each, asyncio.Queue):
                sizes[f"{name}.queue"] = sizes.get(f"{name}.queue", 0) + each.qsize()
            todo += [(f"{type(each).__name__}.{attr}", one) for attr, one in found.items()]
    return sizes


@pytest.mark.parametrize("steps", [25, pytest.param(400, marks=pytest.mark.slow)])
async def test_churn_ends_converged_and_leaves_nothing_behind(kube, monkeypatch, steps):
    monkeypatch.setattr("mural_operator.executor.delay_s", lambda *_: 0.3)
    rng = random.Random(steps)
    servers = await kube.pods(3)
    async with kube.operator() as operator:
        await kube.adapter("stays", placement={"replicas": "All"})
        await kube.ready("stays")
        await asyncio.sleep(0.3)
        before = kept(operator)
        there = await churn(kube, rng, steps)
        wanted = {
            f"acme:{each['spec']['version']}"
            for each in kube.api.objects.values()
            if each.get("kind") == "Adapter"
        }
        assert len(wanted) == len(there) + 1
        for server in servers:
            await server.until(lambda one: set(one.resident) == wanted)
        await kube.ready("stays", *there)
        for name in there:
            await kube.delete("Adapter", name)
        await kube.adapters.until(lambda found: set(found) == {"stays"})
        for server in servers:
            await server.until(
                lambda one: set(one.resident) == {"acme:stays"} and one.declared == ("acme:stays",)
            )
        # The last verdicts, and what rests before it is written again.
        await asyncio.sleep(0.3)
        after = kept(operator)
        assert len(after) > 30
        assert sum(after.values()) <= sum(before.values()) + 40, (before, after)
