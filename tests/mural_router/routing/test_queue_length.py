"""How many of a tenant's requests may wait is a limit of the tenant, as its others are."""

from __future__ import annotations

import asyncio

import pytest

from mural_resolvers.errors import RateLimited
from mural_resolvers.tenants import TenantLimits
from tests.mural_router.routing.made_up_fleet import Keys, Made, MadeUpFleet, done

BOUND_S = 20.0
SEATS = 6
"""Of a replica that computes four sequences at a time and takes half as many more at home."""
LENGTHS = {"acme": 2, "globex": 0, "initech": None}


async def test_a_tenants_own_queue_length_holds_in_place_of_the_routers():
    limits = {name: TenantLimits(queue_length=length) for name, length in LENGTHS.items()}
    made = Made(MadeUpFleet({}), auth=Keys(**limits), wait_s=BOUND_S)
    made.queue.max_waiting_per_tenant = 1
    held = [await made.ask("other:v3", "other") for _ in range(SEATS)]

    asking = []
    for tenant, waits in {"acme": 2, "globex": 0, "initech": 1}.items():
        asking += [asyncio.create_task(made.ask(f"{tenant}:v3", tenant)) for _ in range(waits)]
        async with asyncio.timeout(BOUND_S):
            while made.queue.snapshot().waiting < len(asking):  # noqa: ASYNC110 - no event tells
                await asyncio.sleep(0)
        with pytest.raises(RateLimited, match=f"wait for it as may: {waits}") as caught:
            await made.ask(f"{tenant}:v3", tenant)
        assert caught.value.retry_after_s

    # Where there is room nobody waits, however short the queue.
    for routed in held:
        done(routed)
    for routed in await asyncio.gather(*asking):
        done(routed)
    done(await made.ask("globex:v3", "globex"))
    made.queue.check_integrity()
