"""Qwen3 (dense)."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from mural_server.models.architecture import Architecture, read_architecture, read_rotary
from mural_server.models.base import CausalLM

__all__ = ["Qwen3ForCausalLM"]


class Qwen3ForCausalLM(CausalLM):
    """Pre-norm layers with a norm over each query and key head."""

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> Architecture:
        return replace(
            read_architecture(config, config.hidden_act),
            rotary=(read_rotary(config),),
            qkv_bias=bool(config.attention_bias),
            output_bias=bool(config.attention_bias),
            qk_norm=True,
        )
