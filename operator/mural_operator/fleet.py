"""The pods of every pool, followed by whoever may come to lead: only ever read, by GET alone.

An operator that waits for the Lease follows them, too, so that it knows what they hold when its
term begins. Nothing here loads, writes or records.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Final

from mural_operator.cluster import Cluster, Wakes
from mural_operator.credentials import PoolCredentials, secret_names
from mural_operator.replicas import Follower, Replicas
from mural_operator.secret_cache import SecretCache
from mural_operator.worker import Worker
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.objects import PoolSpec, ServingPool

__all__ = ["Fleet", "FleetListener"]

SETTLE_S: Final = 3.0
"""So long the pods of a pool that has just become known may take to say how they are: what a leader
would do and tell before would be of a pool that is empty."""


class FleetListener(ABC):
    """Who leads."""

    @abstractmethod
    def replica(self, pool: str, pod: str, load_only: bool) -> None:
        """A pod has said something new, or is not heard any more; ``load_only``: of load alone."""

    @abstractmethod
    def secrets(self) -> None:
        """A Secret that someone wants has changed."""


class Fleet(Worker, Wakes):
    """For one event loop, as long as the process lives."""

    def __init__(self, client: KubeClient, cluster: Cluster) -> None:
        super().__init__("the fleet")
        self.secrets = SecretCache(client, cluster.namespace, self._secrets_changed)
        self._cluster = cluster
        self._pools: dict[str, _Followed] = {}
        self._listener: FleetListener | None = None

    def tell(self, listener: FleetListener | None) -> None:
        """Tell this one from now on; None: nobody."""
        self._listener = listener

    def follower(self, pool: str, pod: str) -> Follower | None:
        """The follower of a pod; None: it is not of the pool, or has no address yet."""
        found = self._pools.get(pool)
        return None if found is None else found.replicas.get(pod)

    def settles_at(self, pool: ServingPool) -> float | None:
        """Follow the pods of a pool as it is now. By the loop's clock: until when to wait for what
        they say, infinity where its Secrets are not known; None: they have had their time."""
        name, now = pool.metadata.name, asyncio.get_running_loop().time()
        followed = self._pools.get(name)
        if followed is None:
            followed = self._pools[name] = _Followed(self, name, pool.spec)
        followed.spec = pool.spec
        names = secret_names(pool.spec)
        self.secrets.want(followed.owner, names)
        if not self.secrets.knows(names):
            return float("inf")
        followed.replicas.follow(self._cluster.targets(pool))
        return followed.settles_at(now)

    # -- the life ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow for ever."""
        # Before all is listed, a pool may look as if it had no pods.
        await self._cluster.synced()
        self._cluster.tell(self)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.secrets.run(), name="reading Secrets")
                group.create_task(super().run(), name=self.name)
        finally:
            self._cluster.tell_no_more(self)
            for name in list(self._pools):
                await self._forget(name)

    async def step(self) -> None:
        pools = self._cluster.pools
        for name in self._pools.keys() - pools.keys():
            await self._forget(name)
        for pool in pools.values():
            self.settles_at(pool)

    async def _forget(self, name: str) -> None:
        followed = self._pools.pop(name)
        self.secrets.want(followed.owner, ())
        await followed.replicas.close()

    # -- being told -------------------------------------------------------------------------------

    def pools(self) -> None:
        self.wake()

    def pool(self, name: str) -> None:
        self.wake()

    def tenants(self) -> None:
        """Nothing of theirs is followed."""

    def aliases(self) -> None:
        """Nor of these."""

    def replica_changed(self, pool: str, pod: str, load_only: bool) -> None:
        """A follower's word."""
        if self._listener is not None:
            self._listener.replica(pool, pod, load_only)

    def _secrets_changed(self) -> None:
        self.wake()
        if self._listener is not None:
            self._listener.secrets()


class _Followed:
    """One pool."""

    def __init__(self, fleet: Fleet, name: str, spec: PoolSpec) -> None:
        self.owner = f"the pool {name}"
        self.spec = spec
        credentials = PoolCredentials(lambda: self.spec, fleet.secrets)
        self.replicas = Replicas(
            credentials, lambda pod, load_only: fleet.replica_changed(name, pod, load_only)
        )
        self._until_s: float | None = None
        self._settled = False

    def settles_at(self, now: float) -> float | None:
        if self._until_s is None:
            self._until_s = now + SETTLE_S
        self._settled = self._settled or self.replicas.settled or now >= self._until_s
        return None if self._settled else self._until_s
