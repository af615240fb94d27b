"""Where requests go, seen alike with and without the express way."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mural_router.http.scan import plain_request
from mural_router.placement import PlacementPolicy
from tests.mural_router.proxy.express_scenarios import Scenario, Scenarios
from tests.mural_router.proxy.express_stage import (
    ADMIN,
    GLOBEX,
    Here,
    answers_after,
    bearer,
    counts,
    held,
    request,
    whole,
)
from tests.mural_router.proxy.scripted_answers import ANSWER, HEAD
from tests.mural_router.proxy.scripted_replica import BOUND_S, Received, says

pytestmark = pytest.mark.skipif(plain_request is None, reason="nothing native is built")

scenario = Scenarios()


@scenario("whole", "whole", "whole")
async def the_adapter_goes_and_comes_elsewhere(here: Here) -> None:
    await here.ask()
    here.replica("a", adapters={})
    await here.ask()  # At home still, and to be loaded there.
    here.replica("a", adapters=held("acme:v1", level="disk"))
    await here.ask()
    here.replica("a", adapters=held("acme:v1", digest="e" * 64))
    assert b"x-mural-digest: " + b"e" * 64 in await here.ask()
    here.replica("b", adapters=held("acme:v1"))
    here.replica("a", slots=0)
    await here.ask()  # On a new connection.
    assert b"x-mural-replica: b\r\n" in await here.ask()


@scenario("whole", "whole")
async def the_replica_drains(here: Here) -> None:
    await here.ask()
    here.replica("a", ready=False)
    await here.ask()
    here.replica("a", ready=True)
    await here.ask()


@scenario("whole")
async def the_replica_is_gone(here: Here) -> None:
    await here.ask()
    here.source.set(*(each for each in here.source.fleet.replicas if each.name != "a"))
    assert b"x-mural-replica: b\r\n" in await here.ask()


@scenario("whole", "whole")
async def the_replica_leaves_while_it_answers(here: Here) -> None:
    await here.ask()

    async def leaves(received: Received) -> None:
        here.source.set(*(each for each in here.source.fleet.replicas if each.name != "a"))
        await received.send(whole())

    here.plays(leaves)
    await here.ask()
    assert "a" not in here.metrics.replicas


@scenario("whole")
async def the_replica_is_gone_before_a_fleet_says_so(here: Here) -> None:
    await here.ask()
    endpoint = here.source.endpoints.pop("a")
    assert (await here.ask()).startswith(b"HTTP/1.1 503")
    here.source.endpoints["a"] = endpoint


@scenario("whole")
async def the_replica_moves_before_a_fleet_says_so(here: Here) -> None:
    await here.ask()
    here.source.endpoints["a"] = here.source.endpoints["b"]
    assert b"x-mural-replica: b\r\n" in await here.ask()


@scenario("whole", "whole")
async def an_adapter_is_declared_to_have_two_homes(here: Here) -> None:
    await here.ask()
    here.replica("b", adapters=held("acme:v1"))
    await here.ask()
    here.declared["acme/default:v1"] = 2
    await here.ask()
    await here.ask(prompt="another")


@scenario("whole")
async def the_policy_is_changed(here: Here) -> None:
    await here.ask()
    here.dispatch.policy = PlacementPolicy(overcommit=1.0, light=0.0)
    here.replica("a", running=4)
    await here.ask()


@scenario("whole", "whole")
async def the_routers_token_is_another(here: Here) -> None:
    await here.ask()
    here.routing.options = replace(here.routing.options, router_token="token-2")
    await here.ask()
    assert b"authorization: Bearer token-2\r\n" in here.replicas["a"].requests[-1].raw


@scenario("whole", "unfolded")
async def a_replica_in_trouble(here: Here) -> None:
    await here.ask()
    here.plays(*[says(whole(b"{}", "500 Oh"))] * 2)
    await here.ask()
    await here.ask()
    assert here.breakers.states(here.now)["a"] == "open"
    await here.ask()
    here.now += 60
    await here.ask()
    assert not here.breakers.troubled


@scenario("whole", "whole")
async def the_loads_end_trouble(here: Here) -> None:
    """One that was sent before another failed ends the trouble, by whichever way it went."""
    go = asyncio.Event()

    async def waits(received: Received) -> None:
        await go.wait()
        await received.send(whole())

    await here.ask()
    here.plays(waits)
    client = await here.client()
    client.send(request())
    await here.until(lambda: len(here.replicas["a"].requests) == 3)
    here.plays(says(whole(b"{}", "500 Oh")))
    await here.ask(n=2)
    assert here.breakers.troubled
    go.set()
    await client.answer()
    assert not here.breakers.troubled


@scenario("whole", "whole", queue_wait_s=BOUND_S)
async def nobody_is_overtaken(here: Here) -> None:
    """While one waits for a place nobody else is given one, whatever he asks for."""
    go = asyncio.Event()

    async def waits(received: Received) -> None:
        await go.wait()
        await received.send(whole())

    await here.ask()
    here.replica("b", ready=False)
    here.plays(waits)
    first = await here.client()
    first.send(request(n=6, key=ADMIN))
    await here.until(lambda: len(here.replicas["a"].requests) == 3)
    waiting, after = await here.client(), await here.client()
    waiting.send(request("globex:v4", key=bearer(GLOBEX), prompt="waits", n=5))
    await here.until(lambda: here.queue.waiting == 1)
    here.replica("b", ready=True, max_num_seqs=1)
    after.send(request())
    await here.until(lambda: here.proxy.state().requests_total == 4)
    go.set()
    for client in (first, waiting, after):
        await client.answer()
    await here.ask()


@scenario("whole", "unfolded")
async def an_attempt_is_counted_while_it_is_on_its_way(here: Here) -> None:
    for answer in ([whole()], [HEAD % len(ANSWER), ANSWER[:9], ANSWER[9:]]):
        go, before = asyncio.Event(), len(here.replicas["a"].requests)
        here.plays(answers_after(go, *answer))
        client = await here.client()
        client.send(request())
        await here.replica_has_had("a", before + 1)
        here.seen.append("\n".join(counts(here.metrics.exposition().decode())).encode())
        assert here.dispatch.ledger.in_flight("a") == 1
        assert here.limiter.snapshot().tenants == ()
        go.set()
        await client.answer()


@scenario.each
async def test_all_is_seen_alike(played: Scenario, authorities: str) -> None:
    await played.is_seen_alike(authorities)
