"""Linear layers over weights packed as half precision (server/native/gemm.cpp)."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int, c_int32, c_int64, c_void_p

import torch

from mural_server.ops.base import Activation, PackedLinear
from mural_server.ops.native.library import NativeLibrary
from mural_server.ops.native.weight_arena import WeightArena

__all__ = ["NativeLinear", "NativeMultiply", "can_pack", "pack_linear"]

PANEL = 32
IN_BLOCK = 64
"""As in server/native/gemm.h."""

HALF_LIMIT = 60000.0
"""Below float16's 65504 by more than the roundings of a sum of IN_BLOCK products."""

WORK_ALIGNMENT = 64

GATED_INPUTS = 1024
"""Of more, two panels of weights do not stay near while all rows pass over them."""

ACTIVATION_CODES: dict[Activation, int] = {"silu": 0, "gelu_tanh": 1}


class _LinearStruct(ctypes.Structure):
    """MuralLinear of server/native/gemm.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("out_scale", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("limit_exponent", c_int64),
    )


class NativeLinear(PackedLinear):
    """A weight in float16 panels, each output scaled by a power of two of its own."""

    __slots__ = ("address", "out_scale", "struct")

    def __init__(
        self,
        weight: torch.Tensor,
        out_scale: torch.Tensor,
        bias: torch.Tensor | None,
        limit_exponent: int,
        in_features: int,
    ) -> None:
        super().__init__(weight, bias, in_features, out_scale.shape[0])
        self.out_scale = out_scale
        self.struct = _LinearStruct(
            weight.data_ptr(),
            out_scale.data_ptr(),
            None if bias is None else bias.data_ptr(),
            in_features,
            out_scale.shape[0],
            limit_exponent,
        )
        self.address = ctypes.addressof(self.struct)

    @property
    def fits_gate(self) -> bool:
        """The kernel makes gate and what it opens in one go: whole panels, inputs of one pass."""
        return self.out_features % (2 * PANEL) == 0 and self.in_features <= GATED_INPUTS


def can_pack(weight: torch.Tensor, *, exact: bool) -> bool:
    """Tell whether float16 with a scale for each output holds ``weight`` [out, in].

    It does unless numbers are not finite; ``exact`` asks for each number bit for bit.
    """
    if weight.dtype != torch.bfloat16 or 0 in weight.shape:
        return False
    wide = weight.float()
    if not bool(wide.isfinite().all()):
        return False
    if not exact:
        return True
    scaled = wide / _out_scale(wide).unsqueeze(1)
    return torch.equal(scaled.half().float(), scaled)


def pack_linear(
    weight: torch.Tensor, bias: torch.Tensor | None, arena: WeightArena
) -> NativeLinear:
    """Lay out ``weight`` [out, in], for which `can_pack` holds."""
    out_features, in_features = weight.shape
    wide = weight.float()
    out_scale = _out_scale(wide)
    panels, blocks = math.ceil(out_features / PANEL), math.ceil(in_features / IN_BLOCK)
    padded = torch.zeros(panels * PANEL, blocks * IN_BLOCK, dtype=torch.float16)
    padded[:out_features, :in_features] = wide.div_(out_scale.unsqueeze(1))
    largest_sum = float(padded.view(panels * PANEL, blocks, IN_BLOCK).float().abs().sum(-1).max())
    packed = arena.take((panels, blocks * IN_BLOCK, PANEL), torch.float16)
    packed.copy_(padded.view(panels, PANEL, blocks * IN_BLOCK).transpose(1, 2))
    # Largest power of two that products with the largest block of an output cannot overflow by.
    limit_exponent = math.floor(math.log2(HALF_LIMIT / max(largest_sum, 1.0)))
    wide_bias = None if bias is None else bias.float().contiguous()
    return NativeLinear(packed, out_scale, wide_bias, limit_exponent, in_features)


def _out_scale(wide: torch.Tensor) -> torch.Tensor:
    """Per output the power of two that brings its largest weight into [1, 2); 1 for zeros."""
    largest = wide.abs().amax(1)
    exponent = torch.frexp(largest).exponent - 1
    exponent = exponent.clamp_(-100, 100).where(largest > 0, 0)
    return torch.ldexp(torch.ones_like(largest), exponent)


class NativeMultiply:
    """The product with the kernels of one instruction set."""

    def __init__(self, library: NativeLibrary) -> None:
        self._kernel = library.kernel(
            "mural_gemm",
            (
                *(c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p),
                *(c_int64, c_int),
            ),
        )
        self._gated_kernel = library.kernel(
            "mural_gated_gemm",
            (c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_void_p, c_int64, c_int),
        )
        self._element_bytes = 2 if library.isa == "avx512fp16" else 4

    def __call__(
        self, x: torch.Tensor, packed: NativeLinear, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """As `Ops.linear`; rows may have any stride."""
        wide = _rows_in_float32(x)
        other = None if residual is None else _rows_in_float32(residual)
        rows = wide.shape[0]
        y = torch.empty(rows, packed.out_features, dtype=torch.float32)
        work = self._work(rows, packed.in_features)
        self._kernel(
            packed.address,
            wide.data_ptr(),
            wide.stride(0),
            None if other is None else other.data_ptr(),
            0 if other is None else other.stride(0),
            y.data_ptr(),
            -(-work.data_ptr() // WORK_ALIGNMENT) * WORK_ALIGNMENT,
            rows,
            torch.get_num_threads(),
        )
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def gated(self, x: torch.Tensor, packed: NativeLinear, activation: Activation) -> torch.Tensor:
        """As `Ops.gated_linear`, for a ``packed`` that fits; rows may have any stride."""
        wide = _rows_in_float32(x)
        rows = wide.shape[0]
        y = torch.empty(rows, packed.out_features // 2, dtype=torch.float32)
        work = self._work(rows, packed.in_features)
        self._gated_kernel(
            packed.address,
            wide.data_ptr(),
            wide.stride(0),
            ACTIVATION_CODES[activation],
            y.data_ptr(),
            -(-work.data_ptr() // WORK_ALIGNMENT) * WORK_ALIGNMENT,
            rows,
            torch.get_num_threads(),
        )
        return y if x.dtype == torch.float32 else y.to(x.dtype)

    def _work(self, rows: int, in_features: int) -> torch.Tensor:
        """A scale a row, padded to a cache line, then the activations in whole blocks."""
        width = -(-in_features // IN_BLOCK) * IN_BLOCK
        size = 4 * (-(-rows // 16) * 16) + rows * width * self._element_bytes + WORK_ALIGNMENT
        return torch.empty(size, dtype=torch.uint8)


def _rows_in_float32(x: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return wide if wide.stride(1) == 1 else wide.contiguous()
