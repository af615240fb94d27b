"""Limits, seen alike with and without the express way."""

from __future__ import annotations

import asyncio

import pytest

from mural_resolvers.tenants import Principal, TenantLimits
from mural_router.http.scan import plain_request
from mural_router.limits.limiter import Hold
from mural_router.limits.local import LocalLimiter
from tests.mural_router.proxy.express_scenarios import Scenario, Scenarios
from tests.mural_router.proxy.express_stage import (
    ADMIN,
    Here,
    answers_after,
    request,
    whole,
)
from tests.mural_router.proxy.scripted_replica import says

pytestmark = pytest.mark.skipif(plain_request is None, reason="nothing native is built")

scenario = Scenarios()


@scenario(
    "whole", "whole", "refused", "refused", "refused", limits=TenantLimits(requests_per_minute=2)
)
async def a_limit_of_requests(here: Here) -> None:
    for _ in range(2):
        await here.ask()
    client = await here.client()
    for stream in (False, True, False):
        client.send(request(stream=stream))
        assert (await client.answer()).startswith(b"HTTP/1.1 429")
    assert here.limiter.snapshot().refused == {"requests": 3}
    here.now += 61
    await here.ask(n=2)


@scenario("whole", "refused", "whole", limits=TenantLimits(tokens_per_minute=100))
async def a_limit_of_tokens(here: Here) -> None:
    await here.ask(max_tokens=50)
    assert (await here.ask(max_tokens=95)).startswith(b"HTTP/1.1 429")
    await here.ask(max_tokens=80)


@scenario("refused", "whole", "whole", limits=TenantLimits(concurrency=1))
async def a_limit_of_sequences(here: Here) -> None:
    go = asyncio.Event()
    here.plays(answers_after(go))
    # A second kept connection: without one a request is not of the express way.
    two = [await here.client() for _ in range(2)]
    for client in two:
        client.send(request(key=ADMIN, n=2))
    await here.until(lambda: len(here.replicas["a"].requests) == 3)
    go.set()
    for client in two:
        await client.answer()
    go.clear()
    here.plays(answers_after(go))
    two[0].send(request())
    await here.until(lambda: len(here.replicas["a"].requests) == 4)
    assert (await here.ask()).startswith(b"HTTP/1.1 429")
    go.set()
    await two[0].answer()
    await here.ask()


@scenario("whole", "whole", "whole", "unfolded", limits=TenantLimits(tokens_per_minute=10_000))
async def usage_is_settled(here: Here) -> None:
    usages = (b'"prompt_tokens":1', b'"prompt_tokens":900,"completion_tokens":800', None)
    for usage in usages:
        body = b"{}" if usage is None else b'{"usage":{%b}}' % usage
        here.plays(says(whole(body)))
        await here.ask(max_tokens=100)
    here.plays(says(whole(b"{}", "400 Bad Request")))
    await here.ask(max_tokens=100)
    (tenant,) = here.limiter.snapshot().tenants
    assert (tenant.tokens, tenant.sequences) == (1 + 1700 + 101, 0)


class Asking(LocalLimiter):
    """As one that shares its count: it has to ask, now and then."""

    asks = 0

    def enter_now(  # type: ignore[override] # as a limiter may that is not local
        self, principal: Principal, sequences: int, tokens: int
    ) -> Hold | None:
        if principal.tenant is None:
            return super().enter_now(principal, sequences, tokens)
        return None

    async def enter(self, principal: Principal, sequences: int, tokens: int) -> Hold:
        self.asks += 1
        return super().enter_now(principal, sequences, tokens)


@scenario(limiter=lambda: Asking(lambda: 1000.0), limits=TenantLimits(requests_per_minute=2))
async def a_limiter_that_has_to_ask(here: Here) -> None:
    for _ in range(3):
        await here.ask()
    assert isinstance(here.limiter, Asking)
    assert here.limiter.asks == 3
    assert here.limiter.snapshot().refused == {"requests": 1}


class Broken(LocalLimiter):
    def enter_now(self, principal: Principal, sequences: int, tokens: int) -> Hold:
        if principal.tenant is None:
            return super().enter_now(principal, sequences, tokens)
        raise RuntimeError("a fault of the limiter's")


@scenario("refused", "refused", limiter=lambda: Broken(lambda: 1000.0))
async def a_limiter_with_a_fault(here: Here) -> None:
    client = await here.client()
    for _ in range(2):
        client.send(request())
        assert (await client.answer()).startswith(b"HTTP/1.1 500")


@scenario.each
async def test_all_is_seen_alike(played: Scenario, authorities: str) -> None:
    await played.is_seen_alike(authorities)
