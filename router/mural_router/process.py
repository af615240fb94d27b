"""The life of a router: its start, its ports, and an end that lets requests finish."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Final

from mural_resolvers.errors import InvalidInput
from mural_resolvers.ports import unavailable
from mural_router.admin.server import AdminServer
from mural_router.config import Config
from mural_router.fleet.news import FleetNews
from mural_router.proxy import Proxy, start
from mural_router.running import Router, open_limiter
from mural_router.settings import is_loopback
from mural_router.start_checks import EXT_PROC_PORT, PORT

if TYPE_CHECKING:
    from mural_router.picker import Picker

__all__ = ["raise_file_limit", "run_router"]

SETTLE_S: Final = 5.0
LOOK_S: Final = 0.02
FILES_BESIDE: Final = 256
"""Files that are open beside the two connections of a request: logs, followers, admin pages."""

logger = logging.getLogger("mural.router")


async def run_router(config: Config, *, version: str) -> int:
    """Route until a signal; 0 once what was in flight has ended, or the grace period has.

    Raises ``InvalidInput`` when it cannot start; nothing is left running then.
    """
    stop = _stop_on_signals()
    raise_file_limit(2 * config.settings.http.max_connections + FILES_BESIDE)
    async with AsyncExitStack() as held:
        limiter = await open_limiter(config.settings, config.secrets)
        held.push_async_callback(limiter.close)
        router = Router(config, limiter)
        held.push_async_callback(router.close)
        beside = [asyncio.create_task(router.fleet.run(), name="following the fleet")]
        if config.watched:
            watching = config.watch(router.take_over)
            beside.append(asyncio.create_task(watching, name="watching the settings"))
        if router.tenants is not None:
            beside.append(asyncio.create_task(router.tenants.watch(), name="watching the tenants"))
        beside.append(asyncio.create_task(router.watch_aliases(), name="watching the aliases"))
        if router.objects is not None:
            beside.append(asyncio.create_task(router.objects.run(), name="watching the objects"))
        for name, watch in router.file_watches().items():
            what = f"watching the {name.replace('_', ' ')}"
            beside.append(asyncio.create_task(watch.run(), name=what))
        held.push_async_callback(_end, beside)
        serving = asyncio.create_task(_serve(router, version, stop, held), name="serve")
        await asyncio.wait({serving, *beside}, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            raise _death(beside)
        serving.result()
        return 0


def _death(tasks: list[asyncio.Task[None]]) -> InvalidInput:
    """Serving ends by a signal; the others never do, and the router cannot go on without them."""
    task = next(task for task in tasks if task.done())
    error = None if task.cancelled() else task.exception()
    return InvalidInput(f"The router ends, since {task.get_name()} has ended: {error}.")


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(router: Router, version: str, stop: asyncio.Event, held: AsyncExitStack) -> None:
    settings = router.config.settings
    if settings.admin_port is not None:
        admin = AdminServer(router, settings.admin_host, settings.admin_port)
        held.push_async_callback(admin.close)
        logger.info("admin pages on http://%s", admin.address)
    await _settle(router, stop)
    news = FleetNews(router.fleet)
    held.callback(news.close)
    news.begin()
    try:
        router.proxy = await start(settings.http, router.routing, version=version)
    except OSError as error:
        raise unavailable(settings.http.host, settings.http.port, PORT, error) from None
    except ValueError as error:
        raise InvalidInput(f"http.tls: {error}.") from None
    picker = None if settings.ext_proc_port is None else await _picker(router)
    router.picker = picker
    _log_start(router, router.proxy)
    await stop.wait()
    router.stopping = True
    grace_s = settings.shutdown_grace_s
    logger.info("shutting down: requests in flight may end within %g s", grace_s)
    if picker is None:
        cut = await router.proxy.drain(grace_s)
    else:
        cut, _ = await asyncio.gather(router.proxy.drain(grace_s), picker.drain(grace_s))
    if cut:
        logger.warning("%d requests were ended before they were complete", cut)


async def _picker(router: Router) -> Picker:
    """Raises ``InvalidInput`` when it cannot be served."""
    # Here alone: who has no gateway needs no gRPC.
    from mural_router.picker import PickerSettings, start_picker

    settings = router.config.settings
    assert settings.ext_proc_port is not None
    http = settings.http
    try:
        picker = await start_picker(
            PickerSettings(
                host=http.host,
                port=settings.ext_proc_port,
                certfile=http.tls.certfile,
                keyfile=http.tls.keyfile,
                max_body_bytes=http.max_body_bytes,
            ),
            router.routing,
            not_ready=router.not_ready,
        )
    except OSError as error:
        raise unavailable(http.host, settings.ext_proc_port, EXT_PROC_PORT, error) from None
    except ValueError as error:
        raise InvalidInput(f"http.tls: {error}.") from None
    logger.info("picking endpoints for gateways on %s:%d", picker.host, picker.port)
    return picker


async def _settle(router: Router, stop: asyncio.Event) -> None:
    """Give replicas and objects a moment to be known, so that the first requests find them."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SETTLE_S
    while loop.time() < until and not stop.is_set():
        objects = None if router.objects is None else router.objects.not_ready()
        if router.fleet.settled and objects is None:
            return
        await asyncio.sleep(LOOK_S)
    if router.objects is not None and (reason := router.objects.not_ready()) is not None:
        logger.warning("not ready, and tenants' keys are answered 503: %s", reason)


def raise_file_limit(wanted: int) -> None:
    """Have as many files open as there may be connections, or say that there may not be so many.

    What is above the limit is not even refused: connections wait unheard until others end.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning(
            "%d files may be open, and %d are needed for http.max_connections: raise the limit "
            "(ulimit -n), or lower that setting",
            allowed,
            wanted,
        )


def _log_start(router: Router, proxy: Proxy) -> None:
    settings, secrets = router.config.settings, router.config.secrets
    if not settings.replicas:
        logger.warning("no replica is listed: every request is answered 503")
    if settings.resolved_auth(secrets) == "open":
        if is_loopback(settings.http.host):
            logger.info("auth open: no key is asked for, and this machine can reach the port")
        else:
            logger.warning("auth open: no key is asked for, and THE NETWORK can reach the port")
    else:
        logger.info("auth keys: every request needs an API key")
    scheme = "http" if settings.http.tls.certfile is None else "https"
    logger.info("routing on %s://%s:%d", scheme, proxy.host, proxy.port)


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):
            loop.add_signal_handler(number, stop.set)
    return stop
