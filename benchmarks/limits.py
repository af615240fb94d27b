"""What limits and the fair queue cost a request, and how much is admitted beyond a limit.

Starts a Redis (``redis-server``, or the one in ``MURAL_REDIS_SERVER``) on a free port. All on one
event loop, so times are of one core:

    .venv/bin/python benchmarks/limits.py
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvloop
from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from mural_resolvers.errors import RateLimited
from mural_resolvers.tenants import Principal, TenantLimits
from mural_router.limits.limiter import Limiter
from mural_router.limits.local import LocalLimiter
from mural_router.limits.queue import FairQueue, Turn
from mural_router.limits.redis_limiter import RedisLimiter, RedisSettings

REQUESTS = 20_000
TOKENS = 400
AMPLE = TenantLimits(requests_per_minute=10**9, tokens_per_minute=10**12, concurrency=10**6)
ROW = "{:<58} {:>9} {:>10} {:>10}"

BUCKET = """
local used = redis.call('INCRBY', KEYS[1], ARGV[1])
if used == tonumber(ARGV[1]) then redis.call('EXPIRE', KEYS[1], 60) end
return used
"""


@contextmanager
def store() -> Iterator[Callable[[], str]]:
    """A function that starts the store anew and gives its address."""
    binary = os.environ.get("MURAL_REDIS_SERVER", "redis-server")
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        processes: list[subprocess.Popen[bytes]] = []

        def start() -> str:
            if processes:
                processes[-1].kill()
                processes[-1].wait()
            command = [binary, "--port", str(port), "--save", "", "--dir", folder]
            processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
            with Redis(port=port) as client:
                while True:
                    try:
                        client.execute_command("PING")
                        return f"redis://127.0.0.1:{port}"
                    except ConnectionError:
                        time.sleep(0.01)
                    except OSError:
                        time.sleep(0.01)

        try:
            yield start
        finally:
            for process in processes:
                process.kill()


@asynccontextmanager
async def limiter_at(url: str) -> AsyncIterator[RedisLimiter]:
    limiter = RedisLimiter(RedisSettings(url=url))
    await limiter.start()
    try:
        yield limiter
    finally:
        await limiter.close()


def principals(count: int) -> list[Principal]:
    """As many requests, by tenants with Zipf's popularity."""
    tenants = [Principal(tenant=f"tenant-{number}", limits=AMPLE) for number in range(count)]
    weights = [1 / (rank + 1) for rank in range(count)]
    return random.Random(0).choices(tenants, weights, k=REQUESTS)


async def cost(limiter: Limiter, asking: list[Principal], at_once: int = 32) -> tuple[float, float]:
    """CPU µs and trips for a request that is admitted, settled and closed."""
    before, began = limiter.snapshot(0).trips, time.process_time()
    queue = iter(asking)

    async def serve() -> None:
        for principal in queue:
            hold = await limiter.enter(principal, 1, TOKENS)
            hold.settle(TOKENS - 50)
            hold.close()

    await asyncio.gather(*(serve() for _ in range(at_once)))
    used_s = time.process_time() - began
    return used_s / len(asking) * 1e6, (limiter.snapshot(0).trips - before) / len(asking)


async def paced(limiter: Limiter, per_s: int, seconds: int, tenants: int) -> tuple[float, float]:
    """CPU µs and trips for a request at a pace, the loop's own idling included."""
    asking = principals(tenants)[: per_s * seconds]
    before, began, start = limiter.snapshot(0).trips, time.process_time(), time.monotonic()
    for number, principal in enumerate(asking):
        await asyncio.sleep(max(0.0, start + number / per_s - time.monotonic()))
        hold = await limiter.enter(principal, 1, TOKENS)
        hold.settle(TOKENS - 50)
        hold.close()
    used_s = time.process_time() - began
    return used_s / len(asking) * 1e6, (limiter.snapshot(0).trips - before) / len(asking)


async def naive(url: str) -> float:
    """CPU µs of a script call for each request, 32 at a time."""
    client = AsyncRedis.from_url(url, max_connections=32)
    script = await client.script_load(BUCKET)
    began, count = time.process_time(), 3000

    async def serve() -> None:
        for _ in range(count // 32):
            await client.evalsha(script, 1, "bucket", 1)

    await asyncio.gather(*(serve() for _ in range(32)))
    used_s = time.process_time() - began
    await client.aclose()
    return used_s / count * 1e6


async def queue_cost(tenants: int) -> tuple[float, float]:
    """CPU µs to begin to wait, and to be started out of the queue, with a waiter of each tenant."""
    seats = 0

    def attempt() -> int | None:
        nonlocal seats
        if not seats:
            return None
        seats -= 1
        return 1

    queue: FairQueue[int] = FairQueue(max_waiting=10**6)

    def wait(number: int) -> Awaitable[Turn[int]]:
        return queue.wait(
            f"t{number % tenants}", 1.0, TOKENS, attempt, timeout_s=600, release=lambda seat: None
        )

    began = time.process_time()
    tasks = [asyncio.ensure_future(wait(number)) for number in range(2 * tenants)]
    await asyncio.sleep(0)
    entered = time.process_time()
    for _ in range(2 * tenants):
        seats += 1
        queue.pump()
    await asyncio.gather(*tasks)
    started = time.process_time()
    return (entered - began) / len(tasks) * 1e6, (started - entered) / len(tasks) * 1e6


async def overshoot(start: Callable[[], str], limit: int, restart: bool) -> float:
    """What two routers admit of a limit, when they are asked for far more; 1: the limit."""
    url = start()
    principal = Principal(tenant="acme", limits=TenantLimits(requests_per_minute=limit))
    admitted = 0
    async with limiter_at(url) as one, limiter_at(url) as two:

        async def hammer(limiter: Limiter, tries: int) -> None:
            nonlocal admitted
            for _ in range(tries):
                try:
                    (await limiter.enter(principal, 1, 1)).close()
                    admitted += 1
                except RateLimited:
                    await asyncio.sleep(0.0005)

        await asyncio.gather(hammer(one, limit), hammer(two, limit if not restart else 0))
        if restart:
            start()
            await asyncio.gather(hammer(one, limit), hammer(two, limit))
            await asyncio.sleep(4)
            await asyncio.gather(hammer(one, limit), hammer(two, limit))
    return admitted / limit


def server_us_per_call(url: str, trips: int) -> float:
    with Redis.from_url(url) as client:
        stats = client.info("commandstats")["cmdstat_evalsha"]
    return float(stats["usec"]) / max(trips, 1)


async def main() -> None:
    row = ROW.format
    print(row("a request: enter, settle, close", "µs", "trips", ""))
    free = [Principal(tenant="acme")] * REQUESTS
    print(
        row(
            "in this process, tenant without limits",
            f"{(await cost(LocalLimiter(), free))[0]:.1f}",
            "",
            "",
        )
    )
    for tenants in (1, 5000):
        asking = principals(tenants)
        us, _ = await cost(LocalLimiter(), asking)
        print(row(f"in this process, {tenants} tenants", f"{us:.1f}", "", ""))
    us, _ = await paced(LocalLimiter(), 500, 5, 100)
    print(row("in this process, 100 tenants, 500 a second", f"{us:.1f}", "", ""))
    us, _ = await paced(LocalLimiter(), 2000, 5, 5000)
    print(row("in this process, 5000 tenants, 2000 a second", f"{us:.1f}", "", ""))
    with store() as start:
        url = start()
        for tenants in (1, 100, 5000):
            async with limiter_at(url) as limiter:
                us, trips = await cost(limiter, principals(tenants))
                print(
                    row(
                        f"leases of Redis, {tenants} tenants, as fast as it goes",
                        f"{us:.1f}",
                        f"{trips:.4f}",
                        "",
                    )
                )
        for per_s, tenants in ((500, 1), (500, 100), (2000, 100), (2000, 5000)):
            async with limiter_at(start()) as limiter:
                us, trips = await paced(limiter, per_s, 5, tenants)
                print(
                    row(
                        f"leases of Redis, {tenants} tenants, {per_s} a second",
                        f"{us:.1f}",
                        f"{trips:.4f}",
                        "",
                    )
                )
        print(
            row("a script call for each request, 32 at a time", f"{await naive(url):.1f}", "1", "")
        )
        print()
        print(row("admitted of a limit by two routers, asked for twice as much", "", "limits", ""))
        print(row("leases of Redis", "", f"{await overshoot(start, 2000, False):.3f}", ""))
        print(
            row(
                "one has used it up when Redis dies and forgets (bound 1.5)",
                "",
                f"{await overshoot(start, 2000, True):.3f}",
                "",
            )
        )
    print()
    print(row("fair queue, two requests of each tenant", "", "enter µs", "start µs"))
    for tenants in (10, 500, 5000):
        enter_us, start_us = await queue_cost(tenants)
        print(row(f"{tenants} tenants", "", f"{enter_us:.1f}", f"{start_us:.1f}"))


if __name__ == "__main__":
    uvloop.run(main())
