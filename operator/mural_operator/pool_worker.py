"""One pool: what its pods say and what is declared for it, reconciled whenever either changes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from mural_operator.cluster import Cluster, KubePod
from mural_operator.conditions import Condition
from mural_operator.events import EventRecorder
from mural_operator.executor import Executor, Outcome, PoolHands
from mural_operator.fleet import Fleet
from mural_operator.metrics import Metrics
from mural_operator.pool_verdict import PoolVerdict, of_unreadable, pool_verdict
from mural_operator.reconcile import FINALIZER, Plan, RemoveFinalizer, reconcile, release
from mural_operator.refusals import LYING, Refusals
from mural_operator.replicas import Follower
from mural_operator.status_writer import StatusWriter
from mural_operator.statuses import Statuses
from mural_operator.troubles import Troubles
from mural_operator.unreadable import Unreadable
from mural_operator.verdict import AdapterVerdict, of_unreadable_pool, verdict, without_pool
from mural_operator.worker import Worker
from mural_operator.world import Pod, World
from mural_resolvers.kubernetes.client import KubeError
from mural_resolvers.kubernetes.objects import Adapter, AdapterSpec, ServingPool
from mural_resolvers.kubernetes.paths import ADAPTERS
from mural_server.protocol import ControlError

__all__ = ["Ground", "PoolWorker"]

TELL_S: Final = 0.5
"""Between two judgements of all objects, and in terms of the time that one took:"""
TELL_SHARE: Final = 5.0
LOAD_S: Final = 1.0
"""Between two looks at loads, where the number of replicas goes by them."""


@dataclass(frozen=True, slots=True)
class Ground:
    """What all workers of one term stand on."""

    cluster: Cluster
    executor: Executor
    fleet: Fleet
    statuses: Statuses
    writer: StatusWriter
    events: EventRecorder
    metrics: Metrics
    troubles: Troubles
    conditions: dict[str, tuple[Condition, ...]]
    """By an Adapter's key: what its status says, for the metrics."""


class PoolWorker(Worker):
    """Also for a pool that adapters name and that does not exist: they are told so."""

    def __init__(self, name: str, ground: Ground, clock: Callable[[], float] = time.time) -> None:
        super().__init__(f"the pool {name}")
        self._pool_name = name
        self._pool_key = f"pool {ground.cluster.namespace}/{name}"
        self._ground = ground
        self._clock = clock
        self._refusals = Refusals(clock)
        self._goes_by_load = False
        self._tell_again_s = 0.0
        self._generations: dict[str, tuple[str, int]] = {}
        self._reasons: dict[str, str] = {}

    async def run(self) -> None:
        ground, name = self._ground, self._pool_name
        hands = PoolHands(self._follower, self._refusals, self._done, self.wake)
        ground.executor.open(name, hands)
        try:
            await super().run()
        finally:
            self._forget_statuses(frozenset())
            ground.statuses.forget(self._pool_key)
            await ground.executor.close(name)
            ground.metrics.forget(name)

    async def step(self) -> None:
        pool = self._ground.cluster.pool(self._pool_name)
        adapters = self._ground.cluster.adapters_of(self._pool_name)
        self._note_changes(adapters)
        if isinstance(pool, ServingPool):
            if self._is_in_touch(pool):
                self._reconcile(pool, adapters)
        else:
            actions = (*release(adapters), *self._unreadable_ends())
            self._ground.executor.submit(self._pool_name, actions)
            self._tell_without_pool(adapters, pool)
        self._plan_next()

    # -- looking ----------------------------------------------------------------------------------

    def _follower(self, pod: str) -> Follower | None:
        return self._ground.fleet.follower(self._pool_name, pod)

    def _is_in_touch(self, pool: ServingPool) -> bool:
        """Whether the pods of the pool are followed, and have had their time to speak."""
        until_s = self._ground.fleet.settles_at(pool)
        if until_s is not None and until_s < float("inf"):
            self.wake_at(until_s)
        return until_s is None

    def _note_changes(self, adapters: tuple[Adapter, ...]) -> None:
        """What was refused of an object may not be of what it is now."""
        generations = {
            each.exact: (each.metadata.uid, each.metadata.generation) for each in adapters
        }
        for name, generation in generations.items():
            if self._generations.get(name) != generation:
                self._refusals.changed(name)
        self._generations = generations
        self._goes_by_load = any(each.spec.placement.min_replicas is not None for each in adapters)

    def _world(self, pool: ServingPool, adapters: tuple[Adapter, ...]) -> World:
        cluster = self._ground.cluster
        kube_pods = cluster.pods_of(self._pool_name)
        self._refusals.keep(
            frozenset(pod.metadata.uid for pod in kube_pods), frozenset(self._generations)
        )
        return World(
            pool=pool,
            adapters=adapters,
            pods=tuple(map(self._pod, kube_pods)),
            owners=cluster.owners,
            complete=cluster.complete,
            outdated=cluster.outdated_adapters,
            outdated_pool=cluster.outdated_pools.get(self._pool_name),
        )

    def _pod(self, kube: KubePod) -> Pod:
        uid = kube.metadata.uid
        follower = self._follower(kube.metadata.name)
        state = None if follower is None else follower.state
        models = None if follower is None else follower.models
        boot = None if state is None else state.boot_id
        self._refusals.heard(uid, "" if models is not None else boot)
        pod = Pod(
            name=kube.metadata.name,
            uid=uid,
            labels=kube.metadata.labels,
            ready=kube.ready,
            terminating=kube.terminating,
            state=state,
            listed=None if models is None else models.adapters,
            served=() if models is None else models.base_names,
            error="it has no address of its own yet" if follower is None else follower.error,
        )
        for name, refusal in self._refusals.of(uid).items():
            if refusal.status == LYING and pod.holds(name):
                self._refusals.clear(uid, name)
        return replace(pod, refusals=self._refusals.of(uid))

    # -- deciding ---------------------------------------------------------------------------------

    def _reconcile(self, pool: ServingPool, adapters: tuple[Adapter, ...]) -> None:
        began = time.perf_counter()
        world = self._world(pool, adapters)
        plan = reconcile(world, self._clock())
        self._ground.executor.submit(self._pool_name, (*plan.actions, *self._unreadable_ends()))
        self._ground.metrics.reconciled(self._pool_name, time.perf_counter() - began)
        now = asyncio.get_running_loop().time()
        if now < self._tell_again_s:
            # What is told changes no replica, and readers want the outcome.
            self.wake_at(self._tell_again_s)
            return
        began = time.perf_counter()
        self._tell(world, plan)
        self._tell_again_s = now + max(TELL_S, TELL_SHARE * (time.perf_counter() - began))

    def _unreadable_ends(self) -> Iterator[RemoveFinalizer]:
        """What nobody can read any more must still be able to go."""
        for each in self._ground.cluster.unreadable_of(self._pool_name):
            metadata = each.metadata
            if metadata.deletion_timestamp is not None and FINALIZER in metadata.finalizers:
                spec = AdapterSpec(pool=each.pool, tenant="", version="")
                yield RemoveFinalizer(Adapter(metadata, spec))

    def _plan_next(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = self._ground.executor.next_due(self._pool_name)
        if due_s is not None:
            self.wake_at(due_s)
        retry_at = self._refusals.next_retry_at()
        if retry_at is not None:
            self.wake_at(loop.time() + retry_at - self._clock())

    # -- telling ----------------------------------------------------------------------------------

    def _tell(self, world: World, plan: Plan) -> None:
        for adapter in world.adapters:
            if not adapter.is_deleted:
                self._tell_adapter(adapter, verdict(adapter, world, plan))
        self._tell_pool(world.pool, pool_verdict(world, plan))
        self._forget_statuses(_keys(world.adapters))

    def _tell_without_pool(self, adapters: tuple[Adapter, ...], pool: Unreadable | None) -> None:
        namespace = self._ground.cluster.namespace
        for adapter in adapters:
            if not adapter.is_deleted:
                self._tell_adapter(
                    adapter,
                    without_pool(adapter, namespace)
                    if pool is None
                    else of_unreadable_pool(adapter, pool),
                )
        if pool is not None:
            self._tell_pool(pool, of_unreadable(pool))
        self._forget_statuses(_keys(adapters))

    def _tell_pool(self, pool: ServingPool | Unreadable, found: PoolVerdict) -> None:
        self._ground.statuses.put(
            self._pool_key,
            pool.metadata.resource_version,
            found,
            lambda: self._ground.writer.write_pool(pool.metadata, found),
        )

    def _tell_adapter(self, adapter: Adapter, found: AdapterVerdict) -> None:
        key = adapter.metadata.key
        self._ground.conditions[key] = found.conditions
        self._ground.statuses.put(
            f"adapter {key}",
            adapter.metadata.resource_version,
            found,
            lambda: self._ground.writer.write_adapter(adapter.metadata, found),
        )
        before = self._reasons.get(key)
        self._reasons[key] = found.reason
        if before != found.reason:
            self._note_event(adapter, found, is_first=before is None)

    def _note_event(self, adapter: Adapter, found: AdapterVerdict, *, is_first: bool) -> None:
        ready = next(each for each in found.conditions if each.type == "Ready")
        if ready.reason == "Loading" or (is_first and ready.status == "True"):
            # It is on its way, or as it was before this operator began to lead.
            return
        self._ground.events.note(
            adapter,
            "Adapter",
            "Warning" if ready.status == "False" else "Normal",
            ready.reason,
            ready.message,
        )

    def _forget_statuses(self, keys: frozenset[str]) -> None:
        for key in self._reasons.keys() - keys:
            del self._reasons[key]
            self._ground.conditions.pop(key, None)
            self._ground.statuses.forget(f"adapter {key}")
            self._ground.writer.forget(ADAPTERS, key)

    # -- being told -------------------------------------------------------------------------------

    def replica(self, load_only: bool) -> None:
        """A pod of the pool has said something new; ``load_only``: of load alone."""
        if not load_only:
            self.wake()
        elif self._goes_by_load:
            self.wake_at(asyncio.get_running_loop().time() + LOAD_S)

    def _done(self, outcome: Outcome) -> None:
        error = outcome.error
        refused = None
        if error is not None:
            refused = error.status if isinstance(error, ControlError | KubeError) else 0
        kind = type(outcome.action).__name__
        self._ground.metrics.acted(kind, outcome.seconds, refused)
        self.wake()


def _keys(adapters: Iterable[Adapter]) -> frozenset[str]:
    return frozenset(adapter.metadata.key for adapter in adapters if not adapter.is_deleted)
