"""500 Adapters on 20 simulated servers, by a real operator process; figures are printed (-s).

MURAL_SCALE_ADAPTERS and MURAL_SCALE_PODS make it smaller.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from mural_server.protocol.exchange import exchange
from tests.mural_operator.operated import Operated, operated, shipped_account

pytestmark = pytest.mark.cluster

ADAPTERS = int(os.environ.get("MURAL_SCALE_ADAPTERS", "500"))
PODS = int(os.environ.get("MURAL_SCALE_PODS", "20"))
CONVERGE_S = 240.0
REST_S = 20.0
AT_A_TIME = 20
_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{([^}]*)\})? ([0-9.e+-]+)$", re.MULTILINE)


class Figures(NamedTuple):
    """What an operator's metrics say at one time."""

    calls: dict[str, float]
    """Of the API server, by verb."""
    reconciles: float
    reconcile_s: float
    cpu_s: float
    memory_mb: float

    def since(self, before: Figures) -> str:
        calls = {verb: int(n - before.calls.get(verb, 0)) for verb, n in self.calls.items()}
        reconciles = self.reconciles - before.reconciles
        mean_ms = 1e3 * (self.reconcile_s - before.reconcile_s) / max(reconciles, 1)
        return (
            f"{reconciles:.0f} reconciles of {mean_ms:.0f} ms, CPU "
            f"{self.cpu_s - before.cpu_s:.1f} s, memory {self.memory_mb:.0f} MB, API calls {calls}"
        )

    def writes_since(self, before: Figures) -> dict[str, float]:
        return {
            verb: n - before.calls.get(verb, 0)
            for verb, n in self.calls.items()
            if verb in ("create", "update", "patch", "delete")
        }


class Running(NamedTuple):
    """An operator process."""

    process: psutil.Process
    port: int

    async def figures(self) -> Figures:
        async with exchange(
            "127.0.0.1", self.port, "GET", "/metrics", connect_timeout_s=5, answer_timeout_s=20
        ) as answer:
            text = (await answer.body(8 << 20)).decode()
        calls: dict[str, float] = {}
        sums: dict[str, float] = {}
        for name, labels, value in _SAMPLE.findall(text):
            sums[name] = sums.get(name, 0.0) + float(value)
            if name == "mural_operator_api_calls_total":
                calls[labels.partition('"')[2].rstrip('"')] = float(value)
        times = self.process.cpu_times()
        return Figures(
            calls,
            sums.get("mural_operator_reconcile_seconds_count", 0.0),
            sums.get("mural_operator_reconcile_seconds_sum", 0.0),
            times.user + times.system,
            self.process.memory_info().rss / 2**20,
        )


@asynccontextmanager
async def an_operator(kube: Operated) -> AsyncIterator[Running]:
    """``mural operate`` in a process of its own, with its pages."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "mural_operator.commands", "--namespace", kube.namespace, "--log-level", "warning"),
        *("--admin-host", "127.0.0.1", "--admin-port", str(port)),
        env=os.environ | {"KUBECONFIG": str(kube.kubeconfig)},
    )
    try:
        yield Running(psutil.Process(process.pid), port)
    finally:
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def declare(kube: Operated, number: int, **placement: object) -> None:
    """So many Adapters, some at a time."""
    gate = asyncio.Semaphore(AT_A_TIME)

    async def one(at: int) -> None:
        async with gate:
            await kube.adapter(f"v{at}", placement=placement)

    await asyncio.gather(*map(one, range(number)))


async def converged(kube: Operated, servers: list[Any], number: int) -> float:
    """Seconds until all of them hold so many, and all objects say Ready."""
    now = asyncio.get_running_loop().time
    began = now()
    for server in servers:
        await server.until(lambda one: len(one.resident) == number, timeout_s=CONVERGE_S)
    resident_s = now() - began
    await kube.ready(*(f"v{at}" for at in range(number)))
    print(f"  resident everywhere after {resident_s:.1f} s, told so after {now() - began:.1f} s")
    return resident_s


async def at_rest(operator: Running) -> Figures:
    """Once a dozen seconds went by without a write but the Lease's."""
    async with asyncio.timeout(CONVERGE_S):
        while True:
            before = await operator.figures()
            await asyncio.sleep(12)
            after = await operator.figures()
            writes = after.writes_since(before)
            del writes["update"]
            if not any(writes.values()):
                return after


@pytest.mark.timeout(600)
async def test_hundreds_of_adapters_converge_heal_and_come_to_rest(
    cluster: Any, tmp_path: Path
) -> None:
    account = await shipped_account(cluster, tmp_path)
    async with operated(cluster.namespace, account) as kube:
        await kube.tenant()
        servers = await kube.pods(PODS)
        await kube.pool()
        async with an_operator(kube) as operator:
            await kube.pools.until(
                lambda found: (
                    found.get("pool", {}).get("status", {}).get("ready") == f"{PODS}/{PODS}"
                )
            )
            start = await operator.figures()
            print(f"\n{ADAPTERS} adapters on all of {PODS} replicas:")
            await declare(kube, ADAPTERS, replicas="All")
            await converged(kube, servers, ADAPTERS)
            settled = await operator.figures()
            print(f"  {settled.since(start)}")
            asked = sum(server.count("resident") for server in servers)
            print(
                f"  {asked} loads asked for, {sum(one.count('declare') for one in servers)} "
                "declarations"
            )
            # A leader that is cut off from a busy API server may leave some loads to its successor.
            assert ADAPTERS * PODS <= asked <= 1.02 * ADAPTERS * PODS

            print("a process that restarts:")
            await servers[0].restart()
            await converged(kube, servers, ADAPTERS)
            healed = await operator.figures()
            print(f"  {healed.since(settled)}")

            # Events are sent one after another, and counted up to ten seconds later.
            quiet = await at_rest(operator)
            await asyncio.sleep(REST_S)
            rested = await operator.figures()
            print(f"{REST_S:g} s at rest:\n  {rested.since(quiet)}")
            writes = rested.writes_since(quiet)
            assert writes.pop("update") <= 24  # The Lease.
            assert not any(writes.values())
