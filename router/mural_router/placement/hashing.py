"""Rendezvous hashing: every router computes the same order of replicas for a key, by itself.

Highest random weight (Thaler and Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998): a replica's score for a key is a hash of both, and
the replicas are taken by descending score, so that one that comes or goes moves only the keys
that it wins or won. Capacities enter by the logarithmic method (Schindelhauer and Schomaker,
"Weighted distributed hash tables", SPAA 2005): the score is ``weight / -ln(h)`` with h uniform in
(0, 1), so a replica wins a share of the keys in proportion to its weight, and a changed weight
moves only what that replica wins or loses.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from math import log

__all__ = ["Members", "members_of", "stable_hash"]

ORDERS_KEPT = 16_384
"""Per membership. An order of 100 replicas takes about half a kilobyte."""
MEMBERSHIPS_KEPT = 4
"""So that a replica that blinks does not cost every order twice."""


def stable_hash(text: str) -> int:
    """64 bits that are the same in every process (Python's own `hash` is not)."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


class Members:
    """Who is in the fleet, and with what weight. Immutable; orders are kept, a bounded number."""

    def __init__(self, names_weights: tuple[tuple[str, float], ...]) -> None:
        if any(not weight > 0 for _, weight in names_weights):
            raise ValueError("a replica's weight is above 0")
        # A name is hashed once: going on from its state costs 40 % of hashing name and key anew.
        # The NUL keeps a name and a key apart, wherever one ends and the other begins.
        self._states = [blake2b(name.encode() + b"\0", digest_size=8) for name, _ in names_weights]
        self._weights = [weight for _, weight in names_weights]
        self.order = lru_cache(maxsize=ORDERS_KEPT)(self._order)
        """``order(key)``: the positions of all members, the one with the highest score first."""

    def score(self, member: int, key: bytes) -> float:
        """How much a member wants a key; the highest has it."""
        state = self._states[member].copy()
        state.update(key)
        # 52 bits and a half: never 0 and never 1, whose logarithms are none or 0.
        uniform = ((int.from_bytes(state.digest()) >> 12) + 0.5) / (1 << 52)
        return self._weights[member] / -log(uniform)

    def ranked(self, members: Sequence[int], key: str) -> list[int]:
        """Some of the members by descending score; those that tie stay as they came."""
        encoded = key.encode()
        return sorted(members, key=lambda member: self.score(member, encoded), reverse=True)

    def _order(self, key: str) -> Sequence[int]:
        return array("I", self.ranked(range(len(self._weights)), key))


@lru_cache(maxsize=MEMBERSHIPS_KEPT)
def members_of(names_weights: tuple[tuple[str, float], ...]) -> Members:
    """The members of these names and weights: one object as long as nobody comes or goes."""
    return Members(names_weights)
