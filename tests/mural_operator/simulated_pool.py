"""A pool in memory: pods with limits that load, refuse, are slow and die, and declared objects.

What `reconcile` decides is applied to it; what it then shows is what `reconcile` is told next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from mural_operator.owners import Owners
from mural_operator.reconcile import (
    FINALIZER,
    Action,
    AddFinalizer,
    Declare,
    Forget,
    Load,
    Plan,
    Prefetch,
    RemoveFinalizer,
    Unload,
    Warm,
    reconcile,
)
from mural_operator.world import Pod, Refusal, World
from mural_resolvers.kubernetes.objects import (
    Adapter,
    Placement,
    ServingPool,
    read_adapter,
    read_pool,
)
from mural_server.protocol import AdapterStatus, Base, Limits, PrefixStatistics, Snapshot
from mural_server.protocol import Load as Busy

EPOCH = datetime(2026, 1, 1, tzinfo=UTC)
DIGEST = "d" * 64
BASE = Base(model_names=("tiny",), spec_hash="spec")


def make_limits(**more: int) -> Limits:
    fields = {
        "slots": 4,
        "max_cpu_loras": 16,
        "host_bytes": 0,
        "max_lora_rank": 16,
        "max_num_seqs": 8,
        "max_model_len": 1024,
    }
    return Limits(**(fields | more))


def make_pool(**spec: object) -> ServingPool:
    return read_pool(
        {
            "metadata": {"name": "pool", "namespace": "mural"},
            "spec": {"selector": {"matchLabels": {"app": "server"}}, **spec},
        }
    )


def make_adapter(name: str, created_s: float = 0, **spec: object) -> Adapter:
    """An object ``name`` that declares ``acme:<name>``, unless the spec says otherwise."""
    read = read_adapter(
        {
            "metadata": {"name": name, "namespace": "team", "uid": f"uid-{name}-{created_s}"},
            "spec": {"pool": "pool", "tenant": "acme", "version": name, **spec},
        }
    )
    created = EPOCH + timedelta(seconds=created_s)
    return msgspec.structs.replace(
        read, metadata=msgspec.structs.replace(read.metadata, creation_timestamp=created)
    )


def make_status(name: str, **more: Any) -> AdapterStatus:
    fields: dict[str, Any] = {
        "name": name,
        "digest": DIGEST,
        "level": "host",
        "rank": 8,
        "bytes": 10,
    }
    return AdapterStatus(**(fields | more))


def make_state(*names: str | AdapterStatus, declared: Iterable[str] = (), **more: Any) -> Snapshot:
    held = [make_status(each, pinned=True) if isinstance(each, str) else each for each in names]
    fields: dict[str, Any] = {
        "boot_id": "boot",
        "seq": 0,
        "base": BASE,
        "limits": make_limits(),
        "load": Busy(),
        "prefix": PrefixStatistics(),
        "accepting": True,
        "ready": True,
        "declared": tuple(sorted(declared)),
        "adapters": {each.name: each for each in held},
    }
    return Snapshot(**(fields | more))


def make_world(
    adapters: Iterable[Adapter],
    pods: Iterable[Pod],
    *,
    pool: ServingPool | None = None,
    namespaces: Mapping[str, frozenset[str]] | None = None,
    **more: Any,
) -> World:
    allowed = {"acme": frozenset({"team"})} if namespaces is None else namespaces
    return World(
        pool or make_pool(),
        tuple(adapters),
        tuple(sorted(pods, key=lambda pod: pod.name)),
        **({"owners": Owners(allowed)} | more),
    )


@dataclass
class SimulatedPod:
    """One pod, as it is and not as it is seen."""

    name: str
    limits: Limits = field(default_factory=make_limits)
    base: Base = BASE
    labels: dict[str, str] = field(default_factory=dict)
    boot: int = 0
    heard: bool = True
    terminating: bool = False
    slow: bool = False
    """Loads take until the next tick, drains until the one after."""
    latched: bool = False
    """Whether its declared set was resident once."""
    told: bool = False
    """Whether it was told a declared set."""
    ready: bool = False
    """As the API server says it."""
    declared: frozenset[str] = frozenset()
    held: dict[str, AdapterStatus] = field(default_factory=dict)
    draining: set[str] = field(default_factory=set)
    refuses: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, Refusal] = field(default_factory=dict)

    def restart(self) -> None:
        """Its process dies: it comes back with nothing."""
        self.boot += 1
        self.latched = self.told = self.ready = False
        self.declared = frozenset()
        self.held, self.refusals = {}, {}
        self.draining = set()

    def seen(self) -> Pod:
        state = Snapshot(
            boot_id=f"{self.name}-{self.boot}",
            seq=0,
            base=self.base,
            limits=self.limits,
            load=Busy(),
            prefix=PrefixStatistics(),
            accepting=not self.terminating,
            ready=self.latched,
            awaits_declared=not self.told and not self.latched,
            declared=tuple(sorted(self.declared)),
            adapters=dict(self.held),
        )
        return Pod(
            self.name,
            labels=self.labels,
            ready=self.ready,
            terminating=self.terminating,
            state=state if self.heard else None,
            refusals=dict(self.refusals),
        )

    def tick(self) -> None:
        for name in sorted(self.draining):
            self.held.pop(name, None)
        self.draining = set()
        for name, status in self.held.items():
            self.held[name] = msgspec.structs.replace(status, loading=False)
        self.ready = self.latched
        resident = {name for name, status in self.held.items() if not status.loading}
        self.latched = self.latched or (self.told and self.declared <= resident)

    def load(self, action: Load, rank: int, size: int) -> int:
        """The status that it answers."""
        if action.name in self.refuses:
            return self.refuses[action.name]
        if rank > self.limits.max_lora_rank:
            return 422
        others = {n: s for n, s in self.held.items() if n != action.name and s.pinned}
        if len(others) >= self.limits.max_cpu_loras:
            return 503
        total = size + sum(status.bytes for status in others.values())
        if self.limits.host_bytes and total > self.limits.host_bytes:
            return 503
        if action.name in self.draining:
            return 503
        known = action.name in self.held
        self.held[action.name] = make_status(
            action.name,
            level=action.level,
            pinned=action.pinned,
            rank=rank,
            bytes=size,
            loading=self.slow and not known,
        )
        return 200


class SimulatedPool:
    """The pods, the objects and the time."""

    def __init__(self, pool: ServingPool | None = None) -> None:
        self.pool = pool or make_pool()
        self.pods: dict[str, SimulatedPod] = {}
        self.objects: dict[str, Adapter] = {}
        self.now_s = 0.0
        self.sizes: dict[str, int] = {}
        self.ranks: dict[str, int] = {}
        self.unloaded: list[tuple[str, str]] = []

    @property
    def now(self) -> float:
        return EPOCH.timestamp() + self.now_s

    def add_pod(self, name: str, **more: Any) -> SimulatedPod:
        self.pods[name] = SimulatedPod(name, **more)
        return self.pods[name]

    def declare(self, adapter: Adapter) -> None:
        self.objects[adapter.metadata.key] = adapter

    def delete(self, key: str) -> None:
        adapter = self.objects[key]
        if FINALIZER not in adapter.metadata.finalizers:
            del self.objects[key]
        elif not adapter.is_deleted:
            self._meta(key, deletion_timestamp=EPOCH + timedelta(seconds=self.now_s))

    def change(self, key: str, placement: Placement) -> None:
        adapter = self.objects.get(key)
        if adapter is not None:
            spec = msgspec.structs.replace(adapter.spec, placement=placement)
            self.objects[key] = msgspec.structs.replace(adapter, spec=spec)

    def _meta(self, key: str, **changes: object) -> None:
        adapter = self.objects[key]
        metadata = msgspec.structs.replace(adapter.metadata, **changes)
        self.objects[key] = msgspec.structs.replace(adapter, metadata=metadata)

    def world(self) -> World:
        pods = [pod.seen() for pod in self.pods.values()]
        return make_world(self.objects.values(), pods, pool=self.pool)

    def plan(self) -> Plan:
        return reconcile(self.world(), self.now)

    def tick(self, seconds: float = 0.1) -> None:
        self.now_s += seconds
        for pod in self.pods.values():
            pod.tick()

    def settle(self, rounds: int = 60) -> Plan:
        """Act until nothing is left to do; time stands nearly still."""
        for _ in range(rounds):
            before = self.world()
            plan = self.plan()
            self.apply_all(plan.actions)
            self.tick()
            if not plan.actions and self.world() == before:
                return plan
        raise AssertionError(f"no end after {rounds} rounds: {self.plan().actions}")

    def apply_all(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self.apply(action)

    def apply(self, action: Action) -> None:
        match action:
            case AddFinalizer(adapter=adapter):
                if adapter.metadata.key in self.objects:
                    self._meta(adapter.metadata.key, finalizers=(FINALIZER,))
            case RemoveFinalizer(adapter=adapter):
                self.objects.pop(adapter.metadata.key, None)
            case Warm() | Forget() | Prefetch():
                raise AssertionError("no pod here is of vLLM, and nothing is prewarmed")
            case _:
                pod = self.pods.get(action.pod)
                if pod is not None and pod.heard and not pod.terminating:
                    self._on_pod(pod, action)

    def _on_pod(self, pod: SimulatedPod, action: Load | Unload | Declare) -> None:
        match action:
            case Declare(names=names):
                pod.declared, pod.told = frozenset(names), True
            case Unload(name=name):
                self.unloaded.append((pod.name, name))
                if pod.slow and name in pod.held:
                    pod.draining.add(name)
                else:
                    pod.held.pop(name, None)
            case Load(name=name):
                size, rank = self.sizes.get(name, 10), self.ranks.get(name, 8)
                status = pod.load(action, rank, size)
                if status == 200:
                    pod.refusals.pop(name, None)
                    self._learn(name, size)
                else:
                    pod.refusals[name] = Refusal(status, "as simulated", self.now + 60)

    def _learn(self, exact: str, size: int) -> None:
        """As the operator's status writer does."""
        for key, adapter in self.objects.items():
            if adapter.exact == exact:
                status = msgspec.structs.replace(adapter.status, bytes=size)
                self.objects[key] = msgspec.structs.replace(adapter, status=status)


__all__ = [
    "DIGEST",
    "EPOCH",
    "SimulatedPod",
    "SimulatedPool",
    "make_adapter",
    "make_limits",
    "make_pool",
    "make_state",
    "make_status",
    "make_world",
]
