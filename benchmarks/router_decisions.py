"""What the router's decision on one request costs, whole and by its steps, without any network.

Each step is timed by this thread's own CPU time in short batches, all steps in turn, and the least
of the batches is printed: what else runs on the machine only ever adds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from mural_resolvers.tenants import TenantsFile
from mural_router.fleet.endpoint import Endpoint
from mural_router.limits.estimate import estimate_tokens
from mural_router.limits.local import LocalLimiter
from mural_router.limits.queue import FairQueue
from mural_router.placement import Base, Fleet, PlacementPolicy, PlacementRequest, Replica, choose
from mural_router.routing.access_log import AccessLog
from mural_router.routing.ask import Ask, Outcome
from mural_router.routing.breaker import Breakers, BreakerSettings
from mural_router.routing.dispatch import Attempt, Dispatch
from mural_router.routing.identity import Authenticator
from mural_router.routing.inspect_body import inspect_body
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.options import RoutingOptions
from mural_router.routing.retry import RetryBudget, RetrySettings
from mural_router.routing.router import FleetRouting
from mural_router.routing.target import Targets
from mural_router.routing.versions import Versions

BATCH = 100
ADAPTERS = 64


class Replicas:
    """A fleet that stays as it is: vLLM pods, which do not say what they hold."""

    def __init__(self, number: int) -> None:
        names = [f"r{each}" for each in range(number)]
        self.base = Base(("tiny",), "")
        self.fleet = Fleet(tuple(Replica(name, reports=False) for name in names))
        self._endpoints = {name: Endpoint(name, "10.0.0.1", 80, engine="vllm") for name in names}

    def endpoint(self, name: str) -> Endpoint | None:
        return self._endpoints.get(name)

    def suspect(self, name: str) -> None:
        raise RuntimeError(f"{name} has not failed")

    def subscribe(self, callback: Callable[[Fleet], None]) -> Callable[[], None]:
        return lambda: None


def tenants(folder: Path) -> tuple[TenantsFile, str]:
    """One tenant with limits that are counted and never reached, and its Authorization."""
    secret = secrets.token_urlsafe(32)
    limits = {"requests_per_minute": 10**9, "tokens_per_minute": 10**12, "concurrency": 10**6}
    key = {"id": "bench0001", "sha256": hashlib.sha256(secret.encode()).hexdigest()}
    path = folder / "tenants.yaml"
    path.write_text(json.dumps({"tenants": [{"id": "acme", "keys": [key], "limits": limits}]}))
    return TenantsFile(path), f"Bearer mural_bench0001_{secret}"


class Bench:
    """A whole routing, and its steps by name."""

    def __init__(self, folder: Path, replicas: int) -> None:
        self.source = Replicas(replicas)
        file, authorization = tenants(folder)
        clock = time.monotonic
        self.auth = Authenticator("keys", tenants=file)
        self.versions = Versions(None)
        self.limiter = LocalLimiter()
        self.queue: FairQueue[Attempt] = FairQueue()
        self.metrics = RouterMetrics()
        self.log = AccessLog(write=lambda data: None)
        self.dispatch = Dispatch(
            self.source,
            Breakers(BreakerSettings()),
            self.metrics,
            policy=PlacementPolicy(),
            clock=clock,
            freed=self.queue.pump,
        )
        self.routing = FleetRouting(
            auth=self.auth,
            versions=self.versions,
            limiter=self.limiter,
            queue=self.queue,
            dispatch=self.dispatch,
            budget=RetryBudget(RetrySettings()),
            metrics=self.metrics,
            log=self.log,
            tracing=None,
            options=RoutingOptions(),
            clock=clock,
        )
        self.asks = [
            Ask("/v1/completions", (authorization,), self._body(number))
            for number in range(ADAPTERS)
        ]
        self.outcome = Outcome(200, 100, 16, first_byte_s=0.0123456, total_s=0.0234567)

    def _body(self, number: int) -> bytes:
        model, prompt = f"acme/task-{number}:v1", f"{number} " + "x" * 398
        return json.dumps({"model": model, "prompt": prompt, "max_tokens": 16}).encode()

    def steps(self) -> dict[str, Callable[[Ask], object]]:
        ask = self.asks[0]
        principal, body = self.auth.principal(ask.authorization), inspect_body(ask.body)
        placement = PlacementRequest("acme/task-0:v1", body.prefix)
        hold_tokens = estimate_tokens(body.prompt_bytes, 16)
        fleet, loads = self.source.fleet, self.dispatch.ledger.loads

        targets = Targets(self.versions)

        def limits(_: Ask) -> None:
            hold = self.limiter.enter_now(principal, 1, hold_tokens)
            hold.settle(116)
            hold.close()

        def take(_: Ask) -> None:
            attempt = self.dispatch.take(placement)
            assert attempt is not None
            self.dispatch.end(attempt)

        return {
            "route … done": self.whole,
            "who asks": lambda ask: self.auth.principal(ask.authorization),
            "read the body": lambda ask: inspect_body(ask.body),
            "body for the replica": lambda _: body.for_replica("acme/task-0:v1"),
            "name and rights": lambda _: targets.find_now(
                principal, body.model, fleet, self.source.base, frozenset(), None
            ),
            "limits, in and out": limits,
            "choose": lambda _: choose(placement, fleet, loads),
            "take and give back (with choose)": take,
        }

    def whole(self, ask: Ask) -> None:
        routed = self.routing.route_now(ask)
        assert not callable(routed), "it should have had to wait for nothing"
        routed.answered(200)
        routed.done(self.outcome)

    def time_batch(self, step: Callable[[Ask], object]) -> float:
        """Microseconds a call."""
        began = time.thread_time_ns()
        for number in range(BATCH):
            step(self.asks[number % ADAPTERS])
        return (time.thread_time_ns() - began) / BATCH / 1000


async def measure(rounds: int, replicas: int) -> dict[str, float]:
    with TemporaryDirectory() as folder:
        bench = Bench(Path(folder), replicas)
        least: dict[str, float] = {}
        for _ in range(rounds):
            for name, step in bench.steps().items():
                spent = bench.time_batch(step)
                least[name] = min(spent, least.get(name, spent))
            await asyncio.sleep(0)
        await bench.log.close()
        return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=4)
    arguments = parser.parse_args()
    for name, spent in asyncio.run(measure(arguments.rounds, arguments.replicas)).items():
        print(f"{name:36s} {spent:7.2f} µs")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
