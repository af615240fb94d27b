"""From hidden states to logits."""

from __future__ import annotations

from torch import Tensor, nn

from mural_server.layers.embedding import ParallelLMHead

__all__ = ["LogitsProcessor"]


class LogitsProcessor(nn.Module):
    """The output projection and what follows it; an adapter on ``lm_head`` wraps this module.

    ``softcap`` is Gemma's ``cap * tanh(logits / cap)``.
    """

    def __init__(self, lm_head: ParallelLMHead, softcap: float | None = None) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.softcap = softcap

    def forward(self, hidden: Tensor) -> Tensor:
        """``hidden`` [n, hidden], only the rows that are sampled → logits [n, vocab]."""
        logits: Tensor = self.lm_head(hidden)
        return self.cap(logits)

    def cap(self, logits: Tensor) -> Tensor:
        """Apply the softcap in place; what a wrapper does last, after the adapter's share."""
        if self.softcap is None:
            return logits
        return logits.div_(self.softcap).tanh_().mul_(self.softcap)
