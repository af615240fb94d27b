"""How many replicas an adapter is at home on, and which can hold it at all."""

from __future__ import annotations

from itertools import islice
from math import ceil, floor

from mural_router.placement.fleet import AdapterFacts, Fleet, Replica
from mural_router.placement.policy import DEFAULT_POLICY, PlacementPolicy

__all__ = ["SPARE", "can_hold", "fits", "holds", "is_crowded", "replicas_for"]

SPARE = 0.25
"""The part of a home's memory that nothing wanted takes before an adapter comes back to it from one
that holds it: what is wanted changes with every request, and each way is a load."""


def holds(replica: Replica, adapter: str) -> bool:
    """Whether it has the weights in memory, or has begun to load them, as far as can be known.

    A load in flight counts: a request there waits for the rest of it, elsewhere for a whole one.
    A replica that cannot say counts as holding, since whoever asks has it in mind as a home.
    """
    if not replica.reports:
        return True
    residency = replica.adapters.get(adapter)
    return residency is not None and (residency.loading or residency.level != "disk")


def can_hold(replica: Replica, facts: AdapterFacts) -> bool:
    """Whether an adapter of this rank and size fits an empty replica; what is unknown fits."""
    if not replica.reports:
        return True
    return (
        replica.slots > 0
        and (replica.max_lora_rank == 0 or facts.rank <= replica.max_lora_rank)
        and (replica.host_bytes == 0 or facts.bytes <= replica.host_bytes)
    )


def fits(replica: Replica, adapter: str, facts: AdapterFacts) -> bool:
    """Whether a replica can hold an adapter beside what is pinned there, which never leaves."""
    return can_hold(replica, facts) and (
        not 0 < replica.host_bytes < replica.use.pinned_bytes + facts.bytes
        or holds(replica, adapter)
    )


def is_crowded(replica: Replica, adapter: str, facts: AdapterFacts, spare: float = 0.0) -> bool:
    """Whether a replica would have to forget for an adapter what is wanted there.

    That would be loaded again soon, and have something else forgotten. So an adapter in memory
    stays, and one that is not looks for room first: bounded loads, of memory. One of unknown size
    is taken to be as large as those there. ``spare``: the part of its memory that shall be left.
    """
    use, part = replica.use, 1 - spare
    if not use.wanted or holds(replica, adapter):
        return False
    size = facts.bytes or use.wanted_bytes / use.wanted
    return (
        0 < replica.host_bytes * part < use.wanted_bytes + size
        or 0 < replica.max_cpu_loras * part < use.wanted + 1
    )


def replicas_for(
    adapter: str,
    fleet: Fleet,
    declared: int | None = None,
    policy: PlacementPolicy = DEFAULT_POLICY,
) -> int:
    """k: what is declared, else what the reported load asks for; at least 1.

    The work of an adapter, in replicas' worth, is summed over the replicas: its part of the tokens
    of each, times what that does. It gets as many replicas as it would fill to `fill`, and of those
    that it has it keeps the last as long as the others alone would be filled to `empty`. What it
    has is read from the replicas as well (the first places in its order that hold it), so the
    function has hysteresis without a memory, and routers that have never met agree.
    """
    most = max(1, len(fleet.accepting))
    if declared is not None:
        return min(max(1, declared), most)
    facts = fleet.facts(adapter)
    work = facts.work
    if work < policy.empty:
        return 1  # So it is with most adapters; what follows would say the same.
    fill = _fill(facts, fleet, policy)
    at_least = min(max(1, ceil(work / fill)), most)
    at_most = min(floor(work * policy.fill / (fill * policy.empty)) + 1, most)
    if at_least >= at_most:
        return at_least
    return min(max(at_least, _held(adapter, fleet, at_most)), at_most)


def _fill(facts: AdapterFacts, fleet: Fleet, policy: PlacementPolicy) -> float:
    """The part of a replica that an adapter fills before it is given another one.

    A copy costs what it takes of a replica's memory, which others are evicted for.
    """
    if fleet.mean_host_bytes == 0:
        return policy.fill
    return min(1.0, policy.fill + facts.bytes / fleet.mean_host_bytes)


def _held(adapter: str, fleet: Fleet, most: int) -> int:
    """How many of the first places in the order hold the adapter, up to the first that does not."""
    places = (i for i in fleet.members.order(adapter) if i in fleet.accepting_set)
    held = 0
    for i in islice(places, most):
        if not holds(fleet.replicas[i], adapter):
            break
        held += 1
    return held
