"""The interface between the layers and the operators: one wrapper knows the rows of the step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from mural_server.lora.mapping import LoRAMapping
from mural_server.lora.punica.kernel_meta import LoRAKernelMeta
from mural_server.lora.rank_rows import RankRows
from mural_server.lora.stack import LoRAStack

__all__ = ["PunicaWrapper"]


class PunicaWrapper(ABC):
    """Shared by all wrapped layers, so that a step's mapping is worked out once.

    ``active_slots`` and ``active_logits_slots`` are bit masks of the slots that occur in the
    step's rows and in its sampled rows: 0 means that nothing is to be computed.
    """

    def __init__(self) -> None:
        self.active_slots = 0
        self.active_logits_slots = 0

    @property
    @abstractmethod
    def token_meta(self) -> LoRAKernelMeta:
        """The index tensors of the step's rows."""

    @property
    @abstractmethod
    def logits_meta(self) -> LoRAKernelMeta:
        """The index tensors of the rows that are sampled."""

    @abstractmethod
    def update_metadata(
        self, mapping: LoRAMapping, slot_of: dict[int, int], rank_rows: Sequence[RankRows]
    ) -> None:
        """Take up a step's rows; ``slot_of`` gives the slot of each adapter id in a slot.

        Raises ``KeyError`` for an adapter that is in no slot.
        """

    @abstractmethod
    def update_logits_metadata(
        self, lora_ids: Sequence[int], slot_of: dict[int, int], rank_rows: Sequence[RankRows]
    ) -> None:
        """The same for the rows of the next ``compute_logits`` alone."""

    @abstractmethod
    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, stack: LoRAStack) -> None:
        """``y`` [rows, out] += each row's adapter's share of ``x`` [rows, in]."""

    @abstractmethod
    def add_lora_embedding(self, y: torch.Tensor, ids: torch.Tensor, stack: LoRAStack) -> None:
        """``y`` [rows, hidden] += each row's adapter's share for ``ids`` [rows]."""

    @abstractmethod
    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, stack: LoRAStack) -> None:
        """`add_lora_linear` over the sampled rows."""
