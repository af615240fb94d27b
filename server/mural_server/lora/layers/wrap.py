"""From a layer of the base to its wrapper."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from mural_server.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from mural_server.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from mural_server.layers.logits import LogitsProcessor
from mural_server.lora.layers.base import BaseLayerWithLoRA
from mural_server.lora.layers.embedding import VocabParallelEmbeddingWithLoRA
from mural_server.lora.layers.linear import (
    ColumnParallelLinearWithLoRA,
    LinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from mural_server.lora.layers.logits import LogitsProcessorWithLoRA
from mural_server.lora.punica.base import PunicaWrapper
from mural_server.lora.stack import LoRAStack

__all__ = ["StackSpace", "wrap_layer", "wrap_logits_processor"]

# The most derived class comes first.
_LINEAR: tuple[tuple[type[LinearBase], type[LinearWithLoRA]], ...] = (
    (QKVParallelLinear, QKVParallelLinearWithLoRA),
    (MergedColumnParallelLinear, MergedColumnParallelLinearWithLoRA),
    (ColumnParallelLinear, ColumnParallelLinearWithLoRA),
    (RowParallelLinear, RowParallelLinearWithLoRA),
    (ReplicatedLinear, ReplicatedLinearWithLoRA),
)


class StackSpace(NamedTuple):
    """What all stacks of an engine have in common."""

    num_rank_rows: int
    dtype: torch.dtype
    device: torch.device


def wrap_layer(
    layer: nn.Module, space: StackSpace, punica: PunicaWrapper
) -> BaseLayerWithLoRA | None:
    """The wrapper of a linear layer or of the token table; None for what takes no adapter."""
    if isinstance(layer, VocabParallelEmbedding):
        stack = LoRAStack(
            space.num_rank_rows,
            layer.num_embeddings,
            (layer.embedding_dim,),
            space.dtype,
            space.device,
            zero_half="b",
        )
        return VocabParallelEmbeddingWithLoRA(layer, stack, punica)
    if isinstance(layer, ParallelLMHead):
        return None
    for base_class, wrapper_class in _LINEAR:
        if isinstance(layer, base_class):
            return wrapper_class(layer, _linear_stack(layer, space), punica)
    return None


def wrap_logits_processor(
    processor: LogitsProcessor, space: StackSpace, punica: PunicaWrapper
) -> LogitsProcessorWithLoRA:
    """The wrapper for adapters on ``lm_head``."""
    return LogitsProcessorWithLoRA(processor, _linear_stack(processor.lm_head, space), punica)


def _linear_stack(layer: LinearBase, space: StackSpace) -> LoRAStack:
    return LoRAStack(
        space.num_rank_rows, layer.in_features, layer.output_slices, space.dtype, space.device
    )
