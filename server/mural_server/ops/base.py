"""The one interface behind which all hot operators stand.

A backend is chosen once at start (`select_ops`) and held to `ReferenceOps` in tests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer

Activation = Literal["silu", "gelu_tanh"]


class PackedLinear:
    """A weight in the backend's own layout; opaque to everyone else."""

    __slots__ = ("bias", "in_features", "out_features", "weight")

    def __init__(
        self,
        weight: torch.Tensor | torch.ScriptObject,
        bias: torch.Tensor | None,
        in_features: int,
        out_features: int,
    ) -> None:
        self.weight = weight
        self.bias = bias
        self.in_features = in_features
        self.out_features = out_features


@dataclass(frozen=True, slots=True)
class LoRAGroup:
    """Rows ``[start, end)`` that are multiplied with rank rows ``[lo, hi)`` in one go.

    A long run of one adapter's rows (a prefill chunk) is a group with that adapter's rank rows
    and no mask; the short ones (decodes) share a group over their adapters' rank rows, in which
    the mask hides from each row what is not its own.
    """

    start: int
    end: int
    lo: int
    hi: int
    mask: torch.Tensor | None
    """bool [end - start, hi - lo], True where a row must NOT see a rank row; None: all see all."""


@dataclass(frozen=True, slots=True)
class LoRABuckets:
    """Scattered rows of several adapters of one rank, brought together adapter by adapter.

    Every slot has as many places as its busiest one has rows, so that the products of all slots
    are one batched call, in which no row meets another adapter's pair.
    """

    start: int
    end: int
    """Rows ``[start, end)`` of the operand; the indices below count from ``start``."""
    slots: int
    rank: int
    rank_rows: slice | torch.Tensor
    """Of all slots in turn: a slice of ``slots * rank``, or int64 indices."""
    rows: torch.Tensor
    """int64 [slots * places], the row that each place holds; row 0 where it holds none."""
    places: torch.Tensor
    """int64 [end - start], the place of each row; ``slots * places`` for a row that has none."""


@dataclass(frozen=True, slots=True)
class LoRABatch:
    """Which rows of an operand belong to which adapter; made by `build_lora_batch`.

    Every layer's stack gives slot ``s`` the same rank rows, so one object serves all layers of
    a step. Rank rows that no slot owns may hold anything, NaN included: no group covers them.
    Without groups and buckets no row has an adapter.
    """

    groups: tuple[LoRAGroup, ...]
    """Each row's own rank rows are in exactly one of its groups and ``buckets``."""
    rank_rows: tuple[tuple[int, int], ...]
    """Per slot the rank rows ``(start, end)``; (0, 0) for an empty slot."""
    row_slots: torch.Tensor
    """int64 [rows], the slot of each row or -1."""
    buckets: tuple[LoRABuckets, ...] = ()
    plans: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """What a backend derives from it for this step, made in the first layer."""


class Ops(ABC):
    """Operators over CPU or device tensors. All are called under ``torch.inference_mode``.

    Results have the dtype of the hidden states that go in, which may be wider than the weights'.
    """

    name: str

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What hidden states are kept in under weights (and a KV pool) of ``dtype``."""
        return dtype

    def stack_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What `lora` wants the stacks of a model of ``dtype`` in; adapters are read in ``dtype``.

        The activations' here: a product that is to be computed in it is spared the widening.
        """
        return self.activation_dtype(dtype)

    @abstractmethod
    def pack_linear(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, exact: bool = False
    ) -> PackedLinear:
        """Lay out ``weight`` [out, in] for `linear`. The caller drops its own copy.

        ``exact``: `linear` of an identity matrix must give the weight back bit for bit.
        """

    @abstractmethod
    def linear(
        self, x: torch.Tensor, packed: PackedLinear, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``x`` [rows, in] → ``x Wᵀ (+ bias) (+ residual)`` [rows, out] in ``x``'s dtype."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Root-mean-square norm over the last axis, times ``weight``; any leading shape.

        ``weight`` may be wider than ``x`` (Gemma's ``1 + w`` in float32); the result has
        ``x``'s dtype.
        """

    @abstractmethod
    def rotary(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate ``x`` [rows, heads, head_dim] (NeoX halves) by ``cos``, ``sin`` [rows, head_dim].

        ``sin``'s first half is negated by the caller once per step: the result is
        ``x * cos + roll(x, head_dim / 2) * sin``.
        """

    @abstractmethod
    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """``gate_up`` [rows, 2 * n] → ``act(gate) * up`` [rows, n]."""

    def gated_linear(
        self, x: torch.Tensor, packed: PackedLinear, activation: Activation
    ) -> torch.Tensor:
        """`gated` of `linear`: ``x`` [rows, in] → [rows, out / 2]."""
        return self.gated(self.linear(x, packed), activation)

    @abstractmethod
    def write_kv(
        self, kv: KVLayer, keys: torch.Tensor, values: torch.Tensor, kv_slots: torch.Tensor
    ) -> None:
        """Store ``keys`` and ``values`` [rows, kv heads, head_dim] at ``kv_slots`` [rows].

        A block whose first token is written is cleared first: what an earlier owner left there
        (NaN, at worst) must not reach a later one even multiplied by zero.
        """

    def rotary_and_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv: KVLayer,
        kv_slots: torch.Tensor,
    ) -> torch.Tensor:
        """`rotary` and `write_kv` of one layer: rotated queries [rows, heads, head_dim].

        ``qkv`` [rows, heads + 2 * kv heads, head_dim]: queries, keys, values, not rotated.
        """
        num_kv_heads = kv.keys.shape[1]
        keys_end = qkv.shape[1] - num_kv_heads
        # Queries and keys lie side by side: one call turns both.
        turned = self.rotary(qkv[:, :keys_end], cos, sin)
        heads = keys_end - num_kv_heads
        self.write_kv(kv, turned[:, heads:], qkv[:, keys_end:], kv_slots)
        return turned[:, :heads]

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
        ``b[i]`` [rank rows, out of slice i] with the scale folded in. ``a`` and ``b`` are finite
        in every rank row that a slot owns. Rows of slot -1 keep their values (+0.0 may be added
        to them). ``x`` and ``y`` have one dtype, ``a`` and ``b`` have one.
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
