"""Linear layers with adapters, one class per class of the base."""

from __future__ import annotations

from torch import Tensor

from mural_server.layers.linear import LinearBase, MergedColumnParallelLinear
from mural_server.lora.layers.base import BaseLayerWithLoRA
from mural_server.lora.punica.base import PunicaWrapper
from mural_server.lora.stack import LoRAStack
from mural_server.ops.base import Activation

__all__ = [
    "ColumnParallelLinearWithLoRA",
    "LinearWithLoRA",
    "MergedColumnParallelLinearWithLoRA",
    "QKVParallelLinearWithLoRA",
    "ReplicatedLinearWithLoRA",
    "RowParallelLinearWithLoRA",
]


class LinearWithLoRA(BaseLayerWithLoRA):
    """``y = x Wᵀ (+ bias) (+ residual) + (x A) B`` of each row's adapter."""

    base_layer: LinearBase

    def __init__(self, base_layer: LinearBase, stack: LoRAStack, punica: PunicaWrapper) -> None:
        super().__init__(base_layer, stack, punica)
        self.in_features = base_layer.in_features
        self.out_features = base_layer.out_features
        self.output_slices = base_layer.output_slices

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``x`` [rows, in] → [rows, out], as the base's layer is called."""
        y: Tensor = self.base_layer(x, residual)
        if self.stack.slots & self.punica.active_slots:
            self.punica.add_lora_linear(y, x, self.stack)
        return y


class ReplicatedLinearWithLoRA(LinearWithLoRA):
    """Every rank holds the layer and its adapters whole."""


class ColumnParallelLinearWithLoRA(LinearWithLoRA):
    """Split along the outputs: A whole, B by columns. One rank here."""


class MergedColumnParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    """Gate and up as one layer: a slice of the stack each."""

    base_layer: MergedColumnParallelLinear

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """As the base's; adapters add to what goes into the gate, so that is computed first."""
        if self.stack.slots & self.punica.active_slots:
            return self.base_layer.ops.gated(self(x), activation)
        return self.base_layer.gated(x, activation)


class QKVParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    """Query, key and value as one layer: a slice of the stack each."""


class RowParallelLinearWithLoRA(LinearWithLoRA):
    """Split along the inputs: A by columns, B whole. One rank here."""
