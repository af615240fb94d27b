"""The stack of decoder layers that all families share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mural_server.layers.attention import Attention
from mural_server.layers.embedding import VocabParallelEmbedding
from mural_server.layers.mlp import GatedMLP
from mural_server.layers.module import ForwardModule
from mural_server.layers.norm import RMSNorm
from mural_server.layers.rotary import RotaryEmbedding, Rotation
from mural_server.models.architecture import Architecture, LayerKind
from mural_server.ops.base import Ops
from mural_server.ops.batch import AttentionBatch, KVLayer

__all__ = ["Decoder", "DecoderLayer", "PreNormDecoderLayer", "norm"]


class DecoderLayer(ForwardModule, ABC):
    """Attention and feed-forward; a subclass says where the norms and the residuals go."""

    def __init__(self, architecture: Architecture, kind: LayerKind, ops: Ops) -> None:
        super().__init__()
        per_head = architecture.qk_norm
        self.self_attn = Attention(
            ops,
            architecture.hidden_size,
            architecture.attention_spec(kind),
            qkv_bias=architecture.qkv_bias,
            output_bias=architecture.output_bias,
            q_norm=norm(architecture, ops, architecture.head_dim) if per_head else None,
            k_norm=norm(architecture, ops, architecture.head_dim) if per_head else None,
        )
        self.mlp = GatedMLP(
            ops,
            architecture.hidden_size,
            architecture.intermediate_size,
            architecture.activation,
            architecture.mlp_bias,
        )
        self.input_layernorm = norm(architecture, ops, architecture.hidden_size)
        self.post_attention_layernorm = norm(architecture, ops, architecture.hidden_size)

    @abstractmethod
    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: AttentionBatch, kv: KVLayer
    ) -> Tensor:
        """``hidden`` [rows, hidden] → [rows, hidden]; ``hidden`` itself is not written to."""


class PreNormDecoderLayer(DecoderLayer):
    """Norm, block, residual, twice; the residual is added by the block's last matrix product."""

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: AttentionBatch, kv: KVLayer
    ) -> Tensor:
        hidden = self.self_attn(self.input_layernorm(hidden), rotation, batch, kv, hidden)
        output: Tensor = self.mlp(self.post_attention_layernorm(hidden), hidden)
        return output


class Decoder(nn.Module):
    """Token table, layers, final norm: what Hugging Face calls ``model``."""

    def __init__(
        self,
        architecture: Architecture,
        ops: Ops,
        dtype: torch.dtype,
        layer_class: type[DecoderLayer],
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(
            ops, architecture.vocab_size, architecture.hidden_size, architecture.embed_scale
        )
        self.layers = nn.ModuleList(
            layer_class(architecture, kind, ops) for kind in architecture.layers
        )
        self.norm = norm(architecture, ops, architecture.hidden_size)
        activation_dtype = ops.activation_dtype(dtype)
        self.rotary = nn.ModuleList(
            RotaryEmbedding(spec, architecture.max_position, activation_dtype)
            for spec in architecture.rotary
        )
        self._rotary_kinds = tuple(kind.rotary for kind in architecture.layers)

    def forward(
        self, ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: Sequence[KVLayer]
    ) -> Tensor:
        rotations = [rotary(positions) for rotary in self.rotary]
        hidden = self.embed_tokens(ids)
        for layer, kind, layer_kv in zip(self.layers, self._rotary_kinds, kv, strict=True):
            hidden = layer(hidden, rotations[kind], batch, layer_kv)
        normalised: Tensor = self.norm(hidden)
        return normalised


def norm(architecture: Architecture, ops: Ops, size: int) -> RMSNorm:
    """A norm of the family's kind over ``size`` elements."""
    return RMSNorm(ops, size, architecture.rms_norm_eps, architecture.norm_offset)
