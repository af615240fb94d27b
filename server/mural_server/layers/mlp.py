"""The gated feed-forward block (SwiGLU, GeGLU; Shazeer, arXiv 2002.05202)."""

from __future__ import annotations

from torch import Tensor

from mural_server.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from mural_server.layers.module import ForwardModule
from mural_server.ops.base import Activation, Ops

__all__ = ["GatedMLP"]


class GatedMLP(ForwardModule):
    """``down(act(gate(x)) * up(x))``."""

    def __init__(
        self, ops: Ops, hidden_size: int, intermediate_size: int, activation: Activation, bias: bool
    ) -> None:
        super().__init__()
        self.ops = ops
        self.activation: Activation = activation
        self.gate_up_proj = MergedColumnParallelLinear(
            ops, hidden_size, (intermediate_size, intermediate_size), bias
        )
        self.down_proj = RowParallelLinear(ops, intermediate_size, hidden_size, bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """``x`` [rows, hidden] → [rows, hidden], plus ``residual`` where given."""
        gated = self.gate_up_proj.gated(x, self.activation)
        y: Tensor = self.down_proj(gated, residual)
        return y
