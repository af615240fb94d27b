"""Large tensors of which only what is used takes memory."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch

__all__ = ["allocate_zeroed"]


def allocate_zeroed(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, mmap.mmap | None]:
    """Give a tensor of zeros; on a CPU its memory is touched only where it is written.

    An anonymous mapping is zero and unbacked until a page is written, unlike ``torch.zeros``,
    which writes all of it. So physical memory follows what is in use, while the rest is still
    finite numbers (an operator may multiply them by zero).
    """
    num_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
    if device.type != "cpu" or num_bytes == 0:
        return torch.zeros(*shape, dtype=dtype, device=device), None
    # Private: of a shared mapping, pages that are dropped would live on in shared memory.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(*shape), memory
