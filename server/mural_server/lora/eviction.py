"""Who goes when host memory is full: a pure choice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["Tenancy", "choose_victim"]


class Tenancy(NamedTuple):
    """What one registered adapter takes up, and on whose account."""

    lora_id: int
    tenant: str
    nbytes: int


def choose_victim(
    registered: Sequence[Tenancy], evictable: Collection[int], newcomer: Tenancy
) -> int | None:
    """The adapter to evict for ``newcomer``, or None if none can go.

    ``registered`` is in the order of use, the least recent first. All tenants have equal shares
    of what is held, the newcomer included; of those that have something evictable, the one most
    over its share in bytes gives its least recently used adapter. With one tenant, or with equal
    ones, this is plain LRU.
    """
    held: defaultdict[str, int] = defaultdict(int)
    for entry in (*registered, newcomer):
        held[entry.tenant] += entry.nbytes
    candidates = [entry for entry in registered if entry.lora_id in evictable]
    if not candidates:
        return None
    # With equal shares the most bytes are the most over it; max keeps the first, so the oldest.
    return max(candidates, key=lambda entry: held[entry.tenant]).lora_id
