"""A router's limiter in a process of its own, driven by lines on its standard input.

``enter N SEQUENCES TOKENS`` tries N requests and answers how many were admitted; ``close`` ends
all that are open; ``settle N`` settles all that are open; ``usage`` answers what was used here.
"""

from __future__ import annotations

import asyncio
import json
import sys

from mural_resolvers.errors import RateLimited
from mural_resolvers.tenants import Principal, TenantLimits
from mural_router.limits import lease, redis_limiter
from mural_router.limits.limiter import Hold
from mural_router.limits.redis_limiter import RedisLimiter, RedisSettings


async def drive(url: str, limits: TenantLimits) -> None:
    limiter = RedisLimiter(RedisSettings(url=url, routers=2))
    await limiter.start()
    principal = Principal(tenant="acme", limits=limits)
    holds: list[Hold] = []

    async def enter(count: int, sequences: int, tokens: int) -> int:
        before = len(holds)
        for _ in range(count):
            try:
                holds.append(await limiter.enter(principal, sequences, tokens))
            except RateLimited:
                # Let the task of the limiter run, as a busy router does.
                await asyncio.sleep(0)
        return len(holds) - before

    say("ready")
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, *numbers = line.split()
        if command == "enter":
            say(await enter(*map(int, numbers)))
        elif command == "settle":
            for hold in holds:
                hold.settle(int(numbers[0]))
            say("settled")
        elif command == "close":
            for hold in holds:
                hold.close()
            holds.clear()
            say("closed")
        else:
            say([limiter.snapshot().away_s is None, limiter.snapshot().routers])
    await limiter.close()


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    url, rates, lease_s, held_s = sys.argv[1:]
    lease.LEASE_S = float(lease_s)  # type: ignore[misc]  # a test does not wait for ten seconds
    redis_limiter.HELD_S = float(held_s)  # type: ignore[misc]
    asyncio.run(drive(url, TenantLimits(**json.loads(rates))))
