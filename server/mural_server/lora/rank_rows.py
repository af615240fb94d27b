"""Hands out the rank rows of the stacks: a slot takes as many as its adapter's own rank."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

__all__ = ["RankRowAllocator", "RankRows"]


class RankRows(NamedTuple):
    """Rank rows ``[start, end)`` of every stack."""

    start: int
    end: int


EMPTY = RankRows(0, 0)


class RankRowAllocator:
    """First fit over ``max_loras`` bins of ``max_lora_rank`` rows; no block straddles two bins.

    So a block is found whenever a slot is free: the other slots hold at most ``max_loras - 1``
    blocks, each lies in one bin, and hence at least one bin is empty. Low ranks share a bin, which
    keeps the rows of a mixed batch close together.
    """

    def __init__(self, max_loras: int, max_lora_rank: int) -> None:
        self._num_bins = max_loras
        self._bin_rows = max_lora_rank
        # By slot, so that a slot can hold one block only.
        self._blocks: list[RankRows] = [EMPTY] * max_loras

    @property
    def blocks(self) -> tuple[RankRows, ...]:
        """The rows of each slot; (0, 0) for an empty one."""
        return tuple(self._blocks)

    def allocate(self, slot: int, rank: int) -> RankRows:
        """Give a slot ``rank`` rows; raise ``ValueError`` for a wrong rank or a taken slot."""
        if not 1 <= rank <= self._bin_rows:
            raise ValueError(f"a rank is 1 to {self._bin_rows}, not {rank}")
        if self._blocks[slot] != EMPTY:
            raise ValueError(f"slot {slot} holds rank rows already")
        taken = sorted(block for block in self._blocks if block != EMPTY)
        for bin_index in range(self._num_bins):
            start = bin_index * self._bin_rows
            end = start + self._bin_rows
            if (found := _first_gap(taken, start, end, rank)) is not None:
                self._blocks[slot] = RankRows(found, found + rank)
                return self._blocks[slot]
        raise AssertionError("a free slot without an empty bin: a block straddles two bins")

    def free(self, slot: int) -> RankRows:
        """Take back the slot's rows and return them; raise ``ValueError`` if it has none."""
        block = self._blocks[slot]
        if block == EMPTY:
            raise ValueError(f"slot {slot} holds no rank rows")
        self._blocks[slot] = EMPTY
        return block

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if blocks overlap, straddle two bins or lie outside."""
        taken = sorted(block for block in self._blocks if block != EMPTY)
        for block in taken:
            assert block.start // self._bin_rows == (block.end - 1) // self._bin_rows, block
            assert 0 <= block.start < block.end <= self._num_bins * self._bin_rows, block
        for left, right in pairwise(taken):
            assert left.end <= right.start, (left, right)


def _first_gap(taken: list[RankRows], start: int, end: int, rank: int) -> int | None:
    """The first ``rank`` free rows in ``[start, end)``; ``taken`` is sorted."""
    at = start
    for block in taken:
        if block.end <= start or block.start >= end:
            continue
        if block.start - at >= rank:
            return at
        at = block.end
    return at if end - at >= rank else None
