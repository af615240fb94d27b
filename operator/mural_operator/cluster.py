"""What the API server has of everything that the operator acts on, and who is woken by a change."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, Generic, TypeVar

import msgspec

from mural_operator.metrics import Freshness
from mural_operator.owners import Owners, owners
from mural_operator.replicas import Target
from mural_operator.unreadable import (
    LastReadable,
    Outdated,
    Unreadable,
    UnreadableAdapter,
    UnreadableTenant,
    read_adapter_or_not,
    read_alias_or_not,
    read_pool_or_not,
    read_tenant_or_not,
)
from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.objects import (
    Adapter,
    AdapterAlias,
    ObjectMeta,
    ServingPool,
    Tenant,
)
from mural_resolvers.kubernetes.paths import (
    ADAPTER_ALIASES,
    ADAPTERS,
    PODS,
    SERVING_POOLS,
    TENANTS,
    Resource,
)
from mural_resolvers.kubernetes.watch import Watch

__all__ = [
    "Cluster",
    "KubePod",
    "Wakes",
    "read_pod",
]

ENDED: Final = frozenset({"Succeeded", "Failed"})

T = TypeVar("T")


class Wakes(ABC):
    """Who is told that something may have to be done."""

    @abstractmethod
    def pools(self) -> None:
        """All of them; some may be new or gone."""

    @abstractmethod
    def pool(self, name: str) -> None:
        """One: an adapter of it, a pod of it, or itself has changed."""

    @abstractmethod
    def tenants(self) -> None:
        """A Tenant has changed."""

    @abstractmethod
    def aliases(self) -> None:
        """An AdapterAlias, or an Adapter that one may stand for, has changed."""


class KubePod(msgspec.Struct, frozen=True):
    """A pod, as far as it is of use."""

    metadata: ObjectMeta
    address: str = ""
    """Empty: it has none yet."""
    ready: bool = False
    ended: bool = False
    """Whether it runs no more, and stays as a record alone."""

    @property
    def terminating(self) -> bool:
        """Whether it has been told to end."""
        return self.metadata.deletion_timestamp is not None


class Cluster:
    """The watches, each kept for ever; `run` dies when one of them does.

    Pools, tenants and pods are of the operator's own namespace, adapters and aliases of those that
    are ``watched`` (None: of every one).
    """

    def __init__(self, client: KubeClient, namespace: str, watched: tuple[str, ...] | None) -> None:
        self.namespace = namespace
        self.owners = Owners({})
        """Which namespaces may declare adapters."""
        self._adapters = [
            Watch(client, path, read_adapter_or_not, what=f"adapters{where}")
            for path, where in _paths(ADAPTERS, watched)
        ]
        self._aliases = [
            Watch(client, path, read_alias_or_not, what=f"adapter aliases{where}")
            for path, where in _paths(ADAPTER_ALIASES, watched)
        ]
        self._pools = Watch(
            client, SERVING_POOLS.of(namespace), read_pool_or_not, what="serving pools"
        )
        self._tenants = Watch(client, TENANTS.of(namespace), read_tenant_or_not, what="tenants")
        self._pods = Watch(client, PODS.of(namespace), read_pod, what="pods")
        self._last_adapters: LastReadable[Adapter] = LastReadable()
        self._last_pools: LastReadable[ServingPool] = LastReadable()
        self._last_tenants: LastReadable[Tenant] = LastReadable()
        self.pools: dict[str, ServingPool] = {}
        """By name, as they are, or were when they could last be read; so adapters and tenants."""
        self.outdated_pools: dict[str, Outdated] = {}
        """By name, those that stand as they were."""
        self.tenants: tuple[Tenant, ...] = ()
        self.outdated_tenants: dict[str, Outdated] = {}
        """By key; so the adapters."""
        self.outdated_adapters: dict[str, Outdated] = {}
        self._by_pool = _ByPool()
        self.complete = True
        """Whether all that is declared is known. Else what no adapter wants may be wanted by one
        that cannot be read, or by those of a pool that cannot."""
        self._members: dict[str, tuple[KubePod, ...]] = {}
        self._at_door: dict[tuple[str, int, int], KubePod] = {}
        """The youngest pod of any pool at an address and its ports."""
        self._seen_pods: dict[str, KubePod] = {}
        self._told: list[Wakes] = []
        self._synced = asyncio.Event()

    # -- what is there ----------------------------------------------------------------------------

    @property
    def pool_names(self) -> frozenset[str]:
        """Of the pools, and of those that adapters name although there is none."""
        there = (pool.metadata.name for pool in self._pools.objects.values())
        return frozenset(there) | self._by_pool.names

    def pool(self, name: str) -> ServingPool | Unreadable | None:
        """One pool; `Unreadable`: it never could be read; None: there is none of the name."""
        if name in self.pools:
            return self.pools[name]
        return self._pools.objects.get(f"{self.namespace}/{name}")

    def adapters_of(self, pool: str) -> tuple[Adapter, ...]:
        """Those that name a pool, by key."""
        return tuple(each for each in self._by_pool.of(pool) if isinstance(each, Adapter))

    def unreadable_of(self, pool: str) -> tuple[UnreadableAdapter, ...]:
        """Those that name a pool and never could be read. Those that name none are of every
        pool."""
        return tuple(
            each
            for which in {pool, ""}
            for each in self._by_pool.of(which)
            if isinstance(each, UnreadableAdapter)
        )

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All but those that never could be read."""
        return self._by_pool.adapters

    @property
    def unreadable_adapters(self) -> tuple[UnreadableAdapter, ...]:
        """Those."""
        return self._by_pool.unreadable

    @property
    def aliases(self) -> tuple[AdapterAlias, ...]:
        """All that can be read."""
        return tuple(each for each in self._every_alias() if isinstance(each, AdapterAlias))

    @property
    def unreadable_aliases(self) -> tuple[Unreadable, ...]:
        """The others."""
        return tuple(each for each in self._every_alias() if isinstance(each, Unreadable))

    @property
    def unreadable_tenants(self) -> tuple[UnreadableTenant, ...]:
        """Those that never could be read."""
        return tuple(
            each
            for key, each in self._tenants.objects.items()
            if isinstance(each, UnreadableTenant) and key not in self.outdated_tenants
        )

    def pods_of(self, pool: str) -> tuple[KubePod, ...]:
        """The pods of a pool, by name: those that its labels select and no older pool does."""
        return self._members.get(pool, ())

    def targets(self, pool: ServingPool) -> tuple[Target, ...]:
        """Where the pods of a pool are spoken to; one that has no address of its own is not among
        them: the address of a pod that died with its node may be another one's already."""
        spec = pool.spec
        return tuple(
            Target(
                pod=pod.metadata.name,
                uid=pod.metadata.uid,
                host=pod.address,
                port=spec.port,
                control_port=spec.control_port,
                engine=spec.engine,
            )
            for pod in self.pods_of(pool.metadata.name)
            if pod.address and self._at_door[_door(pool, pod)] is pod
        )

    @property
    def watches(self) -> Mapping[str, Freshness]:
        """Whether each kind of objects is known, and known to be so now."""
        return {
            "adapters": _Kind(self._adapters),
            "adapteraliases": _Kind(self._aliases),
            "servingpools": _Kind([self._pools]),
            "tenants": _Kind([self._tenants]),
            "pods": _Kind([self._pods]),
        }

    # -- the life ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep all of it, for ever."""
        async with asyncio.TaskGroup() as group:
            for watch in self._adapters:
                group.create_task(watch.run(self._changed(self._adapter_of(watch))))
            for aliases in self._aliases:
                group.create_task(aliases.run(self._changed(lambda _: self._wake_aliases())))
            group.create_task(self._pools.run(self._changed(self._pool)))
            group.create_task(self._tenants.run(self._changed(self._tenant)))
            group.create_task(self._pods.run(self._changed(self._pod)))

    @property
    def is_synced(self) -> bool:
        """Whether each kind was listed once."""
        return self._synced.is_set()

    async def synced(self) -> None:
        """Wait until each kind was listed once: what is missing then does not exist."""
        await self._synced.wait()

    def tell(self, wakes: Wakes) -> None:
        """Tell it, too, from now on."""
        self._told.append(wakes)

    def tell_no_more(self, wakes: Wakes) -> None:
        """Tell it nothing more."""
        self._told.remove(wakes)

    def _changed(self, look: Callable[[str | None], None]) -> Callable[[str | None], None]:
        def changed(key: str | None) -> None:
            look(key)
            if not self._synced.is_set() and all(kind.synced for kind in self.watches.values()):
                self._synced.set()

        return changed

    def _adapter_of(
        self, watch: Watch[Adapter | UnreadableAdapter]
    ) -> Callable[[str | None], None]:
        def look(key: str | None) -> None:
            if key is None:
                self._take_adapters()
                self._wake_pool("")
            else:
                for pool in self._put_adapter(key, watch):
                    self._wake_pool(pool)
            self._judge_completeness()
            self._wake_aliases()

        return look

    def _every_alias(self) -> Iterator[AdapterAlias | Unreadable]:
        for watch in self._aliases:
            yield from watch.objects.values()

    def _take_adapters(self) -> None:
        found = {key: each for watch in self._adapters for key, each in watch.objects.items()}
        unseen = {key for watch in self._adapters for key in watch.invalid}
        self._last_adapters.keep(found.keys() | unseen)
        self.outdated_adapters.clear()
        self._by_pool.replace(self._standing(each) for each in found.values())

    def _put_adapter(self, key: str, watch: Watch[Adapter | UnreadableAdapter]) -> set[str]:
        found = watch.objects.get(key)
        if found is not None:
            return self._by_pool.put(key, self._standing(found))
        self.outdated_adapters.pop(key, None)
        if key not in watch.invalid:
            self._last_adapters.drop(key)
        return self._by_pool.put(key, None)

    def _standing(self, found: Adapter | UnreadableAdapter) -> Adapter | UnreadableAdapter:
        """An adapter as it is acted upon, which its last change may have left as it was."""
        key, last = found.metadata.key, self._last_adapters.take(found)
        if not isinstance(found, UnreadableAdapter) or last is None:
            self.outdated_adapters.pop(key, None)
            return found
        self.outdated_adapters[key] = Outdated(last.metadata.generation, found.message)
        return Adapter(found.metadata, last.spec, found.status)

    def _pool(self, key: str | None) -> None:
        self._last_pools.keep(self._pools.objects.keys() | self._pools.invalid.keys())
        self.pools, self.outdated_pools = {}, {}
        for found in self._pools.objects.values():
            name, last = found.metadata.name, self._last_pools.take(found)
            if last is not None:
                self.pools[name] = ServingPool(found.metadata, last.spec)
            if isinstance(found, Unreadable) and last is not None:
                self.outdated_pools[name] = Outdated(last.metadata.generation, found.message)
        self._assign()
        # The pool itself may be new, or gone.
        self._wake_pool("" if key is None else key.partition("/")[2])
        self._judge_completeness()

    def _judge_completeness(self) -> None:
        complete = (
            len(self.pools) == len(self._pools.objects)
            and not self._by_pool.unreadable
            and not self._pools.invalid
            and not any(watch.invalid for watch in self._adapters)
        )
        if complete != self.complete:
            self.complete = complete
            # It is so for every pool.
            self._wake_pool("")

    def _tenant(self, key: str | None) -> None:
        self._last_tenants.keep(self._tenants.objects.keys() | self._tenants.invalid.keys())
        standing, self.outdated_tenants = [], {}
        for found in self._tenants.objects.values():
            last = self._last_tenants.take(found)
            if last is not None:
                standing.append(Tenant(found.metadata, last.spec))
            if isinstance(found, UnreadableTenant) and last is not None:
                generation = last.metadata.generation
                self.outdated_tenants[found.metadata.key] = Outdated(generation, found.message)
        self.tenants = tuple(standing)
        before = self.owners
        self.owners = owners(
            self.tenants,
            before.last,
            outdated=self.outdated_tenants.keys(),
            unreadable=self.unreadable_tenants,
            complete=not self._tenants.invalid,
        )
        for each in self._told:
            each.tenants()
        if self.owners != before:
            self._wake_pool("")
        self._wake_aliases()

    def _pod(self, key: str | None) -> None:
        """Most of what changes in a namespace is none of ours, or nothing that is of use here."""
        if key is not None:
            before, now = self._seen_pods.pop(key, None), self._pods.objects.get(key)
            if now is not None:
                self._seen_pods[key] = now
            pools = self.pools.values()
            ours = any(_selects(pool, pod) for pod in (before, now) if pod for pool in pools)
            if before == now or not ours:
                return
        else:
            self._seen_pods = dict(self._pods.objects)
        self._assign()

    def _assign(self) -> None:
        """Give each pod to the oldest pool that selects it: two would undo each other's work."""
        members: dict[str, list[KubePod]] = {}
        doors: dict[tuple[str, int, int], KubePod] = {}
        pools = sorted(self.pools.values(), key=lambda pool: pool.metadata.age)
        for pod in sorted(self._pods.objects.values(), key=lambda pod: pod.metadata.name):
            owner = next((pool for pool in pools if _selects(pool, pod)), None)
            if owner is not None and not pod.ended:
                members.setdefault(owner.metadata.name, []).append(pod)
                door = _door(owner, pod)
                doors[door] = max(pod, doors.get(door, pod), key=lambda one: one.metadata.age)
        self._at_door = doors
        before = self._members
        self._members = {name: tuple(pods) for name, pods in members.items()}
        for name in before.keys() | self._members.keys():
            if before.get(name) != self._members.get(name):
                self._wake_pool(name)

    def _wake_pool(self, name: str) -> None:
        """One pool, or all of them where there is no name."""
        for each in self._told:
            if name:
                each.pool(name)
            else:
                each.pools()

    def _wake_aliases(self) -> None:
        for each in self._told:
            each.aliases()


class _Kind(Generic[T]):
    """The watches of one kind as one."""

    def __init__(self, watches: Iterable[Watch[T]]) -> None:
        self._watches = tuple(watches)

    @property
    def synced(self) -> bool:
        """Whether each was listed once."""
        return all(watch.synced for watch in self._watches)

    @property
    def fresh(self) -> bool:
        """Whether each is watched now."""
        return all(watch.fresh for watch in self._watches)

    @property
    def trouble(self) -> str:
        """Why one is not; empty: each is."""
        return next((watch.trouble for watch in self._watches if watch.trouble), "")


class _ByPool:
    """Adapters by the pool that they name."""

    def __init__(self) -> None:
        self._pool: dict[str, str] = {}
        self._objects: dict[str, dict[str, Adapter | UnreadableAdapter]] = {}
        self._unreadable: dict[str, UnreadableAdapter] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._objects) - {""}

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        return tuple(
            each
            for found in self._objects.values()
            for each in found.values()
            if isinstance(each, Adapter)
        )

    @property
    def unreadable(self) -> tuple[UnreadableAdapter, ...]:
        return tuple(self._unreadable.values())

    def of(self, pool: str) -> list[Adapter | UnreadableAdapter]:
        found = self._objects.get(pool, {})
        return [found[key] for key in sorted(found)]

    def replace(self, objects: Iterable[Adapter | UnreadableAdapter]) -> None:
        self._pool.clear()
        self._objects.clear()
        self._unreadable.clear()
        for each in objects:
            self.put(each.metadata.key, each)

    def put(self, key: str, found: Adapter | UnreadableAdapter | None) -> set[str]:
        """The pools whose adapters have changed."""
        pools = set()
        before = self._pool.pop(key, None)
        self._unreadable.pop(key, None)
        if before is not None:
            pools.add(before)
            del self._objects[before][key]
            if not self._objects[before]:
                del self._objects[before]
        if found is not None:
            pool = found.spec.pool if isinstance(found, Adapter) else found.pool
            pools.add(pool)
            self._pool[key] = pool
            self._objects.setdefault(pool, {})[key] = found
            if isinstance(found, UnreadableAdapter):
                self._unreadable[key] = found
        return pools


def _paths(resource: Resource, watched: tuple[str, ...] | None) -> list[tuple[str, str]]:
    if watched is None:
        return [(resource.all(), "")]
    return [(resource.of(namespace), f" of {namespace}") for namespace in watched]


def _door(pool: ServingPool, pod: KubePod) -> tuple[str, int, int]:
    """Where something listens. Of a node's own address more than one pod may make use."""
    return (pod.address, pool.spec.port, pool.spec.control_port)


def _selects(pool: ServingPool, pod: KubePod) -> bool:
    labels = pool.spec.selector.match_labels
    # Without a label it would be every pod of the namespace, this operator's too.
    return bool(labels) and all(
        pod.metadata.labels.get(key) == value for key, value in labels.items()
    )


# -- reading --------------------------------------------------------------------------------------


class _Condition(msgspec.Struct):
    type: str
    status: str


class _PodStatus(msgspec.Struct, rename={"pod_ip": "podIP"}):
    phase: str = ""
    pod_ip: str = ""
    conditions: tuple[_Condition, ...] = ()


class _Pod(msgspec.Struct):
    metadata: ObjectMeta
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


def read_pod(data: bytes) -> KubePod:
    """Read a pod's JSON; raise `InvalidInput`."""
    try:
        pod = msgspec.json.decode(data, type=_Pod)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"The object does not have a pod's form: {error}.") from None
    status = pod.status
    return KubePod(
        # What changes with every heartbeat of a node is no news.
        metadata=msgspec.structs.replace(pod.metadata, resource_version=""),
        address=status.pod_ip,
        ready=any(each.type == "Ready" and each.status == "True" for each in status.conditions),
        ended=status.phase in ENDED,
    )
