"""The token table and the output projection, which may be the same matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mural_server.layers.linear import LinearBase
from mural_server.ops.base import Ops

__all__ = ["ParallelLMHead", "VocabParallelEmbedding"]


class VocabParallelEmbedding(nn.Module):
    """Token ids → rows of ``weight`` [vocab, hidden], times ``embed_scale`` where a family has one.

    ``weight`` is the checkpoint's own, without the scale. ``embed_scale`` is a scalar tensor of
    the weight's dtype, as transformers rounds it; an adapter's share is multiplied by it too.
    """

    weight: Tensor

    def __init__(
        self, ops: Ops, num_embeddings: int, embedding_dim: int, embed_scale: float | None = None
    ) -> None:
        super().__init__()
        self.ops = ops
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.embed_scale: Tensor | None = None if embed_scale is None else torch.tensor(embed_scale)

    def load(self, weight: Tensor) -> None:
        """Keep a copy of ``weight`` [vocab, hidden], which may be a view of a mapped file."""
        if tuple(weight.shape) != (self.num_embeddings, self.embedding_dim):
            raise ValueError(f"embedding of shape {tuple(weight.shape)}")
        self.register_buffer("weight", weight.clone(memory_format=torch.contiguous_format))
        if self.embed_scale is not None:
            self.embed_scale = self.embed_scale.to(weight.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` int64 [rows] → [rows, hidden], a fresh tensor of the activations' dtype."""
        hidden = F.embedding(ids, self.weight).to(self.ops.activation_dtype(self.weight.dtype))
        return hidden if self.embed_scale is None else hidden.mul_(self.embed_scale)


class ParallelLMHead(LinearBase):
    """Hidden states → logits. Tied or not it has a packed matrix of its own, which is faster.

    An untied one is exact: adapters that ship a copy of it are held to the base's own.
    """

    exact = True

    def __init__(self, ops: Ops, embedding_dim: int, num_embeddings: int) -> None:
        super().__init__(ops, embedding_dim, num_embeddings)

    def load_tied(self, table: VocabParallelEmbedding) -> None:
        """Pack the token table; a backend whose layout is the plain one shares it."""
        self.packed = self.ops.pack_linear(table.weight)
