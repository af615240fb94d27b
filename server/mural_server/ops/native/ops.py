"""Operators of the compiled library; what it has none for, and what no kernel takes, is packed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mural_server.ops.base import Activation, LoRABatch, PackedLinear
from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer
from mural_server.ops.native.attention import NativeAttention
from mural_server.ops.native.library import NativeLibrary
from mural_server.ops.native.linear import NativeLinear, NativeMultiply, can_pack, pack_linear
from mural_server.ops.native.lora import NativeLoRA
from mural_server.ops.native.rows import NativeRows
from mural_server.ops.native.weight_arena import WeightArena
from mural_server.ops.packed import PackedOps
from mural_server.ops.packed_linear import prepacked_form

__all__ = ["NativeOps"]


class NativeOps(PackedOps):
    """Hidden states are float32; bfloat16 weights are held as float16, the KV pool as they were."""

    name = "native"

    def __init__(self, dtype: torch.dtype, library: NativeLibrary) -> None:
        super().__init__(dtype, prepacked_form(dtype))
        self.isa = library.isa
        self._arena = WeightArena()
        self._multiply = NativeMultiply(library)
        self._attention = NativeAttention(library)
        self._rows = NativeRows(library)
        self._lora = NativeLoRA(library)

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def stack_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The adapters' own: half the bytes of a mixed step, and widening them costs little."""
        return dtype

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, exact: bool = False
    ) -> PackedLinear:
        if can_pack(weight, exact=exact):
            return pack_linear(weight, bias, self._arena)
        return super().pack_linear(weight, bias, exact=exact)

    def linear(
        self, x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(packed, NativeLinear):
            return self._multiply(x, packed, residual)
        return super().linear(x, packed, residual)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self._rows.rms_norm(x, weight, eps)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return self._rows.rotary(x, cos, sin)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return self._rows.gated(gate_up, activation)

    def gated_linear(
        self, x: torch.Tensor, packed: PackedLinear, activation: Activation
    ) -> torch.Tensor:
        if isinstance(packed, NativeLinear) and packed.fits_gate:
            return self._multiply.gated(x, packed, activation)
        return super().gated_linear(x, packed, activation)

    def write_kv(
        self, kv: KVLayer, keys: torch.Tensor, values: torch.Tensor, kv_slots: torch.Tensor
    ) -> None:
        self._rows.write_kv(kv, keys, values, kv_slots)

    def rotary_and_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVLayer,
        kv_slots: torch.Tensor,
    ) -> torch.Tensor:
        return self._rows.rotary_and_write_kv(qkv, cos, sin, kv, kv_slots)

    def attention(
        self, queries: torch.Tensor, kv: KVLayer, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        return self._attention.attend(queries, kv, batch, spec)

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: Sequence[torch.Tensor],
        batch: LoRABatch,
    ) -> None:
        self._lora.add(y, x, a, b, batch)
