"""What one step's batch looks like to the operators: which rows are whose, and where KV lies."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class PrefillChunk(NamedTuple):
    """Consecutive prompt tokens of one sequence that are computed in this step."""

    start: int
    """First row of the chunk in the batch."""
    end: int
    """One past its last row."""
    context: int
    """Tokens of the sequence that stand in the KV pool already, before this chunk."""
    blocks: torch.Tensor
    """int64 [ceil((context + end - start) / block_size)], the sequence's blocks in order."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Rows ``[0, num_decodes)`` are one token each of a running sequence; the chunks follow.

    One object a step, handed to every layer. Its tensors are not changed after it is made:
    backends keep what they derive from it in ``plans``.
    """

    kv_slots: torch.Tensor
    """int64 [rows]; block * block_size + offset at which each row's key and value are written."""
    num_decodes: int
    decode_tables: torch.Tensor
    """int64 [num_decodes, max blocks]; padded with block 0, which is never handed out."""
    decode_lengths: torch.Tensor
    """int64 [num_decodes]; tokens to attend to, the row's own included."""
    prefills: tuple[PrefillChunk, ...]
    plans: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """A backend's own index tensors and masks for this step, made in the first layer."""

    @property
    def num_rows(self) -> int:
        return self.kv_slots.shape[0]


class AttentionSpec(NamedTuple):
    """The shape of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies query·key."""
    sliding_window: int | None = None
    """Attend to the last so many tokens only, the row's own included; None: to all."""
    logit_softcap: float | None = None
    """Gemma 2's ``cap * tanh(score / cap)``."""


class KVLayer(NamedTuple):
    """One layer's part of the KV pool; [blocks, kv heads, block_size, head_dim] each.

    Allocated with zeros; written by `Ops.write_kv` alone.
    """

    keys: torch.Tensor
    values: torch.Tensor
