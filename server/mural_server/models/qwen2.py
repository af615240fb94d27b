"""Qwen2 and Qwen2.5."""

from __future__ import annotations

from dataclasses import replace

from transformers import PreTrainedConfig

from mural_server.models.architecture import Architecture, read_architecture, read_rotary
from mural_server.models.base import CausalLM

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(CausalLM):
    """Pre-norm layers with biases on query, key and value; late layers may slide."""

    @classmethod
    def describe(cls, config: PreTrainedConfig) -> Architecture:
        return replace(
            read_architecture(config, config.hidden_act),
            rotary=(read_rotary(config),),
            qkv_bias=True,
        )
