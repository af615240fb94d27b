"""What the API server has of everything that the operator acts on, and who is woken by a change."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import msgspec

from mural_operator.metrics import Freshness
from mural_operator.replicas import Target
from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.objects import (
    Adapter,
    AdapterAlias,
    ObjectMeta,
    ServingPool,
    Tenant,
    TenantSpec,
    read_adapter,
    read_alias,
    read_pool,
    read_tenant,
)
from mural_resolvers.kubernetes.paths import (
    ADAPTER_ALIASES,
    ADAPTERS,
    PODS,
    SERVING_POOLS,
    TENANTS,
    Resource,
)
from mural_resolvers.kubernetes.tenants import namespaces_of
from mural_resolvers.kubernetes.watch import Watch, from_json

__all__ = [
    "Cluster",
    "KubePod",
    "Unreadable",
    "UnreadableTenant",
    "Wakes",
    "read_adapter_or_not",
    "read_pod",
    "read_tenant_or_not",
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


@dataclass(frozen=True, slots=True)
class Unreadable:
    """An Adapter that a schema of another day let through. Its end must not wait for ours."""

    metadata: ObjectMeta
    pool: str
    """Empty: it does not say."""
    message: str


@dataclass(frozen=True, slots=True)
class UnreadableTenant:
    """A Tenant of which not all can be read: who it is and where it may declare still holds, so
    that its adapters stay and no younger object takes its place."""

    tenant: Tenant
    """No more than that."""
    message: str


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
        self.namespaces: Mapping[str, frozenset[str]] = {}
        """By tenant, those that may declare its adapters and aliases."""
        self._adapters = [
            Watch(client, path, read_adapter_or_not, what=f"adapters{where}")
            for path, where in _paths(ADAPTERS, watched)
        ]
        self._aliases = [
            Watch(client, path, from_json(read_alias), what=f"adapter aliases{where}")
            for path, where in _paths(ADAPTER_ALIASES, watched)
        ]
        self._pools = Watch(
            client, SERVING_POOLS.of(namespace), from_json(read_pool), what="serving pools"
        )
        self._tenants = Watch(client, TENANTS.of(namespace), read_tenant_or_not, what="tenants")
        self._pods = Watch(client, PODS.of(namespace), read_pod, what="pods")
        self._by_pool = _ByPool()
        self._members: dict[str, tuple[KubePod, ...]] = {}
        self._at_door: dict[tuple[str, int, int], KubePod] = {}
        """The youngest pod of any pool at an address and its ports."""
        self._told: list[Wakes] = []
        self._synced = asyncio.Event()

    # -- what is there ----------------------------------------------------------------------------

    @property
    def pools(self) -> dict[str, ServingPool]:
        """By name."""
        return {pool.metadata.name: pool for pool in self._pools.objects.values()}

    @property
    def pool_names(self) -> frozenset[str]:
        """Of the pools, and of those that adapters name although there is none."""
        return frozenset(self.pools) | self._by_pool.names

    def pool(self, name: str) -> ServingPool | None:
        """One pool; None: there is none of the name, or none that can be read."""
        return self._pools.objects.get(f"{self.namespace}/{name}")

    def adapters_of(self, pool: str) -> tuple[Adapter, ...]:
        """Those that name a pool and can be read, by key."""
        return tuple(each for each in self._by_pool.of(pool) if isinstance(each, Adapter))

    def unreadable_of(self, pool: str) -> tuple[Unreadable, ...]:
        """Those that name a pool and cannot be read. Those that name none are of every pool."""
        return tuple(
            each
            for which in {pool, ""}
            for each in self._by_pool.of(which)
            if isinstance(each, Unreadable)
        )

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """All that can be read."""
        return tuple(
            each
            for watch in self._adapters
            for each in watch.objects.values()
            if isinstance(each, Adapter)
        )

    @property
    def aliases(self) -> tuple[AdapterAlias, ...]:
        """All that can be read."""
        return tuple(each for watch in self._aliases for each in watch.objects.values())

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """All that can be read."""
        return tuple(each for each in self._tenants.objects.values() if isinstance(each, Tenant))

    @property
    def unreadable_tenants(self) -> tuple[UnreadableTenant, ...]:
        """The others."""
        every = self._tenants.objects.values()
        return tuple(each for each in every if isinstance(each, UnreadableTenant))

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
            group.create_task(self._pods.run(self._changed(lambda _: self._assign())))

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

    def _adapter_of(self, watch: Watch[Adapter | Unreadable]) -> Callable[[str | None], None]:
        def look(key: str | None) -> None:
            if key is None:
                self._by_pool.replace(
                    each for one in self._adapters for each in one.objects.values()
                )
                self._wake_pool("")
            else:
                for pool in self._by_pool.put(key, watch.objects.get(key)):
                    self._wake_pool(pool)
            self._wake_aliases()

        return look

    def _pool(self, key: str | None) -> None:
        self._assign()
        # The pool itself may be new, or gone.
        self._wake_pool("" if key is None else key.partition("/")[2])

    def _tenant(self, key: str | None) -> None:
        known = (*self.tenants, *(each.tenant for each in self.unreadable_tenants))
        before, self.namespaces = self.namespaces, namespaces_of(known)
        for each in self._told:
            each.tenants()
        if self.namespaces != before:
            self._wake_pool("")
            self._wake_aliases()

    def _assign(self) -> None:
        """Give each pod to the oldest pool that selects it: two would undo each other's work."""
        members: dict[str, list[KubePod]] = {}
        doors: dict[tuple[str, int, int], KubePod] = {}
        pools = sorted(self._pools.objects.values(), key=lambda pool: pool.metadata.age)
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


class _ByPool:
    """Adapters by the pool that they name."""

    def __init__(self) -> None:
        self._pool: dict[str, str] = {}
        self._objects: dict[str, dict[str, Adapter | Unreadable]] = {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._objects) - {""}

    def of(self, pool: str) -> list[Adapter | Unreadable]:
        found = self._objects.get(pool, {})
        return [found[key] for key in sorted(found)]

    def replace(self, objects: Iterable[Adapter | Unreadable]) -> None:
        self._pool.clear()
        self._objects.clear()
        for each in objects:
            self.put(each.metadata.key, each)

    def put(self, key: str, found: Adapter | Unreadable | None) -> set[str]:
        """The pools whose adapters have changed."""
        pools = set()
        before = self._pool.pop(key, None)
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


class _Names(msgspec.Struct):
    pool: str = ""


class _Any(msgspec.Struct):
    metadata: ObjectMeta
    spec: _Names = msgspec.field(default_factory=_Names)


class _Meta(msgspec.Struct):
    metadata: ObjectMeta


def read_adapter_or_not(data: bytes) -> Adapter | Unreadable:
    """Read an Adapter's JSON; raise ValueError where not even its metadata can be read."""
    fields: object = msgspec.json.decode(data)
    try:
        return read_adapter(fields)
    except MuralError as error:
        try:
            named = msgspec.convert(fields, _Any)
        except msgspec.ValidationError:
            # Not even the name of a pool is one.
            metadata = msgspec.convert(fields, _Meta).metadata
            return Unreadable(metadata, "", error.message)
        return Unreadable(named.metadata, named.spec.pool, error.message)


class _Owner(msgspec.Struct):
    tenant: str | None = None
    namespaces: tuple[str, ...] = ()


class _OwnerOnly(msgspec.Struct):
    metadata: ObjectMeta
    spec: _Owner = msgspec.field(default_factory=_Owner)


def read_tenant_or_not(data: bytes) -> Tenant | UnreadableTenant:
    """Read a Tenant's JSON; raise ValueError where not even who it is can be read."""
    fields: object = msgspec.json.decode(data)
    try:
        return read_tenant(fields)
    except MuralError as error:
        found = msgspec.convert(fields, _OwnerOnly)
        spec = TenantSpec(tenant=found.spec.tenant, namespaces=found.spec.namespaces)
        return UnreadableTenant(Tenant(found.metadata, spec), error.message)


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
