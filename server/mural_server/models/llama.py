"""Llama (2, 3.x, SmolLM2) and Mistral."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from mural_server.models.architecture import (
    SLIDING,
    Architecture,
    LayerKind,
    layer_types,
    read_architecture,
    read_rotary,
)
from mural_server.models.base import CausalLM
from mural_server.models.errors import UnsupportedModel

__all__ = ["LlamaForCausalLM", "MistralForCausalLM"]


class LlamaForCausalLM(CausalLM):
    """Pre-norm layers; biases where the configuration has them."""

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> Architecture:
        if SLIDING in layer_types(config):
            raise UnsupportedModel(f"{config.model_type}: sliding layer_types are not supported")
        bias = bool(getattr(config, "attention_bias", False))
        return replace(
            read_architecture(config, config.hidden_act),
            rotary=(read_rotary(config),),
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
        )


class MistralForCausalLM(CausalLM):
    """Llama without biases, and with a window in every layer where the configuration has one."""

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> Architecture:
        if SLIDING in layer_types(config):
            raise UnsupportedModel(f"{config.model_type}: sliding layer_types are not supported")
        return replace(
            read_architecture(config, config.hidden_act),
            layers=(LayerKind(0, config.sliding_window),) * config.num_hidden_layers,
            rotary=(read_rotary(config),),
        )
