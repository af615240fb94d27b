"""Self-attention over the paged KV pool, with grouped queries and rotary positions."""

from __future__ import annotations

from torch import Tensor

from mural_server.layers.linear import QKVParallelLinear, RowParallelLinear
from mural_server.layers.module import ForwardModule
from mural_server.layers.norm import RMSNorm
from mural_server.layers.rotary import Rotation
from mural_server.ops.base import Ops
from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer

__all__ = ["Attention"]


class Attention(ForwardModule):
    """Project, rotate, store this step's keys and values, attend, project back.

    ``q_norm`` and ``k_norm`` (a norm over each head) are None in the families without them.
    """

    def __init__(
        self,
        ops: Ops,
        hidden_size: int,
        spec: AttentionSpec,
        *,
        qkv_bias: bool,
        output_bias: bool,
        q_norm: RMSNorm | None,
        k_norm: RMSNorm | None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.spec = spec
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv_proj = QKVParallelLinear(ops, hidden_size, head_dim, heads, kv_heads, qkv_bias)
        self.o_proj = RowParallelLinear(ops, heads * head_dim, hidden_size, output_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self._head_shape = (-1, heads + 2 * kv_heads, head_dim)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation,
        batch: AttentionBatch,
        kv: KVLayer,
        residual: Tensor | None = None,
    ) -> Tensor:
        """``x`` [rows, hidden] → [rows, hidden], plus ``residual`` where given."""
        qkv = self.qkv_proj(x).view(self._head_shape)
        if self.q_norm is not None and self.k_norm is not None:
            heads, end = self.spec.num_heads, self.spec.num_heads + self.spec.num_kv_heads
            qkv[:, :heads] = self.q_norm(qkv[:, :heads])
            qkv[:, heads:end] = self.k_norm(qkv[:, heads:end])
        queries = self.ops.rotary_and_write_kv(qkv, rotation.cos, rotation.sin, kv, batch.kv_slots)
        attended = self.ops.attention(queries, kv, batch, self.spec)
        y: Tensor = self.o_proj(attended, residual)
        return y
