"""Gemma 3, text only."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from torch import Tensor
from transformers import PreTrainedConfig

from mural_server.layers.rotary import Rotation
from mural_server.models.architecture import (
    FULL,
    SLIDING,
    Architecture,
    LayerKind,
    layer_types,
    read_architecture,
    read_rotary,
)
from mural_server.models.base import CausalLM
from mural_server.models.decoder import DecoderLayer, norm
from mural_server.ops.base import Ops
from mural_server.ops.batch import AttentionBatch, KVLayer

__all__ = ["Gemma3ForCausalLM"]


class SandwichDecoderLayer(DecoderLayer):
    """A norm before and one after each block; the residual is added behind the second."""

    def __init__(self, architecture: Architecture, kind: LayerKind, ops: Ops) -> None:
        super().__init__(architecture, kind, ops)
        self.pre_feedforward_layernorm = norm(architecture, ops, architecture.hidden_size)
        self.post_feedforward_layernorm = norm(architecture, ops, architecture.hidden_size)

    def forward(
        self, hidden: Tensor, rotation: Rotation, batch: AttentionBatch, kv: KVLayer
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), rotation, batch, kv)
        hidden = self.post_attention_layernorm(attended).add_(hidden)
        fed = self.mlp(self.pre_feedforward_layernorm(hidden))
        output: Tensor = self.post_feedforward_layernorm(fed).add_(hidden)
        return output


class Gemma3ForCausalLM(CausalLM):
    """Local and global layers with their own rotary bases, scaled embeddings, norms of 1 + w."""

    layer_class: ClassVar[type[DecoderLayer]] = SandwichDecoderLayer

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> Architecture:
        bias = bool(config.attention_bias)
        kinds = {FULL: LayerKind(0, None), SLIDING: LayerKind(1, config.sliding_window)}
        return replace(
            read_architecture(config, config.hidden_activation),
            attention_scale=config.query_pre_attn_scalar**-0.5,
            layers=tuple(kinds[layer_type] for layer_type in layer_types(config)),
            rotary=(read_rotary(config, FULL), read_rotary(config, SLIDING)),
            qkv_bias=bias,
            output_bias=bias,
            qk_norm=True,
            norm_offset=1.0,
            embed_scale=config.hidden_size**0.5,
            final_logit_softcap=config.final_logit_softcapping,
        )
