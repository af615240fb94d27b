"""The fastest forms that torch alone offers on a CPU; each was measured against its rivals.

Weights are laid out once for oneDNN, attention folds the query heads of a KV head into the
query axis, LoRA is computed by concatenated ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F

from mural_server.ops.base import Activation, LoRABatch, Ops, PackedLinear
from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer
from mural_server.ops.packed_attention import attend_chunk, attend_decodes, attention_plan
from mural_server.ops.packed_linear import LinearForm, fastest_form, multiply, pack
from mural_server.ops.packed_lora import add_lora, add_lora_embedding


class PackedOps(Ops):
    """Plain PyTorch in the forms that a small CPU likes."""

    name = "packed"

    def __init__(self, dtype: torch.dtype, linear_form: LinearForm | None = None) -> None:
        """``linear_form`` None: the fastest by a short measurement."""
        self.linear_form = linear_form or fastest_form(dtype).form
        self._kv_rows = _KVRows()

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """float32 where the products take and give it: each other operator is faster in it too."""
        return torch.float32 if self.linear_form == "half" else dtype

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, exact: bool = False
    ) -> PackedLinear:
        return pack(weight, bias, self.linear_form, exact=exact)

    def linear(
        self, x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return multiply(x, packed, residual)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.dtype == torch.float32:
            # Five kernels, fewer than F.rms_norm's.
            norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            squares = torch.addcmul(_scalar(eps), norms, norms, value=1 / x.shape[-1])
            return torch.mul(x, squares.rsqrt_()).mul_(weight)
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        return swapped.mul_(sin.unsqueeze(1)).addcmul_(x, cos.unsqueeze(1))

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return gate.mul_(up)

    def write_kv(
        self, kv: KVLayer, keys: torch.Tensor, values: torch.Tensor, kv_slots: torch.Tensor
    ) -> None:
        rows, fresh = self._kv_rows.get(kv_slots, kv.keys.shape[1], kv.keys.shape[2])
        for pool, new in zip(kv, (keys, values), strict=True):
            if fresh is not None:
                pool.index_fill_(0, fresh, 0.0)
            head_dim = pool.shape[-1]
            flat = new.to(pool.dtype).reshape(-1, head_dim)
            pool.view(-1, head_dim).index_copy_(0, rows, flat)

    def attention(
        self, queries: torch.Tensor, kv: KVLayer, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        dtype = queries.dtype
        queries = queries.to(kv.keys.dtype)
        plan = attention_plan(batch, spec, kv.keys.shape[2], queries.dtype)
        if plan.decodes_only:
            return attend_decodes(queries, kv, plan.decodes[0], spec).to(dtype)
        width = spec.num_heads * spec.head_dim
        # Zeros, since rows beyond the last chunk (padding) must not carry NaN into the pool.
        make = queries.new_empty if plan.covers_all else queries.new_zeros
        output = make((queries.shape[0], width), dtype=dtype)
        for group in plan.decodes:
            attended = attend_decodes(queries[group.rows], kv, group, spec)
            output[group.rows] = attended.to(dtype)
        for chunk in plan.prefills:
            attend_chunk(queries, kv, chunk, spec, output)
        return output

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: Sequence[torch.Tensor],
        batch: LoRABatch,
    ) -> None:
        add_lora(y, x, a, b, batch)

    def lora_embedding(
        self,
        y: torch.Tensor,
        ids: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        batch: LoRABatch,
    ) -> None:
        add_lora_embedding(y, ids, a, b, batch)


@cache
def _scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


class _KVRows:
    """Where a step's rows go in a flattened pool; computed in the first layer, kept for the rest.

    Compared by value: a caller may well fill one buffer anew for each step.
    """

    def __init__(self) -> None:
        self._shape: tuple[int, int] | None = None
        self._slots: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._fresh: torch.Tensor | None = None

    def get(
        self, kv_slots: torch.Tensor, num_kv_heads: int, block_size: int
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int64 [rows * kv heads] into [blocks * kv heads * block_size], and the fresh blocks."""
        shape = (num_kv_heads, block_size)
        if (
            self._rows is None
            or self._slots is None
            or shape != self._shape
            or not torch.equal(self._slots, kv_slots)
        ):
            self._shape, self._slots = shape, kv_slots.clone()
            blocks = kv_slots // block_size
            offsets = kv_slots - blocks * block_size
            pages = blocks.unsqueeze(1) * num_kv_heads + torch.arange(
                num_kv_heads, device=kv_slots.device
            )
            self._rows = (pages * block_size + offsets.unsqueeze(1)).flatten()
            fresh = blocks[offsets == 0]
            self._fresh = fresh if fresh.numel() else None
        return self._rows, self._fresh
