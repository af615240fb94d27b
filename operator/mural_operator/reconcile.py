"""From what is seen and what is declared to what is to be done: pure, whatever woke it up.

Nothing is remembered from one call to the next. What a replica holds is what it reports; what it
holds because of us is what it reports as declared, for it forgets both together when it dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from mural_operator.judge import Rejected, judge
from mural_operator.place import Places, place, room_of, size_of
from mural_operator.world import Pod, World
from mural_resolvers.kubernetes.objects import Adapter, Level
from mural_server.protocol import AdapterStatus

__all__ = [
    "FINALIZER",
    "Action",
    "AddFinalizer",
    "Declare",
    "Forget",
    "Load",
    "Plan",
    "Prefetch",
    "RemoveFinalizer",
    "Unload",
    "Warm",
    "reconcile",
    "release",
]

FINALIZER = "mural.dev/unload"
MAX_DRAIN_S = 120.0
"""A deleted object goes after this long whatever its replicas say: a finalizer that waits for a
machine which is gone would keep the namespace from going."""
MAX_SILENCE_S = 15.0
"""So long it waits for a replica that serves and is not heard, which may be one that this
operator has just begun to follow. What it holds still is found as an orphan."""


@dataclass(frozen=True, slots=True)
class Load:
    """Have a replica hold an adapter; idempotent there."""

    pod: str
    name: str
    digest: str | None
    """64 hexadecimal digits."""
    source: str | None
    """The one source that may be asked for it; None: those of the replica in their order."""
    level: Level
    pinned: bool


@dataclass(frozen=True, slots=True)
class Unload:
    """Have it drain and go from a replica; idempotent there."""

    pod: str
    name: str


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Have a replica that is no home keep the files on its disk, ready to be one."""

    pod: str
    name: str
    digest: str | None
    source: str | None


@dataclass(frozen=True, slots=True)
class Declare:
    """Tell a replica all that it must hold before it is ready."""

    pod: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Warm:
    """Have a vLLM pod resolve and load an adapter: one token is asked of it."""

    pod: str
    name: str


@dataclass(frozen=True, slots=True)
class Forget:
    """Have a vLLM pod unload an adapter and its name."""

    pod: str
    name: str


@dataclass(frozen=True, slots=True)
class AddFinalizer:
    """So that its deletion waits until it is drained."""

    adapter: Adapter


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    """Nothing of it is left anywhere that answers, or it has waited long enough."""

    adapter: Adapter


Action = Load | Unload | Prefetch | Declare | Warm | Forget | AddFinalizer | RemoveFinalizer


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do now, and on what grounds (for the statuses)."""

    actions: tuple[Action, ...]
    rejected: Mapping[str, Rejected]
    """By the object's key."""
    places: Mapping[str, Places]
    """By exact name, among the pods that serve."""
    coming: Mapping[str, Places]
    """By exact name, once the pods that start now serve too."""


def reconcile(world: World, now: float) -> Plan:
    """Decide for one pool; ``now`` in seconds since the epoch, for deadlines alone.

    Pods that serve get what is at home there now. Pods that start get what will be at home there,
    and only when they serve does it leave those that had it: routers see both at the same moment.

    For a world in which everything is as it should be there are no actions. What is given for
    another one may be done in any order and more than once.
    """
    return _Reconciliation(world, now).plan()


def release(adapters: Iterable[Adapter]) -> tuple[RemoveFinalizer, ...]:
    """What is to be done for objects whose pool does not exist: those that are deleted go."""
    return tuple(
        RemoveFinalizer(adapter)
        for adapter in adapters
        if adapter.is_deleted and FINALIZER in adapter.metadata.finalizers
    )


class _Reconciliation:
    """One call's."""

    def __init__(self, world: World, now: float) -> None:
        self._world = world
        self._now = now
        self._rejected = judge(world)
        self._wanted = {
            adapter.exact: adapter
            for adapter in world.adapters
            if not adapter.is_deleted and adapter.metadata.key not in self._rejected
        }
        self._doubtful = {
            adapter.exact
            for adapter in world.adapters
            if (why := self._rejected.get(adapter.metadata.key)) is not None and not why.is_certain
        } - self._wanted.keys()
        self._going = {
            adapter.exact
            for adapter in world.adapters
            if adapter.is_deleted
            and adapter.exact not in self._wanted
            and adapter.exact not in self._doubtful
        }
        self._places = place(self._wanted.values(), world, world.serving)
        self._coming = (
            self._places
            if world.coming is world.serving
            else place(self._wanted.values(), world, world.coming)
        )

    def plan(self) -> Plan:
        actions = [*self._finalizers()]
        for pod in self._world.pods:
            if pod.takes_actions:
                actions += self._on_pod(pod)
        return Plan(tuple(actions), self._rejected, self._places, self._coming)

    # -- objects ------------------------------------------------------------------------------

    def _finalizers(self) -> Iterator[Action]:
        for adapter in self._world.adapters:
            has_it = FINALIZER in adapter.metadata.finalizers
            if adapter.is_deleted:
                if has_it and self._is_gone(adapter):
                    yield RemoveFinalizer(adapter)
            elif not has_it and adapter.metadata.key not in self._rejected:
                yield AddFinalizer(adapter)

    def _is_gone(self, adapter: Adapter) -> bool:
        if adapter.exact not in self._going:
            return True  # Another object wants the same version: there is nothing to unload.
        deleted = adapter.metadata.deletion_timestamp
        waited = MAX_DRAIN_S if deleted is None else self._now - deleted.timestamp()
        if waited >= MAX_DRAIN_S:
            return True
        if waited < MAX_SILENCE_S and any(
            pod.ready and not pod.terminating and not pod.heard for pod in self._world.pods
        ):
            return False
        return not any(
            _is_to_go(pod, adapter.exact) for pod in self._world.pods if pod.takes_actions
        )

    # -- pods ---------------------------------------------------------------------------------

    @cached_property
    def _homes(self) -> dict[str, set[str]]:
        """The names at home on each pod: now where it serves, else when it will."""
        homes: dict[str, set[str]] = {pod.name: set() for pod in self._world.pods}
        serving = self._world.serving.accepting_names
        for name, found in self._places.items():
            for pod in found.pods:
                homes[pod].add(name)
        for name, found in self._coming.items():
            for pod in found.pods:
                if pod not in serving:
                    homes[pod].add(name)
        return homes

    def _on_pod(self, pod: Pod) -> Iterator[Action]:
        if pod.state is None:
            yield from self._on_vllm_pod(pod)
            return
        homes = self._homes[pod.name]
        leaving = self._leaving(pod, homes)
        declared = pod.state.declared
        names = {
            *(name for name in homes if name not in pod.refusals or pod.holds(name)),
            *leaving,
            # An admin's names, which belong to no tenant, are nobody's business here.
            *(name for name in declared if ":" not in name),
        }
        names.update(name for name in declared if self._may_be_wanted(name))
        if names != set(declared) or pod.state.awaits_declared:
            # First of all: what is loaded before it is declared would not be known as ours. And a
            # new pod that is to hold nothing waits to be told so.
            yield Declare(pod.name, tuple(sorted(names)))
        for name in sorted(homes):
            if self._needs_load(pod, name):
                yield _load(pod, self._wanted[name])
        for name in sorted(leaving):
            if self._may_leave(pod, name) and not pod.waits(name, self._now):
                yield Unload(pod.name, name)
        yield from self._prefetches(pod, homes)

    def _leaving(self, pod: Pod, homes: set[str]) -> set[str]:
        """What it holds because of us, and shall not."""
        assert pod.state is not None
        declared = {name for name in pod.state.declared if ":" in name}
        # A pin shows that it was loaded for an object, which a refusal may have kept out of what
        # is declared.
        pinned = {name for name in self._going if (it := pod.holds(name)) is not None and it.pinned}
        return {name for name in (declared - homes) | pinned if _is_there(pod, name)}

    def _needs_load(self, pod: Pod, name: str) -> bool:
        status = pod.status(name)
        if status is not None and (status.loading or _suits(status, self._wanted[name])):
            return False
        return not pod.waits(name, self._now)

    def _may_leave(self, pod: Pod, name: str) -> bool:
        """Make before break: a copy stays until those that replace it are there.

        Where they refuse it, it stays for as long as nothing else needs its room: two adapters
        that change places between two full replicas must not wait for each other for ever.
        """
        adapter = self._wanted.get(name)
        if adapter is None:
            return not self._may_be_wanted(name)
        homes = self._places[name].pods or self._coming[name].pods
        lacking = [
            home for home in map(self._world.by_name.__getitem__, homes) if not home.holds(name)
        ]
        if not lacking:
            return True
        if not all(name in home.refusals for home in lacking):
            return False
        return not self._fits_beside_homes(pod, adapter)

    def _fits_beside_homes(self, pod: Pod, adapter: Adapter) -> bool:
        room, fleet = room_of(pod, self._world), self._world.serving
        for name in self._homes[pod.name]:
            home = self._wanted[name]
            room.take(home, size_of(home, fleet))
        return room.take(adapter, size_of(adapter, fleet))

    def _may_be_wanted(self, name: str) -> bool:
        """Whether nobody can tell that no object wants it: one that says so is not readable, or is
        of a tenant that cannot be judged."""
        if name in self._doubtful:
            return True
        return not self._world.complete and ":" in name and name not in self._known

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(adapter.exact for adapter in self._world.adapters)

    def _prefetches(self, pod: Pod, homes: set[str]) -> Iterator[Action]:
        if not self._world.belongs(pod):
            return
        for name, adapter in self._prewarmed:
            is_there = name in homes or pod.status(name) is not None
            if not is_there and _selects(adapter, pod) and not pod.waits(name, self._now):
                yield Prefetch(pod.name, name, adapter.sha256, adapter.spec.source)

    @cached_property
    def _prewarmed(self) -> list[tuple[str, Adapter]]:
        return [
            (name, self._wanted[name])
            for name in sorted(self._wanted)
            if self._wanted[name].spec.prewarm == "Disk"
        ]

    def _on_vllm_pod(self, pod: Pod) -> Iterator[Action]:
        """What it lists may have been asked for by a tenant: only what is deleted is forgotten."""
        listed = pod.listed or frozenset()
        for name in sorted(self._homes[pod.name] - listed):
            if not pod.waits(name, self._now):
                yield Warm(pod.name, name)
        for name in sorted(self._going & listed):
            if not pod.waits(name, self._now):
                yield Forget(pod.name, name)


def _load(pod: Pod, adapter: Adapter) -> Load:
    placement = adapter.spec.placement
    return Load(
        pod.name,
        adapter.exact,
        adapter.sha256,
        adapter.spec.source,
        placement.level,
        placement.pinned,
    )


def _suits(status: AdapterStatus, adapter: Adapter) -> bool:
    """Whether it is held as declared. What may be evicted may be on any level: the pod's own."""
    placement = adapter.spec.placement
    if status.level == "disk" or status.pinned != placement.pinned:
        return False
    if adapter.sha256 is not None and status.digest != adapter.sha256:
        return False  # The replica will say so, which is how anybody comes to know.
    return placement.level == "host" or not placement.pinned or status.level == "slot"


def _is_there(pod: Pod, name: str) -> bool:
    """Whether it takes memory, or is about to."""
    status = pod.status(name)
    return status is not None and (status.loading or status.level != "disk")


def _is_to_go(pod: Pod, name: str) -> bool:
    """Whether a replica that answers holds it because of an object."""
    if pod.listed is not None:
        return name in pod.listed
    status = pod.status(name)
    if pod.state is None or status is None or not _is_there(pod, name):
        return False
    return status.pinned or name in pod.state.declared


def _selects(adapter: Adapter, pod: Pod) -> bool:
    labels = adapter.spec.placement.pod_selector.match_labels
    return all(pod.labels.get(key) == value for key, value in labels.items())
