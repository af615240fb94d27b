"""A full fleet serves its tenants by weight: of tokens, and of those that were really used."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from mural_router.routing.ask import Routed
from tests.mural_router.routing.made_up_fleet import Keys, Made, MadeUpFleet, done

BOUND_S = 20.0
SEATS = 6
"""Of a replica that computes four sequences at a time and takes half as many more at home."""
QUEUED = 40
STARTS = 16
ESTIMATE = 1_000
"""Tokens of a request, next to which its prompt counts for nothing."""


class Starts:
    """Requests of two tenants for a fleet that is full, in the order in which they start."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self._begun: asyncio.Queue[tuple[str, Routed]] = asyncio.Queue()

    async def ask(self, tenant: str, max_tokens: int) -> None:
        routed = await self._made.ask(f"{tenant}:v3", tenant, max_tokens=max_tokens)
        self._begun.put_nowait((tenant, routed))

    async def count(self, starts: int, *, refused: str = "", **used: int) -> Counter[str]:
        """The tenants of the next ones. Each ends at once and so gives its seat to the next:
        with the tokens that it ``used``, refused, or as one of whose usage nothing is known."""
        counted: Counter[str] = Counter()
        for _ in range(starts):
            async with asyncio.timeout(BOUND_S):
                tenant, routed = await self._begun.get()
            counted[tenant] += 1
            status = 404 if tenant == refused else 200
            routed.answered(status)
            done(routed, status, completion_tokens=used.get(tenant))
        return counted


@asynccontextmanager
async def full_fleet(
    *, acme_weight: float = 1.0, globex_tokens: int = ESTIMATE
) -> AsyncIterator[Starts]:
    """Both tenants have many requests waiting for a replica's one free seat."""
    keys = Keys({"acme": acme_weight})
    max_tokens = {"acme": ESTIMATE, "globex": globex_tokens}
    made = Made(MadeUpFleet({}), auth=keys, wait_s=BOUND_S)
    starts = Starts(made)
    held = [await made.ask("other:v3", "other") for _ in range(SEATS)]
    asking = [
        asyncio.create_task(starts.ask(tenant, max_tokens[tenant]))
        for _ in range(QUEUED)
        for tenant in max_tokens
    ]
    async with asyncio.timeout(BOUND_S):
        while made.queue.snapshot().waiting < len(asking):  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0)
    done(held.pop())
    yield starts
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    made.queue.check_integrity()


async def test_a_tenant_of_three_times_the_weight_starts_three_times_as_often():
    async with full_fleet(acme_weight=3.0) as starts:
        assert (await starts.count(STARTS))["acme"] == pytest.approx(12, abs=1)
        assert (await starts.count(STARTS))["acme"] == pytest.approx(12, abs=1)


async def test_a_tenant_whose_requests_are_three_times_as_large_starts_a_third_as_often():
    async with full_fleet(globex_tokens=3 * ESTIMATE) as starts:
        assert (await starts.count(STARTS))["acme"] == pytest.approx(12, abs=1)


async def test_a_tenant_that_uses_five_times_what_was_expected_pays_for_it_in_starts():
    async with full_fleet(acme_weight=3.0) as starts:
        used: dict[str, Any] = {"acme": 5 * ESTIMATE, "globex": ESTIMATE}
        # Shares of tokens stay three to one: 5 x 6 to 10.
        assert (await starts.count(STARTS, **used))["acme"] == pytest.approx(6, abs=1)
        assert (await starts.count(STARTS, **used))["acme"] == pytest.approx(6, abs=1)


async def test_what_a_replica_refuses_costs_its_tenant_no_start():
    async with full_fleet() as starts:
        assert (await starts.count(STARTS, refused="globex"))["globex"] >= STARTS - 1
