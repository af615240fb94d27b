"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""

from __future__ import annotations

from torch import Tensor

from mural_server.layers.module import ForwardModule
from mural_server.ops.base import Ops

__all__ = ["RMSNorm"]


class RMSNorm(ForwardModule):
    """Normalise the last axis and multiply by ``weight``.

    Gemma's checkpoints hold ``weight - 1``; ``offset`` 1 is added once, at load.
    """

    weight: Tensor

    def __init__(self, ops: Ops, size: int, eps: float, offset: float = 0.0) -> None:
        super().__init__()
        self.ops = ops
        self.size = size
        self.eps = eps
        self.offset = offset

    def load(self, weight: Tensor) -> None:
        """Keep ``weight`` [size], the offset folded in with float32 precision, for activations."""
        if tuple(weight.shape) != (self.size,):
            raise ValueError(f"norm of shape {tuple(weight.shape)}, not ({self.size},)")
        dtype = self.ops.activation_dtype(weight.dtype)
        self.register_buffer("weight", (weight.float() + self.offset).to(dtype, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        """Any leading shape; a fresh tensor."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}, offset={self.offset}"
