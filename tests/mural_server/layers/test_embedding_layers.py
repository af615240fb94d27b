"""The token table, the output projection and the logits."""

from __future__ import annotations

import pytest
import torch

from mural_server.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from mural_server.layers.logits import LogitsProcessor
from mural_server.layers.norm import RMSNorm
from mural_server.ops.reference import ReferenceOps

OPS = ReferenceOps()


def test_ids_become_rows_of_the_table() -> None:
    table = VocabParallelEmbedding(OPS, 10, 4)
    weight = torch.randn(10, 4)
    table.load(weight)
    assert torch.equal(table(torch.tensor([3, 9, 3])), weight[[3, 9, 3]])


def test_the_scale_is_rounded_to_the_weights_dtype_and_not_kept_in_them() -> None:
    table = VocabParallelEmbedding(OPS, 10, 4, embed_scale=3072**0.5)
    weight = torch.randn(10, 4, dtype=torch.bfloat16)
    table.load(weight)
    assert torch.equal(table(torch.tensor([3])), weight[[3]] * torch.tensor(55.5).bfloat16())
    assert torch.equal(table.weight, weight)


def test_a_tied_projection_uses_the_table() -> None:
    table, head = VocabParallelEmbedding(OPS, 10, 4), ParallelLMHead(OPS, 4, 10)
    table.load(torch.randn(10, 4))
    head.load_tied(table)
    x = torch.randn(3, 4)
    torch.testing.assert_close(head(x), x @ table.weight.t())


def test_a_table_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        VocabParallelEmbedding(OPS, 10, 4).load(torch.randn(4, 10))


def test_logits_are_capped_where_the_family_caps_them() -> None:
    head, x = ParallelLMHead(OPS, 4, 10), torch.randn(3, 4) * 9
    weight = torch.randn(10, 4)
    head.load([weight])
    plain = x @ weight.t()
    torch.testing.assert_close(LogitsProcessor(head)(x), plain)
    torch.testing.assert_close(LogitsProcessor(head, 5.0)(x), 5.0 * torch.tanh(plain / 5.0))


def test_gemmas_norm_weights_are_folded_once_at_load() -> None:
    norm, weight, x = RMSNorm(OPS, 8, 1e-6, offset=1.0), torch.randn(8), torch.randn(3, 2, 8)
    norm.load(weight)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(norm(x), x * scale * (1.0 + weight))


def test_a_norm_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="norm of shape"):
        RMSNorm(OPS, 8, 1e-6).load(torch.ones(7))
