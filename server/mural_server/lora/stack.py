"""The A and B of all slots for one layer, side by side along the rank."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Literal

import torch

from mural_server.lora.rank_rows import RankRows
from mural_server.lora.weights import LoRALayerWeights
from mural_server.ops.zeroed import allocate_zeroed

__all__ = ["LoRAStack"]

_CAN_RELEASE = hasattr(mmap, "MADV_DONTNEED") and hasattr(mmap.mmap, "madvise")


class LoRAStack:
    """``a`` [slices, rank rows, in] and per slice ``b`` [rank rows, out].

    A slot has the same rank rows in every layer's stack (`RankRowAllocator`). A fused layer has a
    slice per member. Rows that no slot holds, and rows of a slot whose adapter has no weights
    here, contribute exactly nothing: one of their halves is zero and the other finite.
    """

    def __init__(
        self,
        num_rank_rows: int,
        in_features: int,
        out_features: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        *,
        zero_half: Literal["a", "b"] = "a",
    ) -> None:
        """``zero_half``: which half is zeroed to silence rows, the smaller one of the two."""
        self.a, self._a_memory = allocate_zeroed(
            (len(out_features), num_rank_rows, in_features), dtype, device
        )
        pairs = [allocate_zeroed((num_rank_rows, out), dtype, device) for out in out_features]
        self.b = tuple(tensor for tensor, _ in pairs)
        self._b_memory = tuple(memory for _, memory in pairs)
        self._zero_half = zero_half
        # Rows that are not silent, per slice: an untouched row is neither zeroed nor backed.
        self._dirty = [bytearray(num_rank_rows) for _ in out_features]
        self.slots = 0
        """Bit mask of the slots whose adapter has weights in this layer."""

    @property
    def num_slices(self) -> int:
        return len(self.b)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Per slice (in, out)."""
        return tuple((self.a.shape[2], b.shape[1]) for b in self.b)

    @property
    def bytes_per_rank_row(self) -> int:
        """Bytes that one rank row takes in all slices together."""
        return sum(fan_in + fan_out for fan_in, fan_out in self.shapes) * self.a.element_size()

    def set(self, slot: int, rows: RankRows, slices: Sequence[LoRALayerWeights | None]) -> None:
        """Copy an adapter's pairs into a slot's rows; what it lacks there is silenced."""
        if len(slices) != self.num_slices:
            raise ValueError(f"{len(slices)} members for a layer of {self.num_slices}")
        for index, weights in enumerate(slices):
            filled = rows.start
            if weights is not None:
                filled += weights.rank
                if filled > rows.end:
                    raise ValueError(f"{weights.module_name}: rank above the slot's rows")
                self.a[index, rows.start : filled].copy_(weights.lora_a)
                self.b[index][rows.start : filled].copy_(weights.lora_b)
                self._dirty[index][rows.start : filled] = b"\x01" * weights.rank
            self._silence(index, filled, rows.end)
        self.slots |= 1 << slot

    def reset(self, slot: int, rows: RankRows) -> None:
        """Silence a slot's rows: its adapter has no weights in this layer."""
        for index in range(self.num_slices):
            self._silence(index, rows.start, rows.end)
        self.slots &= ~(1 << slot)

    def clear(self, slot: int) -> None:
        """The slot was given up. Its rows are left as they are: no batch refers to them."""
        self.slots &= ~(1 << slot)

    def release(self, rows: RankRows) -> None:
        """Give the memory of rows that no slot holds back to the system, by whole pages."""
        for index in range(self.num_slices):
            first_row = index * self.a.shape[1]
            _drop_pages(self._a_memory, self.a.stride(1) * self.a.element_size(), first_row, rows)
            b = self.b[index]
            _drop_pages(self._b_memory[index], b.stride(0) * b.element_size(), 0, rows)

    def _silence(self, index: int, start: int, end: int) -> None:
        dirty = self._dirty[index]
        if 1 not in dirty[start:end]:
            return
        half = self.a[index] if self._zero_half == "a" else self.b[index]
        half[start:end].zero_()
        dirty[start:end] = bytes(end - start)


def _drop_pages(memory: mmap.mmap | None, row_bytes: int, first_row: int, rows: RankRows) -> None:
    """Drop the whole pages inside the rows; they read as zeros afterwards."""
    if memory is None or not _CAN_RELEASE:
        return
    page = mmap.PAGESIZE
    start = -(-(first_row + rows.start) * row_bytes // page) * page
    end = (first_row + rows.end) * row_bytes // page * page
    if end > start:
        memory.madvise(mmap.MADV_DONTNEED, start, end - start)
