"""Linear layers over packed weights, under the names that tensor parallelism gives them.

The parallel size is 1 here: `ColumnParallelLinear` and `RowParallelLinear` differ in which axis a
larger one would split, and in nothing else yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mural_server.layers.module import ForwardModule
from mural_server.ops.base import Activation, Ops, PackedLinear

__all__ = [
    "ColumnParallelLinear",
    "LinearBase",
    "MergedColumnParallelLinear",
    "QKVParallelLinear",
    "ReplicatedLinear",
    "RowParallelLinear",
]


class LinearBase(ForwardModule):
    """``y = x Wᵀ (+ bias)`` with the weight in the backend's own layout.

    ``output_slices`` has the output sizes of the members fused into this layer, in order; a plain
    layer has one. ``packed`` exists once `load` has run.
    """

    packed: PackedLinear
    exact = False
    """The weight can be read back bit for bit from the packed one."""

    def __init__(
        self,
        ops: Ops,
        in_features: int,
        out_features: int,
        bias: bool = False,
        output_slices: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.output_slices = output_slices or (out_features,)
        if sum(self.output_slices) != out_features:
            raise ValueError(f"slices {self.output_slices} do not add up to {out_features}")

    def load(self, weights: Sequence[Tensor], biases: Sequence[Tensor] = ()) -> None:
        """Fuse the members' ``weights`` [out, in] and ``biases`` [out] in order, and pack them.

        The arguments may be views of a mapped file: nothing of them is kept.
        """
        shapes = tuple(tuple(weight.shape) for weight in weights)
        if shapes != tuple((size, self.in_features) for size in self.output_slices):
            raise ValueError(f"weights {shapes} do not fit {self.output_slices}")
        if len(biases) != (len(weights) if self.has_bias else 0):
            raise ValueError(f"{len(biases)} biases for {len(weights)} weights")
        bias = torch.cat(tuple(biases)) if biases else None
        self.packed = self.ops.pack_linear(torch.cat(tuple(weights)), bias, exact=self.exact)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``x`` [rows, in] → [rows, out], plus ``residual`` [rows, out] where given."""
        return self.ops.linear(x, self.packed, residual)

    def extra_repr(self) -> str:
        return f"in={self.in_features}, out={self.output_slices}, bias={self.has_bias}"


class ReplicatedLinear(LinearBase):
    """A linear layer that every rank holds whole."""


class ColumnParallelLinear(LinearBase):
    """A linear layer that is split along its outputs."""


class RowParallelLinear(LinearBase):
    """A linear layer that is split along its inputs."""


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel layers of one input, computed as one; gate and up of an MLP."""

    def __init__(
        self, ops: Ops, in_features: int, output_sizes: Sequence[int], bias: bool = False
    ) -> None:
        super().__init__(ops, in_features, sum(output_sizes), bias, tuple(output_sizes))

    def gated(self, x: Tensor, activation: Activation) -> Tensor:
        """``x`` [rows, in] → ``act(gate) * up`` [rows, out / 2]; the slices are gate and up."""
        return self.ops.gated_linear(x, self.packed, activation)


class QKVParallelLinear(ColumnParallelLinear):
    """The query, key and value projections as one; heads lie in this order: all q, k, v."""

    def __init__(
        self,
        ops: Ops,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
    ) -> None:
        sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        super().__init__(ops, hidden_size, sum(sizes), bias, sizes)
