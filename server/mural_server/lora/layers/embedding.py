"""The token table with adapters."""

from __future__ import annotations

from torch import Tensor

from mural_server.layers.embedding import VocabParallelEmbedding
from mural_server.lora.layers.base import BaseLayerWithLoRA
from mural_server.lora.punica.base import PunicaWrapper
from mural_server.lora.rank_rows import RankRows
from mural_server.lora.stack import LoRAStack
from mural_server.lora.weights import LoRALayerWeights, PackedLoRALayerWeights

__all__ = ["VocabParallelEmbeddingWithLoRA"]


class VocabParallelEmbeddingWithLoRA(BaseLayerWithLoRA):
    """``y = W[ids] + A[:, ids]ᵀ B``, both times the base's ``embed_scale`` where it has one.

    As in PEFT, an adapter on the table does not change a tied output projection.
    """

    base_layer: VocabParallelEmbedding

    def __init__(
        self, base_layer: VocabParallelEmbedding, stack: LoRAStack, punica: PunicaWrapper
    ) -> None:
        super().__init__(base_layer, stack, punica)

    def set_lora(
        self, slot: int, rows: RankRows, weights: LoRALayerWeights | PackedLoRALayerWeights
    ) -> None:
        super().set_lora(slot, rows, weights)
        if self.base_layer.embed_scale is not None:
            self.stack.b[0][rows.start : rows.start + weights.rank].mul_(
                self.base_layer.embed_scale
            )

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` int64 [rows] → [rows, hidden]."""
        y: Tensor = self.base_layer(ids)
        if self.stack.slots & self.punica.active_slots:
            self.punica.add_lora_embedding(y, ids, self.stack)
        return y
