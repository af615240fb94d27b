"""Shrink and expand by the compiled kernel: rows go by their slot, at their adapter's own rank."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mural_server.ops.base import LoRABatch
from mural_server.ops.native.attention import DTYPE_CODES
from mural_server.ops.native.library import NativeLibrary

__all__ = ["NativeLoRA"]


class _Group(ctypes.Structure):
    """``MuralLoraGroup`` of lora.h."""

    _fields_ = (
        ("rank_start", ctypes.c_int64),
        ("rank_end", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


class _Step(ctypes.Structure):
    """``MuralLoraStep``."""

    _fields_ = (
        ("num_groups", ctypes.c_int64),
        ("groups", ctypes.POINTER(_Group)),
        ("rows", ctypes.c_void_p),
        ("rank_step", ctypes.c_int64),
    )


class _Stack(ctypes.Structure):
    """``MuralLoraStack``."""

    _fields_ = (
        ("num_slices", ctypes.c_int64),
        ("num_rank_rows", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("a", ctypes.c_void_p),
        ("b", ctypes.POINTER(ctypes.c_void_p)),
        ("out_features", ctypes.POINTER(ctypes.c_int64)),
        ("dtype", ctypes.c_int32),
    )


class _Stacks(NamedTuple):
    """A layer's stacks as the kernel wants them, and the tensors whose memory they are."""

    struct: _Stack
    address: int
    a: torch.Tensor
    b: Sequence[torch.Tensor]

    @classmethod
    def of(cls, a: torch.Tensor, b: Sequence[torch.Tensor]) -> _Stacks:
        slices, num_rank_rows, in_features = a.shape
        struct = _Stack(
            slices,
            num_rank_rows,
            in_features,
            a.data_ptr(),
            (ctypes.c_void_p * slices)(*[expand.data_ptr() for expand in b]),
            (ctypes.c_int64 * slices)(*[expand.shape[1] for expand in b]),
            DTYPE_CODES[a.dtype],
        )
        return cls(struct, ctypes.addressof(struct), a, b)


class _Plan:
    """A batch's rows slot by slot, and the memory that the kernel keeps hidden values in."""

    def __init__(self, batch: LoRABatch) -> None:
        self._order = torch.sort(batch.row_slots, stable=True).indices
        slots, counts = torch.unique_consecutive(batch.row_slots[self._order], return_counts=True)
        groups, first = [], 0
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            if slot >= 0:
                groups.append(_Group(*batch.rank_rows[slot], first, count))
            first += count
        self.num_groups = len(groups)
        self._num_places = first
        self._rank = max((group.rank_end - group.rank_start for group in groups), default=0)
        self._hidden = torch.empty(0)
        self._step = _Step(
            len(groups), (_Group * len(groups))(*groups), self._order.data_ptr(), self._rank
        )
        self.address = ctypes.addressof(self._step)
        # By id, which stands for the tensor as long as it is held here; one entry a layer.
        self._stacks: dict[int, _Stacks] = {}

    def stacks(self, a: torch.Tensor, b: Sequence[torch.Tensor]) -> int:
        """Address of the layer's stacks; a batch stays the same over many decode steps."""
        known = self._stacks.get(id(a))
        if known is None or known.b is not b:
            known = self._stacks[id(a)] = _Stacks.of(a, b)
        return known.address

    def hidden(self, slices: int) -> int:
        """Address of float32 [rows, slices, rank]."""
        needed = self._num_places * slices * self._rank
        if self._hidden.numel() < needed:
            self._hidden = torch.empty(needed)
        return self._hidden.data_ptr()


class NativeLoRA:
    """`Ops.lora`."""

    def __init__(self, library: NativeLibrary) -> None:
        pointer, size, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
        self._kernel = library.kernel(
            "mural_lora", (pointer, pointer, pointer, size, pointer, size, pointer, flag)
        )

    def add(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: Sequence[torch.Tensor],
        batch: LoRABatch,
    ) -> None:
        """As `Ops.lora`; what is narrower than float32 is rounded once behind."""
        plan = batch.plans.get("native")
        if not isinstance(plan, _Plan):
            plan = batch.plans["native"] = _Plan(batch)
        if not plan.num_groups:
            return
        wide_x, wide_y = _dense_rows(x), _dense_rows(y)
        self._kernel(
            plan.address,
            plan.stacks(a, b),
            wide_y.data_ptr(),
            wide_y.stride(0),
            wide_x.data_ptr(),
            wide_x.stride(0),
            plan.hidden(len(b)),
            torch.get_num_threads(),
        )
        if wide_y is not y:
            y.copy_(wide_y)


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    wide = x if x.dtype == torch.float32 else x.float()
    return wide if wide.stride(1) == 1 else wide.contiguous()
