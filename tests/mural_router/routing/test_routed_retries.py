"""Retries of routed requests are paid for out of the budget, and none is made without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from mural_router.fleet.endpoint import Endpoint
from mural_router.http.settings import HttpSettings
from mural_router.proxy import start
from mural_router.routing.breaker import BreakerSettings
from mural_router.routing.retry import RetrySettings
from tests.mural_router.routing.made_up_fleet import Made, MadeUpFleet, done

BOUND_S = 20.0
NEVER_OPEN = BreakerSettings(failures=1_000)


def made_with(retry: RetrySettings, fleet: MadeUpFleet | None = None) -> Made:
    """Time stands still, so that the budget is what requests put into it."""
    fleet = fleet or MadeUpFleet({}, {}, {})
    return Made(fleet, retry=retry, breaker=NEVER_OPEN, clock=lambda: 1000.0)


async def test_with_the_budget_used_up_nothing_is_asked_elsewhere():
    made = made_with(RetrySettings(ratio=0, min_per_s=0))
    routed = await made.ask("acme:v3")
    first = routed.endpoint
    assert not routed.retry("connect: refused")
    assert routed.endpoint == first
    retries = made.metrics.retries
    assert (retries["budget"], retries.total()) == (1, 1)
    done(routed, 503)
    assert sum(made.dispatch.ledger.loads.by_name.values()) == 0
    (line,) = await made.logged()
    assert line["attempts"] == 1


async def test_every_request_pays_its_share_into_the_budget_and_every_retry_takes_one():
    made = made_with(RetrySettings(ratio=0.25, min_per_s=0))
    went_on = []
    for _ in range(12):
        routed = await made.ask("acme:v3")
        went_on.append(routed.retry("connect: refused"))
        done(routed)
    assert went_on == 3 * [False, False, False, True]
    assert (made.metrics.retries["made"], made.metrics.retries["budget"]) == (3, 9)


async def test_a_retry_that_no_replica_is_left_for_is_not_counted_as_one_that_was_made():
    made = made_with(RetrySettings(ratio=0, min_per_s=0.1), MadeUpFleet({}))
    routed = await made.ask("acme:v3")
    assert not routed.retry("connect: refused")
    done(routed)
    assert (made.metrics.retries["made"], made.metrics.retries["replicas"]) == (0, 1)


@asynccontextmanager
async def losing_replicas(fleet: MadeUpFleet, seen: list[bytes]) -> AsyncIterator[None]:
    """Behind every replica of a fleet somebody who notes what is asked, and hangs up."""

    async def lose(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.transport.abort()

    servers = []
    for replica in fleet.fleet.replicas:
        servers.append(await asyncio.start_server(lose, "127.0.0.1", 0))
        port = servers[-1].sockets[0].getsockname()[1]
        fleet.listening[replica.name] = Endpoint(replica.name, "127.0.0.1", port)
    yield
    for server in servers:
        server.close()


async def test_while_the_fleet_loses_every_request_replicas_get_few_more_than_were_sent() -> None:
    fleet, seen = MadeUpFleet({}, {}, {}), list[bytes]()
    async with losing_replicas(fleet, seen), asyncio.timeout(BOUND_S):
        made = made_with(RetrySettings(attempts=3, ratio=0.125, min_per_s=0), fleet)
        proxy = await start(HttpSettings(port=0), made.routing, version="1")
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
        body = json.dumps({"model": "acme:v3", "prompt": "hello"}).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer acme\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        for _ in range(32):
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 50")
            (length,) = [
                int(line.split(b":")[1])
                for line in answer.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            ]
            await reader.readexactly(length)
        writer.close()
        await proxy.close()
    assert len(seen) == 32 + 4
    assert (made.metrics.retries["made"], made.metrics.retries["budget"]) == (4, 32)
