"""The plain form of every operator: what the other backends are held to.

Everything is computed in float32 and rounded once, sequence by sequence and adapter by adapter.
It runs wherever PyTorch does, and is slow.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from mural_server.ops.base import Activation, LoRABatch, Ops, PackedLinear
from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer


class ReferenceOps(Ops):
    """Obvious PyTorch, right in any dtype."""

    name = "reference"

    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, exact: bool = False
    ) -> PackedLinear:
        return PackedLinear(weight, bias, weight.shape[1], weight.shape[0])

    def linear(
        self, x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert isinstance(packed.weight, torch.Tensor)
        y = x.float() @ packed.weight.float().t()
        if packed.bias is not None:
            y = y + packed.bias.float()
        if residual is not None:
            y = y + residual.float()
        return y.to(x.dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight.float()).to(x.dtype)

    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        swapped = wide.roll(x.shape[-1] // 2, dims=-1)
        rotated = wide * cos.float().unsqueeze(1) + swapped * sin.float().unsqueeze(1)
        return rotated.to(x.dtype)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
        return (gate * up).to(gate_up.dtype)

    def write_kv(
        self, kv: KVLayer, keys: torch.Tensor, values: torch.Tensor, kv_slots: torch.Tensor
    ) -> None:
        block_size = kv.keys.shape[2]
        slots = kv_slots.tolist()
        for slot in slots:
            if slot % block_size == 0:
                kv.keys[slot // block_size].zero_()
                kv.values[slot // block_size].zero_()
        for row, slot in enumerate(slots):
            block, offset = divmod(slot, block_size)
            kv.keys[block, :, offset] = keys[row]
            kv.values[block, :, offset] = values[row]

    def attention(
        self, queries: torch.Tensor, kv: KVLayer, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        output = queries.new_zeros(queries.shape[0], spec.num_heads * spec.head_dim)
        for row, length in enumerate(batch.decode_lengths.tolist()):
            blocks = batch.decode_tables[row]
            output[row] = _attend(queries[row : row + 1], kv, blocks, length - 1, spec)[0]
        for chunk in batch.prefills:
            rows = slice(chunk.start, chunk.end)
            output[rows] = _attend(queries[rows], kv, chunk.blocks, chunk.context, spec)
        return output

    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: Sequence[torch.Tensor],
        batch: LoRABatch,
    ) -> None:
        for rows, lo, hi in _rows_by_slot(batch):
            column = 0
            for shrink, expand in zip(a, b, strict=True):
                columns = slice(column, column + expand.shape[1])
                hidden = x[rows].float() @ shrink[lo:hi].float().t()
                delta = hidden @ expand[lo:hi].float()
                y[rows, columns] = (y[rows, columns].float() + delta).to(y.dtype)
                column = columns.stop

    def lora_embedding(
        self,
        y: torch.Tensor,
        ids: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        batch: LoRABatch,
    ) -> None:
        for rows, lo, hi in _rows_by_slot(batch):
            delta = a[lo:hi, ids[rows]].float().t() @ b[lo:hi].float()
            y[rows] = (y[rows].float() + delta).to(y.dtype)


def _rows_by_slot(batch: LoRABatch) -> list[tuple[torch.Tensor, int, int]]:
    """Per slot in the batch: its rows (int64) and its rank rows ``lo``, ``hi``."""
    slots = [slot for slot in sorted(set(batch.row_slots.tolist())) if slot >= 0]
    return [
        ((batch.row_slots == slot).nonzero().flatten(), *batch.rank_rows[slot]) for slot in slots
    ]


def _attend(
    queries: torch.Tensor, kv: KVLayer, blocks: torch.Tensor, context: int, spec: AttentionSpec
) -> torch.Tensor:
    """One sequence: ``queries`` [n, heads, head_dim] stand at positions ``context + [0, n)``."""
    count = queries.shape[0]
    length = context + count
    group = spec.num_heads // spec.num_kv_heads
    keys, values = (
        pool[blocks].transpose(1, 2).flatten(0, 1)[:length].float().repeat_interleave(group, dim=1)
        for pool in kv
    )
    scores = torch.einsum("qhd,khd->hqk", queries.float() * spec.scale, keys)
    if spec.logit_softcap is not None:
        scores = spec.logit_softcap * torch.tanh(scores / spec.logit_softcap)
    distance = torch.arange(context, length, device=queries.device).unsqueeze(1) - torch.arange(
        length, device=queries.device
    )
    hidden = distance < 0
    if spec.sliding_window is not None:
        hidden |= distance >= spec.sliding_window
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).flatten(1).to(queries.dtype)
