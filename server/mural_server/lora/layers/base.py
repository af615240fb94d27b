"""What every wrapped layer is to the manager: a stack with slots to fill and to empty."""

from __future__ import annotations

from torch import nn

from mural_server.layers.module import ForwardModule
from mural_server.lora.punica.base import PunicaWrapper
from mural_server.lora.rank_rows import RankRows
from mural_server.lora.stack import LoRAStack
from mural_server.lora.weights import LoRALayerWeights, PackedLoRALayerWeights

__all__ = ["BaseLayerWithLoRA"]


class BaseLayerWithLoRA(ForwardModule):
    """A layer of the base, its stack, and the wrapper that knows the rows of the step.

    The base runs once for the whole batch; the adapters' share is added in place, and nothing is
    done in a step none of whose adapters has weights in this layer.
    """

    def __init__(self, base_layer: nn.Module, stack: LoRAStack, punica: PunicaWrapper) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.stack = stack
        self.punica = punica

    def set_lora(
        self, slot: int, rows: RankRows, weights: LoRALayerWeights | PackedLoRALayerWeights
    ) -> None:
        """Copy an adapter's weights for this layer into the slot's rank rows."""
        self.stack.set(slot, rows, weights.slices)

    def reset_lora(self, slot: int, rows: RankRows) -> None:
        """The slot's adapter lacks this layer: nothing of a former one may show through."""
        self.stack.reset(slot, rows)
