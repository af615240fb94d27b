"""Llama (2, 3.x, SmolLM2) and Mistral."""

from __future__ import annotations

from transformers import PreTrainedConfig

from mural_server.models.architecture import (
    Architecture,
    LayerKind,
    activation,
    head_dim,
    layer_types,
    read_rotary,
    refuse,
    served_positions,
)
from mural_server.models.base import CausalLM
from mural_server.models.errors import UnsupportedModel

__all__ = ["LlamaForCausalLM", "MistralForCausalLM"]


class LlamaForCausalLM(CausalLM):
    """Pre-norm layers; biases where the configuration has them."""

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> Architecture:
        refuse(config)
        if set(layer_types(config)) != {"full_attention"}:
            raise UnsupportedModel(f"{config.model_type}: sliding layer_types are not supported")
        bias = bool(getattr(config, "attention_bias", False))
        return Architecture(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim(config),
            attention_scale=head_dim(config) ** -0.5,
            layers=(LayerKind(0, cls.window(config)),) * config.num_hidden_layers,
            rotary=(read_rotary(config),),
            max_position=served_positions(config),
            rms_norm_eps=config.rms_norm_eps,
            activation=activation(config, config.hidden_act),
            tie_word_embeddings=config.tie_word_embeddings,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
        )

    @classmethod
    def window(cls, config: PreTrainedConfig) -> int | None:
        """Tokens that a layer attends to, or None for all; Llama has no window."""
        return None


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with a sliding window in every layer, where the configuration has one."""

    @classmethod
    def window(cls, config: PreTrainedConfig) -> int | None:
        window: int | None = config.sliding_window
        return window
