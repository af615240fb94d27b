"""The weights of an adapter for one layer, in the layout of the stacks, scale folded into B."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["LoRALayerWeights", "PackedLoRALayerWeights"]


@dataclass(frozen=True, slots=True)
class LoRALayerWeights:
    """One module's pair as PEFT trained it.

    ``lora_a`` [rank, in] (of an embedding: [rank, vocabulary]), ``lora_b`` [rank, out] with
    ``scaling`` (alpha/r, or alpha/√r with rsLoRA) multiplied in already.
    """

    module_name: str
    rank: int
    scaling: float
    lora_a: torch.Tensor
    lora_b: torch.Tensor

    def __post_init__(self) -> None:
        if self.lora_a.shape[0] != self.rank or self.lora_b.shape[0] != self.rank:
            raise ValueError(f"{self.module_name}: the halves do not have {self.rank} rows")

    @property
    def slices(self) -> tuple[LoRALayerWeights | None, ...]:
        """One entry per fused member of the layer; here the layer is not fused."""
        return (self,)


@dataclass(frozen=True, slots=True)
class PackedLoRALayerWeights:
    """The pairs of a fused layer's members (q, k, v or gate, up); None for an absent one."""

    module_name: str
    slices: tuple[LoRALayerWeights | None, ...]

    @classmethod
    def pack(
        cls, module_name: str, members: Sequence[LoRALayerWeights | None]
    ) -> PackedLoRALayerWeights:
        """Put members side by side; nothing is copied. Raises ``ValueError`` if all are absent."""
        if all(member is None for member in members):
            raise ValueError(f"{module_name}: no member to pack")
        return cls(module_name, tuple(members))

    @property
    def rank(self) -> int:
        """The largest rank of a member; lower ones are filled up with zero rows in a slot."""
        return max(member.rank for member in self.slices if member is not None)
