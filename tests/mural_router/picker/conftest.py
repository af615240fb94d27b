"""A picker over a routing that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from mural_resolvers.errors import MuralError
from mural_router.fleet.endpoint import Endpoint
from mural_router.picker import Picker, PickerSettings, start_picker
from mural_router.routing import Ask, Outcome, Routed, Routing

BOUND_S = 20.0
"""No wait of a test is longer."""
MAX_BODY_BYTES = 8 << 20


class ToldRouted(Routed):
    def __init__(self, routing: ToldRouting, body: bytes) -> None:
        self._routing = routing
        self.endpoint = routing.endpoints[len(routing.asks) % len(routing.endpoints)]
        self.body = body
        self.stream = b'"stream":true' in body
        self.hide_usage = routing.hide_usage
        self.request_headers = (("x-mural-tenant", "acme"), ("authorization", "Bearer router"))
        self.answer_headers = (("x-mural-replica", self.endpoint.name), ("x-request-id", "r-1"))

    def retry(self, why: str) -> bool:
        return False

    def may_retry(self, status: int, mark: str | None) -> bool:
        return False

    def answered(self, status: int, served: str | None = None) -> None:
        self._routing.statuses.append(status)
        if served is not None:
            self._routing.served.append(served)
            self.answer_headers = (("x-mural-replica", served), ("x-request-id", "r-1"))

    def done(self, outcome: Outcome) -> None:
        self._routing.outcomes.put_nowait(outcome)


@dataclass
class ToldRouting(Routing):
    """Sends everything to its endpoints in turns, with ``alias`` in the body made ``exact``."""

    endpoints: list[Endpoint] = field(default_factory=list)
    hide_usage: bool = False
    error: MuralError | None = None
    gate: asyncio.Event | None = None
    asks: list[Ask] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    statuses: list[int] = field(default_factory=list)
    served: list[str] = field(default_factory=list)
    """By whom, where not by whom it was sent to."""
    outcomes: asyncio.Queue[Outcome] = field(default_factory=asyncio.Queue)

    async def route(self, ask: Ask) -> Routed:
        self.asks.append(ask)
        self.was_asked.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return ToldRouted(self, ask.body.replace(b'"acme:stable"', b'"acme/default:v3"'))

    async def forward(self, ask: Ask) -> Routed:
        return await self.route(ask)

    async def models(self, ask: Ask) -> bytes:
        self.asks.append(ask)
        return b'{"object":"list","data":[]}'

    async def model(self, ask: Ask, name: str) -> bytes:
        self.asks.append(ask)
        return b'{"id":"%b"}' % name.encode()

    async def outcome(self) -> Outcome:
        """The next request's end."""
        async with asyncio.timeout(BOUND_S):
            return await self.outcomes.get()


@dataclass
class Readiness:
    """What the picker is told about the router."""

    why_not: str | None = None

    def __call__(self) -> str | None:
        return self.why_not


@pytest.fixture
def routing() -> ToldRouting:
    return ToldRouting([Endpoint("mural-0", "192.0.2.7", 8000)])


@pytest.fixture
def readiness() -> Readiness:
    return Readiness()


@pytest.fixture
async def picker(routing: ToldRouting, readiness: Readiness) -> AsyncIterator[Picker]:
    settings = PickerSettings("127.0.0.1", 0, max_body_bytes=MAX_BODY_BYTES)
    running = await start_picker(settings, routing, not_ready=readiness)
    yield running
    await running.drain(0)
