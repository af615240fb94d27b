"""The index tensors that drive a grouped kernel: rows sorted by slot, one segment per slot."""

from __future__ import annotations

import torch

__all__ = ["LoRAKernelMeta"]


class LoRAKernelMeta:
    """Five index tensors at fixed addresses, and a flag for a step without any adapter.

    Sized once for ``max_rows`` rows and ``max_loras`` slots and rewritten in place. "Slot" -1 is
    a row without an adapter; it sorts first.
    """

    def __init__(self, max_rows: int, max_loras: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.max_loras = max_loras
        self.token_lora_mapping = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        """[rows], the slot of each row or -1."""
        self.token_indices_sorted_by_lora_ids = torch.zeros(
            max_rows, dtype=torch.int64, device=device
        )
        """[rows], the rows ordered by slot, in the batch's order within one."""
        self.active_lora_ids = torch.full((max_loras + 1,), -1, dtype=torch.int64, device=device)
        """[max_loras + 1], the slots that occur, ascending; -1 behind the last."""
        self.num_tokens_per_lora = torch.zeros(max_loras + 1, dtype=torch.int64, device=device)
        """[max_loras + 1], rows of each entry of ``active_lora_ids``."""
        self.lora_token_start_loc = torch.zeros(max_loras + 2, dtype=torch.int64, device=device)
        """[max_loras + 2], where each segment starts in the sorted rows; the first is 0."""
        self.no_lora = True
        """No row has an adapter: nothing is to be computed."""
        self.num_rows = 0
        self.num_active = 0
        """Segments, the one of rows without an adapter included."""

    def prepare_tensors(self, row_slots: torch.Tensor) -> None:
        """Rewrite the tensors for ``row_slots`` [rows]; raise ``ValueError`` for too many rows."""
        rows = row_slots.shape[0]
        if rows > self.max_rows:
            raise ValueError(f"{rows} rows, made for {self.max_rows}")
        self._reset()
        self.num_rows = rows
        self.token_lora_mapping[:rows] = row_slots
        slots, counts = torch.unique(row_slots, sorted=True, return_counts=True)
        self.no_lora = bool((slots == -1).all())
        if self.no_lora:
            return
        self.num_active = active = slots.shape[0]
        self.token_indices_sorted_by_lora_ids[:rows] = torch.sort(row_slots, stable=True).indices
        self.active_lora_ids[:active] = slots
        self.num_tokens_per_lora[:active] = counts
        torch.cumsum(counts, 0, out=self.lora_token_start_loc[1 : active + 1])

    def _reset(self) -> None:
        self.num_active = 0
        self.token_lora_mapping.fill_(-1)
        self.active_lora_ids.fill_(-1)
        self.num_tokens_per_lora.zero_()
        self.lora_token_start_loc.zero_()
