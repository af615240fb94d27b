"""The numbers that placement goes by. Routers that shall agree are given the same ones."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_POLICY", "PlacementPolicy"]


@dataclass(frozen=True, slots=True)
class PlacementPolicy:
    """One per fleet. docs/explanation/placement.md shows what the defaults do."""

    load_bound: float = 1.25
    """A replica is given more only while its load is below this many times its share of the
    fleet's: c in Mirrokni, Thorup and Zadimoghaddam, "Consistent hashing with bounded loads"
    (SODA 2018). Lower spreads more, higher keeps more together."""
    light: float = 0.25
    """Filled less than this, a replica is within the bound whatever the others have: a bound by
    the mean alone would send three requests of an idle fleet to three replicas, to load three
    times."""
    light_sequences: int = 8
    """The same for a replica which does not say how many sequences it computes at a time."""
    fill: float = 0.75
    """An adapter is given another replica when its work exceeds this part of what its replicas
    can do. One that takes a part of a replica's memory is spread later by that part."""
    empty: float = 0.5
    """It loses one when fewer would be filled to less than this: the gap to `fill` is what keeps
    a steady load from moving it to and fro."""
    overcommit: float = 1.5
    """As a home, a replica takes this many times the sequences that it computes at a time, those
    that wait there included; beyond it requests wait in the router, where they are served fairly.
    As no home it takes what it computes at a time."""
    rank_cost: float = 0.02
    """What each rank of an adapter adds to what a sequence under it costs, in base sequences: with
    it a batch costs its sequences and the sum of their ranks, as in CaraServe (Li et al., 2024,
    arXiv 2401.11240). `benchmarks/rank_cost.py` measures it; 0: any rank costs as the base."""
    max_waiting: int = 32
    """Sequences that may wait at a home which does not say how many it computes at a time."""
    kv_full: float = 0.95
    """With this part of its KV blocks in use and sequences waiting, a replica takes no more."""

    def __post_init__(self) -> None:
        if self.load_bound < 1:
            raise ValueError("load_bound is 1 or more: below it not every request has a place")
        if not 0 <= self.light <= 1 or self.light_sequences < 0:
            raise ValueError("0 <= light <= 1 and light_sequences >= 0")
        if not 0 <= self.rank_cost <= 1:
            raise ValueError("0 <= rank_cost <= 1")
        if not 0 < self.empty < self.fill <= 1:
            raise ValueError("0 < empty < fill <= 1")
        if self.overcommit < 1 or self.max_waiting < 0 or not 0 < self.kv_full <= 1:
            raise ValueError("overcommit >= 1, max_waiting >= 0 and 0 < kv_full <= 1")


DEFAULT_POLICY = PlacementPolicy()
