"""PackedOps.attention against ReferenceOps over decodes, chunks, windows and softcaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mural_server.ops import AttentionSpec, PackedOps, ReferenceOps
from mural_server.ops import packed_attention as forms

REFERENCE = ReferenceOps()
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 3e-2}
"""Absolute, for values of variance 1. bf16: scores and weights are rounded to 2^-8 each."""

BATCHES: dict[str, dict[str, Any]] = {
    "one token": {"decodes": (1,)},
    "one decode": {"decodes": (37,)},
    "equal decodes": {"decodes": (48,) * 4},
    "decodes": {"decodes": (1, 8, 9, 100, 64)},
    "very unequal decodes": {"decodes": (3, 1600, 7, 900, 12)},
    "one row chunk": {"chunks": ((0, 1),)},
    "whole prompt": {"chunks": ((0, 150),)},
    "later chunk": {"chunks": ((21, 140),)},
    "mixed": {"decodes": (5, 40), "chunks": ((13, 200), (0, 16), (5, 1), (64, 64))},
    "padded": {"decodes": (5,), "chunks": ((3, 20),), "padding_rows": 11},
}


def compare(paged, spec: AttentionSpec, dtype: torch.dtype, **shape) -> None:
    step = paged(spec, dtype=dtype, **shape)
    ops, kv = PackedOps(dtype), step.fresh_kv()
    ops.write_kv(kv, step.keys, step.values, step.batch.kv_slots)
    REFERENCE.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    actual = ops.attention(step.queries, kv, step.batch, spec)
    expected = REFERENCE.attention(step.queries, step.kv, step.batch, spec)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[dtype])
    again = ops.attention(step.queries, kv, step.batch, spec)
    assert torch.equal(actual, again)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("window", [None, 1, 20, 4096])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_attention_agrees_with_the_reference(
    paged, dtype: torch.dtype, shape, window: int | None, softcap: float | None
) -> None:
    spec = AttentionSpec(6, 2, 32, 32**-0.5, window, softcap)
    compare(paged, spec, dtype, **shape)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16])
def test_attention_agrees_over_head_shapes_and_block_sizes(
    paged, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    for window, softcap in ((None, None), (24, 5.0)):
        spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, window, softcap)
        compare(paged, spec, dtype, block_size=block_size, **BATCHES["mixed"])


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_the_size_of_the_query_tiles_changes_nothing(
    paged, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(forms, "QUERY_TILE", rows)
    for window in (None, 20):
        spec = AttentionSpec(6, 2, 32, 32**-0.5, window)
        compare(paged, spec, torch.float32, **BATCHES["mixed"])


def test_layers_with_and_without_a_window_share_one_batch(paged) -> None:
    whole = AttentionSpec(4, 2, 16, 0.25)
    local = whole._replace(sliding_window=6)
    step = paged(whole, decodes=(30, 3), chunks=((10, 12),))
    ops = PackedOps(torch.float32)
    ops.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    for spec in (whole, local, whole):
        torch.testing.assert_close(
            ops.attention(step.queries, step.kv, step.batch, spec),
            REFERENCE.attention(step.queries, step.kv, step.batch, spec),
            rtol=0,
            atol=5e-6,
        )


def test_queries_may_be_a_slice_of_the_fused_projection(paged) -> None:
    spec = AttentionSpec(6, 2, 16, 0.25)
    step = paged(spec, decodes=(9, 30), chunks=((4, 20),))
    fused = torch.cat((step.queries, step.keys, step.values), dim=1)
    ops, kv = PackedOps(torch.float32), step.kv
    ops.write_kv(kv, fused[:, 6:8], fused[:, 8:], step.batch.kv_slots)
    torch.testing.assert_close(
        ops.attention(fused[:, :6], kv, step.batch, spec),
        REFERENCE.attention(step.queries, kv, step.batch, spec),
        rtol=0,
        atol=5e-6,
    )


def test_queries_may_be_wider_than_the_pool(paged) -> None:
    spec = AttentionSpec(6, 2, 32, 32**-0.5)
    for shape in (BATCHES["decodes"], BATCHES["mixed"]):
        step = paged(spec, dtype=torch.bfloat16, **shape)
        ops, kv = PackedOps(torch.bfloat16), step.kv
        ops.write_kv(kv, step.keys, step.values, step.batch.kv_slots)
        queries = step.queries.float()
        actual = ops.attention(queries, kv, step.batch, spec)
        expected = REFERENCE.attention(queries, kv, step.batch, spec)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE[torch.bfloat16])


def test_rows_of_no_sequence_come_out_finite(paged) -> None:
    spec = AttentionSpec(4, 2, 16, 0.25)
    step = paged(spec, decodes=(9,), chunks=((0, 5),), padding_rows=7)
    ops = PackedOps(torch.float32)
    ops.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    assert ops.attention(step.queries, step.kv, step.batch, spec)[-7:].eq(0).all()


def test_decodes_are_split_by_length_only_where_padding_is_dear() -> None:
    assert forms._split_by_length([100, 104, 90]) == [[0, 1, 2]]
    assert forms._split_by_length([10, 2000, 12, 1990]) == [[1, 3], [0, 2]]
    assert forms._split_by_length([10, 300, 12]) == [[0, 1, 2]]
    many = forms._split_by_length([16 * n for n in range(1, 200)])
    assert sorted(row for group in many for row in group) == list(range(199))
    assert len(many) < 12
