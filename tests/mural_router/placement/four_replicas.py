"""Four replicas by their places in one adapter's order, and a rule of a choice in a row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from mural_router.placement import (
    Choice,
    Fleet,
    PlacementRequest,
    Replica,
    Residency,
    choose,
    order,
    reported_loads,
)

ADAPTER = "acme/support:v3"
NAMES = tuple(
    each.name for each in order(ADAPTER, Fleet(tuple(Replica(f"mural-{i}") for i in range(4))))
)
"""First home, second, third, last."""
FIRST, SECOND, THIRD, LAST = NAMES

CAN = Replica("", slots=8, host_bytes=1 << 30, max_lora_rank=64, max_num_seqs=32)
HELD = {ADAPTER: Residency("host", rank=16, bytes=1 << 20)}
LARGE = {ADAPTER: Residency("disk", rank=64, bytes=600 << 20)}
"""What a replica knows that has it on disk: its home would have to load it."""
LOADING = {ADAPTER: Residency("disk", loading=True)}
ON_DISK = {ADAPTER: Residency("disk")}


def fleet(**replicas: Replica) -> Fleet:
    """Four replicas; those that are not given are empty and idle."""
    by_place = dict(zip(("first", "second", "third", "last"), NAMES, strict=True))
    made = [replace(replicas.get(place, CAN), name=name) for place, name in by_place.items()]
    return Fleet(tuple(sorted(made, key=lambda each: each.name)))


def chosen(
    view: Fleet, request: PlacementRequest | None = None, declared: int | None = None
) -> Choice | None:
    return choose(
        request or PlacementRequest(ADAPTER), view, reported_loads(view), declared=declared
    )


@dataclass(frozen=True)
class Case:
    says: str
    to: str | None
    reason: str = ""
    k: int = 1
    fleet: Fleet = field(default_factory=fleet)
    request: PlacementRequest = field(default_factory=lambda: PlacementRequest(ADAPTER))


def busy(running: int, **fields: Any) -> Replica:
    return replace(CAN, running=running, **fields)


def with_others(mebibytes: int, *, rank: int = 0, **fields: Any) -> Replica:
    """It holds another tenant's adapter of this size beside what is given, by default in use."""
    adapters = fields.pop("adapters", {})
    other = replace(
        Residency("host", rank=rank, bytes=mebibytes << 20, load=1.0),
        **{name: fields.pop(name) for name in ("pinned", "requests", "load") if name in fields},
    )
    made = replace(CAN, adapters={"globex:v1": other, **adapters})
    return replace(made, **fields)
