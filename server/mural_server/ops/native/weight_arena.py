"""Memory for packed weights on huge pages, in pieces large enough to have them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

__all__ = ["WeightArena"]

CHUNK_BYTES = 32 << 20
HUGE_PAGE_BYTES = 2 << 20
ALIGNMENT = 64


class WeightArena:
    """Hands out tensors side by side from mappings that ask the kernel for huge pages.

    A step reads every weight once: with small pages, the walk through the page tables takes from
    the memory's bandwidth. A mapping goes when the last tensor from it does.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor with no defined content, aligned to a cache line."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if start + num_bytes > self._chunk.numel():
            self._chunk, start = _map(max(num_bytes, CHUNK_BYTES)), 0
        self._used = start + num_bytes
        return self._chunk[start : self._used].view(dtype).view(*shape)


def _map(num_bytes: int) -> torch.Tensor:
    """uint8 [at least num_bytes] that begins on a huge page."""
    whole = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    memory = mmap.mmap(-1, whole + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = torch.frombuffer(memory, dtype=torch.uint8)
    return mapped[-mapped.data_ptr() % HUGE_PAGE_BYTES :][:whole]
