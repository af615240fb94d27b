"""Where declared adapters shall be: the placement that routers compute too, within capacity."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from mural_operator.world import Pod, World
from mural_resolvers.kubernetes.objects import Adapter
from mural_router.placement import Fleet, PlacementRequest, homes_of, replicas_for

__all__ = ["Places", "Room", "place", "room_of", "size_of"]


@dataclass(frozen=True, slots=True)
class Places:
    """Of one adapter."""

    wanted: int
    """Replicas that it shall have: k."""
    pods: tuple[str, ...]
    """Those that it gets, in its order; fewer than wanted where too few can hold it."""
    full: tuple[str, ...] = ()
    """Those passed over because declared adapters of higher priority fill them."""


_UNBOUNDED = 1 << 62


@dataclass(slots=True)
class Room:
    """What declared adapters leave of one pod."""

    adapters: int
    bytes: int
    slots: int

    def take(self, adapter: Adapter, size: int) -> bool:
        """Whether it fits; then its room is taken."""
        placement = adapter.spec.placement
        slot = placement.level == "slot" and placement.pinned
        if self.adapters < 1 or self.bytes < size or (slot and self.slots < 1):
            return False
        self.adapters -= 1
        self.bytes -= size
        self.slots -= slot
        return True


def place(adapters: Iterable[Adapter], world: World, fleet: Fleet) -> dict[str, Places]:
    """By exact name. Higher priority first, then the older object, so that the newest gives way.

    Places are in the order of `mural_router.placement`, so that a router which is told k looks
    for an adapter where it is put. Only a full pod is passed over.
    """
    rooms = {pod.name: room_of(pod, world) for pod in world.pods}
    return {
        adapter.exact: _place(adapter, world, fleet, rooms)
        for adapter in sorted(adapters, key=_rank)
    }


def room_of(pod: Pod, world: World) -> Room:
    """What declared adapters may take of an empty pod; what is unknown fits."""
    capacity = world.pool.spec.capacity
    adapters = _UNBOUNDED if capacity.adapters is None else capacity.adapters
    bytes_ = _UNBOUNDED if capacity.bytes is None else capacity.bytes
    slots = _UNBOUNDED
    if pod.state is not None:
        limits = pod.state.limits
        adapters = min(adapters, max(limits.max_cpu_loras - 1, 0))
        bytes_ = min(bytes_, limits.host_bytes or _UNBOUNDED)
        # Servers leave one place and one slot to the adapters that nobody pins.
        slots = max(limits.slots - 1, 0)
    return Room(adapters, bytes_, slots)


def size_of(adapter: Adapter, fleet: Fleet) -> int:
    """Bytes of its weights: as replicas that hold it say, or said last; 0 before any has.

    Without what they said last it would be taken for small again as soon as it is nowhere, and
    be loaded where it has just been found too large.
    """
    return max(fleet.facts(adapter.exact).bytes, adapter.status.bytes)


def _rank(adapter: Adapter) -> tuple[int, tuple[datetime, str]]:
    return (-adapter.spec.placement.priority, adapter.metadata.age)


def _place(adapter: Adapter, world: World, fleet: Fleet, rooms: dict[str, Room]) -> Places:
    exact = adapter.exact
    request = PlacementRequest(exact, candidates=_selected(adapter, world))
    able = homes_of(request, fleet, len(fleet.replicas))
    wanted = _wanted(adapter, fleet, len(able))
    size = size_of(adapter, fleet)
    chosen: list[str] = []
    full: list[str] = []
    for i in able:
        if len(chosen) == wanted:
            break
        pod = fleet.replicas[i].name
        (chosen if rooms[pod].take(adapter, size) else full).append(pod)
    return Places(wanted, tuple(chosen), tuple(full))


def _selected(adapter: Adapter, world: World) -> frozenset[str] | None:
    labels = adapter.spec.placement.pod_selector.match_labels
    if not labels:
        return None
    return frozenset(
        pod.name
        for pod in world.pods
        if all(pod.labels.get(key) == value for key, value in labels.items())
    )


def _wanted(adapter: Adapter, fleet: Fleet, able: int) -> int:
    placement = adapter.spec.placement
    if placement.replicas == "All":
        return able
    if isinstance(placement.replicas, int):
        return placement.replicas
    if placement.min_replicas is None or placement.max_replicas is None:
        return 1
    by_load = replicas_for(adapter.exact, fleet)
    return min(max(by_load, placement.min_replicas), placement.max_replicas)
