"""What the LoRA side of an engine is started with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["LoRAConfig"]


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Sizes and limits of both tiers. Raises ``ValueError`` for a combination that cannot work."""

    max_loras: int
    """Slots: distinct adapters in one step."""
    max_cpu_loras: int
    """Adapters registered in host memory, those in slots included."""
    max_lora_rank: int
    dtype: torch.dtype
    """What adapters are converted to: the base's."""
    target_modules: tuple[str, ...] | None = None
    """Suffixes (or full names) of modules that adapters may target; None: all of the base spec."""
    max_cpu_lora_bytes: int | None = None
    """Host bytes of registered adapters; None: no limit beside ``max_cpu_loras``."""

    def __post_init__(self) -> None:
        if self.max_loras < 1 or self.max_lora_rank < 1:
            raise ValueError("max_loras and max_lora_rank must be 1 or more")
        if self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras ({self.max_cpu_loras}) is below max_loras ({self.max_loras}), "
                "but what is in a slot is registered too"
            )
        if self.max_cpu_lora_bytes is not None and self.max_cpu_lora_bytes < 1:
            raise ValueError("max_cpu_lora_bytes must be above 0")

    @property
    def num_rank_rows(self) -> int:
        """Rank rows of every stack: a slot takes as many as its adapter's rank."""
        return self.max_loras * self.max_lora_rank
