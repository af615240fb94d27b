"""The output projection with adapters."""

from __future__ import annotations

from torch import Tensor

from mural_server.layers.logits import LogitsProcessor
from mural_server.lora.layers.base import BaseLayerWithLoRA
from mural_server.lora.punica.base import PunicaWrapper
from mural_server.lora.stack import LoRAStack

__all__ = ["LogitsProcessorWithLoRA"]


class LogitsProcessorWithLoRA(BaseLayerWithLoRA):
    """Adapters on ``lm_head``: wraps the logits processor, which sees the sampled rows only.

    The softcap comes last, over the base and the adapter's share together.
    """

    base_layer: LogitsProcessor

    def __init__(
        self, base_layer: LogitsProcessor, stack: LoRAStack, punica: PunicaWrapper
    ) -> None:
        super().__init__(base_layer, stack, punica)

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [sampled rows, hidden] → logits [sampled rows, vocab]."""
        logits: Tensor = self.base_layer.lm_head(hidden)
        if self.stack.slots & self.punica.active_logits_slots:
            self.punica.add_lora_logits(logits, hidden, self.stack)
        return self.base_layer.cap(logits)
