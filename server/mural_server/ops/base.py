"""The one interface behind which all hot operators stand.

A backend is chosen once at start (`select_ops`) and held to `ReferenceOps` in tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer

Activation = Literal["silu", "gelu_tanh"]


class PackedLinear:
    """A weight in the backend's own layout; opaque to everyone else."""

    __slots__ = ("bias", "in_features", "out_features", "weight")

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, in_features: int, out_features: int
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.in_features = in_features
        self.out_features = out_features


@dataclass(frozen=True, slots=True)
class LoRARun:
    """Rows of one adapter that lie side by side in the batch."""

    start: int
    end: int
    slot: int


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """Which rows of an operand belong to which adapter, in the form the operators want.

    Every layer's stack gives slot ``s`` the same rows ``rank_start[s] : rank_start[s] + rank[s]``,
    so one mask serves all layers of a step.
    """

    runs: tuple[LoRARun, ...]
    """Long runs (prefill chunks), each multiplied with its own adapter's pair."""
    mixed_end: int
    """Rows ``[0, mixed_end)`` are computed together by concatenated ranks; runs lie behind."""
    span: tuple[int, int]
    """Rank rows ``[lo, hi)`` of the stacks that the mixed rows' adapters take up."""
    mask: torch.Tensor | None
    """bool [mixed_end, hi - lo], True where a row must NOT see a rank row; None: all may."""
    rank_rows: tuple[tuple[int, int], ...]
    """Per slot the rank rows ``(start, end)``; (0, 0) for an empty slot."""
    row_slots: torch.Tensor
    """int64 [rows], the slot of each row or -1: what the reference goes by."""


class Ops(ABC):
    """Operators over CPU or device tensors. All are called under ``torch.inference_mode``."""

    name: str

    @abstractmethod
    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
        """Lay out ``weight`` [out, in] for `linear`. The caller drops its own copy."""

    @abstractmethod
    def linear(
        self, x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` [rows, in] → ``x Wᵀ (+ bias) (+ residual)`` [rows, out]."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last axis, times ``weight``; any leading shape."""

    @abstractmethod
    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``x`` [rows, heads, head_dim] (NeoX halves) by ``cos``, ``sin`` [rows, head_dim].

        ``sin``'s first half is negated by the caller once per step: the result is
        ``x * cos + roll(x, head_dim / 2) * sin``.
        """

    @abstractmethod
    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """``gate_up`` [rows, 2 * n] → ``act(gate) * up`` [rows, n]."""

    @abstractmethod
    def write_kv(
        self, kv: KVLayer, keys: torch.Tensor, values: torch.Tensor, kv_slots: torch.Tensor
    ) -> None:
        """Store ``keys`` and ``values`` [rows, kv heads, head_dim] at ``kv_slots`` [rows]."""

    @abstractmethod
    def attention(
        self, queries: torch.Tensor, kv: KVLayer, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        """Causal paged attention; this step's keys and values are in the pool already.

        ``queries`` [rows, heads, head_dim] → [rows, heads * head_dim].
        """

    @abstractmethod
    def lora(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: torch.Tensor,
        b: Sequence[torch.Tensor],
        batch: LoRABatch,
    ) -> None:
        """Shrink and expand: add each row's own adapter to ``y`` in place.

        ``y`` [rows, sum of out], ``x`` [rows, in]; ``a`` [slices, rank rows, in];
        ``b[i]`` [rank rows, out of slice i] with the scale folded in. Rows of slot -1 are
        left bit for bit as they are.
        """

    @abstractmethod
    def lora_embedding(
        self,
        y: torch.Tensor,
        ids: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        batch: LoRABatch,
    ) -> None:
        """Add ``A[:, ids]ᵀ B`` to ``y`` [rows, hidden]; ``a`` [rank rows, vocabulary]."""
