"""Layers of the base wrapped so that each row of a batch goes through its own adapter."""

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
from mural_server.lora.layers.wrap import StackSpace, wrap_layer, wrap_logits_processor

__all__ = [
    "BaseLayerWithLoRA",
    "ColumnParallelLinearWithLoRA",
    "LinearWithLoRA",
    "LogitsProcessorWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
    "StackSpace",
    "VocabParallelEmbeddingWithLoRA",
    "wrap_layer",
    "wrap_logits_processor",
]
