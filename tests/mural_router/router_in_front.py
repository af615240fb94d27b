"""A whole router in this process, in front of servers that a test has started."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx

from mural_router.config import Config
from mural_router.limits.local import LocalLimiter
from mural_router.proxy import start
from mural_router.running import Router
from mural_router.settings import Secrets

BOUND_S = 20.0


@asynccontextmanager
async def router_in_front(
    server: Any, secrets: Secrets, headers: dict[str, str], **flags: object
) -> AsyncIterator[httpx.AsyncClient]:
    """A client that sends these headers, once the router takes requests for the server."""
    flags = {
        "replicas": [f"http://127.0.0.1:{server.port},control={server.control_port}"],
        "access_log": None,
        "http": {"host": "127.0.0.1", "port": 0},
        **flags,
    }
    async with AsyncExitStack() as held:
        router = Router(Config(None, flags, secrets), LocalLimiter())
        held.push_async_callback(router.close)
        following = asyncio.create_task(router.fleet.run())
        held.callback(following.cancel)
        async with asyncio.timeout(BOUND_S):
            heard = asyncio.Event()
            router.fleet.subscribe(lambda fleet: heard.set() if fleet.accepting else None)
            await heard.wait()
        proxy = await start(router.config.settings.http, router.routing, version="0")
        held.push_async_callback(proxy.drain, 0)
        url = f"http://127.0.0.1:{proxy.port}"
        yield await held.enter_async_context(
            httpx.AsyncClient(base_url=url, headers=headers, timeout=BOUND_S)
        )
