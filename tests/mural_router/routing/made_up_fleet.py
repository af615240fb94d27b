"""A whole routing over a fleet that a test makes up, without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping

from mural_resolvers.errors import Unauthorized
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import Principal, TenantLimits
from mural_resolvers.tracing import Tracing
from mural_resolvers.versions import AliasTarget
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.fleet.view import FleetView
from mural_router.limits.local import LocalLimiter
from mural_router.limits.queue import FairQueue
from mural_router.placement import Base, Fleet, PlacementPolicy, Replica, Residency
from mural_router.routing.access_log import AccessLog
from mural_router.routing.ask import Ask, Outcome, Routed
from mural_router.routing.breaker import Breakers, BreakerSettings
from mural_router.routing.dispatch import Attempt, Dispatch
from mural_router.routing.identity import Authenticator
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.options import RoutingOptions
from mural_router.routing.retry import RetryBudget, RetrySettings
from mural_router.routing.router import FleetRouting
from mural_router.routing.versions import KnownVersions, Versions, VersionSource

DIGEST = "d" * 64


def resident(*names: str) -> dict[str, Residency]:
    return {parse_name(name).exact: Residency("slot", digest=DIGEST, rank=4) for name in names}


class MadeUpFleet:
    """Replicas a, b, … that hold what a test says."""

    def __init__(self, *adapters: dict[str, Residency], engine: str = "mural") -> None:
        self.base = Base(("tiny",), "")
        self.engine = engine
        self.suspected: list[str] = []
        self.listening: dict[str, Endpoint] = {}
        """Where a replica really is, if it is anywhere."""
        self._told: list[Callable[[Fleet], None]] = []
        self.fleet = Fleet()
        self.set(
            *(
                Replica(name, slots=4, max_num_seqs=4, max_lora_rank=8, adapters=held)
                for name, held in zip("abcdef", adapters, strict=False)
            )
        )

    def set(self, *replicas: Replica) -> None:
        self.fleet = Fleet(replicas)
        for told in self._told:
            told(self.fleet)

    def endpoint(self, name: str) -> Endpoint | None:
        if name not in {replica.name for replica in self.fleet.replicas}:
            return None
        engine: Engine = "vllm" if self.engine == "vllm" else "mural"
        if name in self.listening:
            return self.listening[name]
        return Endpoint(name, f"10.0.0.{ord(name) - 96}", 8000, engine=engine)

    def suspect(self, name: str) -> None:
        self.suspected.append(name)

    def subscribe(self, callback: Callable[[Fleet], None]) -> Callable[[], None]:
        self._told.append(callback)
        return lambda: self._told.remove(callback)


class Keys(Authenticator):
    """``Bearer acme`` is the tenant acme."""

    def __init__(
        self, weights: Mapping[str, float] | None = None, /, **limits: TenantLimits
    ) -> None:
        super().__init__("keys")
        self.limits = limits
        self.weights = weights or {}

    def principal(self, authorization: tuple[str, ...]) -> Principal:
        if len(authorization) != 1:
            raise Unauthorized()
        tenant = authorization[0].removeprefix("Bearer ")
        return Principal(
            tenant=tenant,
            weight=self.weights.get(tenant, 1.0),
            limits=self.limits.get(tenant, TenantLimits()),
        )


class Aliases(VersionSource):
    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        stable = (AliasTarget("v3", 90), AliasTarget("v4", 10))
        return KnownVersions({"stable": stable}, {"v3": "3" * 64, "v4": None})


class Made:
    """A routing with its parts, and the lines of its log."""

    def __init__(
        self,
        fleet: MadeUpFleet | FleetView,
        *,
        auth: Authenticator | None = None,
        wait_s: float = 0.05,
        tracing: Tracing | None = None,
        retry: RetrySettings | None = None,
        breaker: BreakerSettings | None = None,
        versions: Versions | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.fleet = fleet
        self.lines: list[dict[str, object]] = []
        self.queue: FairQueue[Attempt] = FairQueue()
        self.metrics = RouterMetrics()
        self.limiter = LocalLimiter()
        self.breakers = Breakers(breaker or BreakerSettings(failures=2), draw=lambda: 0.5)
        self.log = AccessLog(flush_s=60, write=self._write)
        clock = clock or asyncio.get_running_loop().time
        self.dispatch = Dispatch(
            fleet,
            self.breakers,
            self.metrics,
            policy=PlacementPolicy(),
            clock=clock,
            freed=self.queue.pump,
        )
        self.routing = FleetRouting(
            auth=auth or Keys(),
            versions=versions or Versions(Aliases()),
            limiter=self.limiter,
            queue=self.queue,
            dispatch=self.dispatch,
            budget=RetryBudget(retry or RetrySettings()),
            metrics=self.metrics,
            log=self.log,
            tracing=tracing,
            options=RoutingOptions(queue_wait_s=wait_s, router_token="the-token"),
            clock=clock,
        )

    def _write(self, data: bytes) -> None:
        self.lines += [json.loads(line) for line in data.splitlines()]

    async def logged(self) -> list[dict[str, object]]:
        await self.log.close()
        return self.lines

    async def ask(self, model: str, tenant: str = "acme", **more: object) -> Routed:
        body = json.dumps({"model": model, "prompt": "hello", **more}).encode()
        return await self.routing.route(
            Ask("/v1/completions", (f"Bearer {tenant}",), body, headers={"x-session-id": "s"})
        )


def done(routed: Routed, status: int = 200, **more: object) -> None:
    routed.done(Outcome(status=status, **more))  # type: ignore[arg-type]  # fields by name
