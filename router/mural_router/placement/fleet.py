"""What placement is told: plain data about the replicas and about a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Fleet", "Level", "PlacementRequest", "Replica", "Residency"]

Level = Literal["disk", "host", "slot"]


@dataclass(frozen=True, slots=True)
class Residency:
    """One adapter on one replica, as the replica reports it."""

    level: Level
    digest: str = ""
    loading: bool = False
    pinned: bool = False
    rank: int = 0
    bytes: int = 0
    requests: int = 0
    """Sequences that run or wait there under this adapter."""
    load: float = 0.0
    """Generated tokens a second, over a window of a minute that forgets."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One server of the fleet, as it was last seen."""

    name: str
    """Stable and the same for every router: what the rendezvous hash is over."""
    weight: float = 1.0
    """Capacity relative to the others; above 0."""
    ready: bool = True
    """Accepts requests: ready by its own word (or its pod's), and not draining."""
    stale: bool = False
    """Not heard from for longer than the bound: what follows may no longer hold."""
    reports: bool = True
    """False: it cannot say which adapters it holds (a vLLM pod). Unknown is not absent."""
    slots: int = 0
    host_bytes: int = 0
    """Host memory for adapters; 0: unknown."""
    max_lora_rank: int = 0
    """0: unknown."""
    max_num_seqs: int = 0
    """Sequences in one step; 0: unknown."""
    running: int = 0
    waiting: int = 0
    """Paused ones included."""
    kv_usage: float = 0.0
    """0 to 1."""
    tokens_per_s: float = 0.0
    """Generated, over the last seconds."""
    adapters: Mapping[str, Residency] = field(default_factory=dict)
    """By exact name."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All replicas that serve one base model, sorted by name."""

    replicas: tuple[Replica, ...] = ()

    def __post_init__(self) -> None:
        names = [replica.name for replica in self.replicas]
        if names != sorted(set(names)):
            raise ValueError("replicas are sorted by name, each once")


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """One request, as far as its place depends on it."""

    adapter: str | None
    """The exact name ``tenant/adapter:version``; None: the base model."""
    prefix: int | None = None
    """Hash of the leading blocks of the prompt; requests that share it should meet."""
    session: str | None = None
    """The client's own hint (`user`, or a session header) of what should meet."""
    sequences: int = 1
    """How many it opens (`n` times the prompts)."""
    candidates: frozenset[str] | None = None
    """Only these replicas may be chosen, by name; None: all."""
    excluded: frozenset[str] = frozenset()
    """These may not: tried in vain already, or their breaker is open."""
