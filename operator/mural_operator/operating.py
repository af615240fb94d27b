"""The life of an operator: its watches, its election, its work while it leads, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from typing import Final, NoReturn

from mural_operator.admin import AdminPages, serve_admin
from mural_operator.cluster import Cluster
from mural_operator.conditions import Condition
from mural_operator.controller import Controller, Services
from mural_operator.election import Election, WorkGoesOn
from mural_operator.events import EventRecorder
from mural_operator.fleet import Fleet
from mural_operator.metrics import Metrics
from mural_operator.settings import OperatorSettings
from mural_operator.status_writer import StatusWriter
from mural_operator.troubles import Troubles
from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.config import cluster_config
from mural_resolvers.ports import unavailable

__all__ = ["Operator", "run_operator"]

log = logging.getLogger(__name__)

END_S: Final = 5.0
"""For each part's end."""


async def run_operator(settings: OperatorSettings) -> int:
    """Operate until a signal; 0 after a graceful end, which gives the Lease back.

    Raises `InvalidInput` when it cannot start, or cannot go on.
    """
    stop = _stop_on_signals()
    try:
        client = KubeClient(cluster_config())
    except ValueError as error:
        raise InvalidInput(f"{error}.") from None
    async with client:
        operator = Operator(settings, client)
        async with operator.admin():
            await operator.run(stop)
    return 0


class Operator:
    """One process's. For one event loop."""

    def __init__(self, settings: OperatorSettings, client: KubeClient) -> None:
        self._settings = settings
        self.client = client
        self.namespace = settings.namespace or client.namespace
        self._cluster = Cluster(client, self.namespace, _watched(settings, self.namespace))
        self._election = Election(
            client,
            name=settings.lease,
            namespace=self.namespace,
            identity=f"{settings.pod_name or socket.gethostname()}_{uuid.uuid4()}",
            able=lambda: self._cluster.is_synced,
        )
        self._fleet = Fleet(client, self._cluster)
        self._troubles = Troubles()
        self._conditions: dict[str, tuple[Condition, ...]] = {}
        self.metrics = Metrics(
            watches=lambda: self._cluster.watches,
            calls=lambda: client.calls,
            leading=lambda: self._election.leading,
            adapters=self._count_conditions,
        )
        self._events = EventRecorder(client, metrics=self.metrics)
        self._services = Services(
            client=client,
            cluster=self._cluster,
            fleet=self._fleet,
            writer=StatusWriter(client, metrics=self.metrics),
            events=self._events,
            metrics=self.metrics,
            troubles=self._troubles,
            conditions=self._conditions,
            router_keys=settings.keys_secret,
            leading=lambda: self._election.leading,
        )
        self._stopping = False

    @property
    def leading(self) -> bool:
        """Whether this one acts."""
        return self._election.leading

    async def run(self, stop: asyncio.Event) -> None:
        """Operate until ``stop``; raises `InvalidInput` when a part has ended that never should."""
        standing = asyncio.create_task(self._election.run(), name="the election")
        beside = [
            asyncio.create_task(self._cluster.run(), name="watching the cluster"),
            asyncio.create_task(self._fleet.run(), name="following the pods"),
            asyncio.create_task(self._events.run(), name="recording events"),
        ]
        leading = asyncio.create_task(self._election.lead(self._term), name="the work")
        stopped = asyncio.create_task(stop.wait(), name="the signal")
        parts = [leading, *beside, standing]
        try:
            await asyncio.wait({stopped, *parts}, return_when=asyncio.FIRST_COMPLETED)
            dead = next((part for part in parts if part.done()), None)
            if dead is not None:
                if not dead.cancelled() and isinstance(dead.exception(), WorkGoesOn):
                    _end_at_once(dead)
                raise _death(dead)
            log.info("shutting down")
        finally:
            self._stopping = True
            stopped.cancel()
            # The work first, so that the Lease is given back when nobody works any more.
            for part in parts:
                await _end(part)

    async def _term(self) -> None:
        """One term of leadership."""
        log.info("leading: pools, tenants and aliases of %s are worked on", self.namespace)
        await Controller(self._services).run()

    # -- pages ------------------------------------------------------------------------------------

    def admin(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Serve the pages, where they are wanted; raises `InvalidInput` when that cannot be."""
        return _admin(self._settings, self._pages())

    def _pages(self) -> AdminPages:
        return AdminPages(
            # A part that dies ends the process, so who answers lives.
            trouble=lambda: None,
            not_ready=self._not_ready,
            metrics=self.metrics.exposition,
        )

    def _not_ready(self) -> str | None:
        if self._stopping:
            return "shutting down"
        unknown = [name for name, kind in self._cluster.watches.items() if not kind.synced]
        troubles = [kind.trouble for kind in self._cluster.watches.values() if kind.trouble]
        troubles += filter(None, (self._election.trouble, self._troubles.lasting))
        if unknown:
            troubles.append(f"not listed yet: {', '.join(unknown)}")
        return "\n".join(troubles) or None

    def _count_conditions(self) -> Mapping[tuple[str, str], int]:
        # Who does not lead judges no adapter.
        judged = self._conditions.values() if self.leading else ()
        return Counter((each.type, each.status) for found in judged for each in found)


@contextlib.asynccontextmanager
async def _admin(settings: OperatorSettings, pages: AdminPages) -> AsyncIterator[None]:
    if settings.admin_port is None:
        yield
        return
    async with AsyncExitStack() as held:
        try:
            port = await held.enter_async_context(
                serve_admin(pages, settings.admin_host, settings.admin_port)
            )
        except OSError as error:
            raise unavailable(
                settings.admin_host, settings.admin_port, "--admin-port", error
            ) from None
        log.info("probes and metrics on http://%s:%d", settings.admin_host, port)
        yield


def _watched(settings: OperatorSettings, namespace: str) -> tuple[str, ...] | None:
    if settings.all_namespaces:
        return None
    return tuple(dict.fromkeys(settings.watch_namespaces)) or (namespace,)


def _death(part: asyncio.Task[None]) -> InvalidInput:
    error = None if part.cancelled() else part.exception()
    return InvalidInput(f"The operator ends, since {part.get_name()} has ended: {error}.")


def _end_at_once(part: asyncio.Task[None]) -> NoReturn:
    """End the process without any more waiting: two would act, were the work waited for."""
    log.critical("the operator ends at once: %s", part.exception())
    logging.shutdown()
    os._exit(1)


async def _end(part: asyncio.Task[None]) -> None:
    part.cancel()
    done, _ = await asyncio.wait({part}, timeout=END_S)
    if not done:
        log.error("%s does not end", part.get_name())


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    return stop
