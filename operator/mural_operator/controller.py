"""All the work of one term of leadership: a worker a pool, one for tenants, one for aliases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from mural_operator.aliases_worker import AliasesWorker
from mural_operator.cluster import Cluster, Wakes
from mural_operator.conditions import Condition
from mural_operator.events import EventRecorder
from mural_operator.executor import Executor
from mural_operator.fleet import Fleet, FleetListener
from mural_operator.metrics import Metrics
from mural_operator.pool_worker import Ground, PoolWorker
from mural_operator.router_keys import RouterKeys
from mural_operator.status_writer import StatusWriter
from mural_operator.statuses import Statuses
from mural_operator.tenants_worker import TenantsWorker
from mural_operator.troubles import Troubles
from mural_operator.unreadable_worker import UnreadableWorker
from mural_operator.worker import Worker
from mural_resolvers.kubernetes.client import KubeClient

__all__ = ["Controller", "Services"]


@dataclass(frozen=True, slots=True)
class Services:
    """What outlives a term."""

    client: KubeClient
    cluster: Cluster
    fleet: Fleet
    writer: StatusWriter
    events: EventRecorder
    metrics: Metrics
    troubles: Troubles
    conditions: dict[str, tuple[Condition, ...]]
    """By an Adapter's key, of the term: what its status says."""
    router_keys: str
    """The name of the routers' Secret."""
    leading: Callable[[], bool]


class Controller(Wakes, FleetListener):
    """One term's. What was decided in the one before is decided anew; what was seen is known."""

    def __init__(self, services: Services) -> None:
        self._cluster = services.cluster
        self._conditions = services.conditions
        self._troubles = services.troubles
        self._fleet = services.fleet
        self._statuses = Statuses(services.leading, services.troubles)
        ground = Ground(
            cluster=services.cluster,
            executor=Executor(services.client, services.leading, services.troubles),
            fleet=services.fleet,
            statuses=self._statuses,
            writer=services.writer,
            events=services.events,
            metrics=services.metrics,
            troubles=services.troubles,
            conditions=services.conditions,
        )
        now = asyncio.get_running_loop().time
        keys = RouterKeys(services.client, services.cluster.namespace, services.router_keys, now)
        self._tenants = TenantsWorker(ground, keys)
        self._aliases = AliasesWorker(ground)
        self._unreadable = UnreadableWorker(ground)
        self._pools = _Pools(ground)

    async def run(self) -> None:
        """Work until cancelled; raises what no part of it can go on after."""
        await self._cluster.synced()
        self._cluster.tell(self)
        self._fleet.tell(self)
        try:
            async with asyncio.TaskGroup() as group:
                self._pools.group = group
                group.create_task(self._statuses.run(), name="the statuses")
                for worker in (self._tenants, self._aliases, self._unreadable, self._pools):
                    group.create_task(worker.run(), name=worker.name)
        finally:
            self._fleet.tell(None)
            self._cluster.tell_no_more(self)
            self._conditions.clear()
            self._troubles.clear()

    # -- being told -------------------------------------------------------------------------------

    def pools(self) -> None:
        self._unreadable.wake()
        self._pools.wake()
        for worker in self._pools.workers():
            worker.wake()

    def pool(self, name: str) -> None:
        worker = self._pools.get(name)
        if worker is not None:
            worker.wake()
        self._unreadable.wake()
        # It may be the first that is heard of it, or the last.
        self._pools.wake()

    def tenants(self) -> None:
        self._tenants.wake()

    def aliases(self) -> None:
        self._aliases.wake()

    def replica(self, pool: str, pod: str, load_only: bool) -> None:
        worker = self._pools.get(pool)
        if worker is not None:
            worker.replica(load_only)

    def secrets(self) -> None:
        self._tenants.wake()
        for worker in self._pools.workers():
            worker.wake()


class _Pools(Worker):
    """Has a worker for each pool that there is or that an adapter names."""

    group: asyncio.TaskGroup
    """In which they run: the death of one ends the term."""

    def __init__(self, ground: Ground) -> None:
        super().__init__("the pools")
        self._ground = ground
        self._working: dict[str, tuple[PoolWorker, asyncio.Task[None]]] = {}

    def get(self, name: str) -> PoolWorker | None:
        """The worker of a pool, if it has begun."""
        found = self._working.get(name)
        return None if found is None else found[0]

    def workers(self) -> list[PoolWorker]:
        """All that have begun."""
        return [worker for worker, _ in self._working.values()]

    async def step(self) -> None:
        names = self._ground.cluster.pool_names
        for name in self._working.keys() - names:
            _, task = self._working.pop(name)
            task.cancel()
            # One that comes back under the name begins where this one has ended.
            await asyncio.wait({task})
        for name in sorted(names - self._working.keys()):
            worker = PoolWorker(name, self._ground)
            task = self.group.create_task(worker.run(), name=worker.name)
            self._working[name] = (worker, task)
