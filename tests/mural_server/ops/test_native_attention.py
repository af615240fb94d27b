"""The compiled attention against ReferenceOps, for every instruction set that is at hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mural_server.ops import AttentionSpec, ReferenceOps
from mural_server.ops.native.attention import NativeAttention
from mural_server.ops.native.library import Isa, available, load

REFERENCE = ReferenceOps()
TOLERANCE = 5e-6
"""Absolute, for values of variance 1: all is computed in float32, whatever the pool holds."""
ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(isa not in available(), reason=f"no {isa} here"))
    for isa in ("avx2", "avx512", "avx512fp16")
]
pytestmark = [
    pytest.mark.skipif(not available(), reason="the native operators were not built"),
    pytest.mark.parametrize("isa", ISAS),
]

BATCHES: dict[str, dict[str, Any]] = {
    "one token": {"decodes": (1,)},
    "one decode": {"decodes": (37,)},
    "equal decodes": {"decodes": (48,) * 4},
    "ragged decodes": {"decodes": (1, 8, 9, 100, 64)},
    "very ragged decodes": {"decodes": (3, 1600, 7, 256, 257, 900, 12)},
    "one row chunk": {"chunks": ((0, 1),)},
    "whole prompt": {"chunks": ((0, 150),)},
    "later chunk": {"chunks": ((21, 140),)},
    "long context": {"chunks": ((700, 33),)},
    "mixed": {"decodes": (5, 40), "chunks": ((13, 200), (0, 16), (5, 1), (64, 64))},
    "padded": {"decodes": (5,), "chunks": ((3, 20),), "padding_rows": 11},
}


def compare(
    paged, isa: Isa, spec: AttentionSpec, dtype: torch.dtype = torch.float32, **shape
) -> None:
    """The blocks of the pool that no row owns hold NaN, and so does what lies behind a length."""
    step = paged(spec, dtype=dtype, **shape)
    REFERENCE.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    queries = step.queries.float()
    actual = NativeAttention(load(isa)).attend(queries, step.kv, step.batch, spec)
    expected = REFERENCE.attention(queries, step.kv, step.batch, spec)
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", BATCHES.values(), ids=BATCHES.keys())
def test_native_attention_agrees_with_the_reference(
    paged, isa: Isa, dtype: torch.dtype, shape
) -> None:
    for window in (None, 1, 20, 300):
        for softcap in (None, 3.0):
            spec = AttentionSpec(6, 2, 32, 32**-0.5, window, softcap)
            compare(paged, isa, spec, dtype, **shape)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1), (14, 2)])
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 256])
@pytest.mark.parametrize("block_size", [8, 16, 24])
def test_native_attention_agrees_over_head_shapes_and_block_sizes(
    paged, isa: Isa, heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    for window, softcap in ((None, None), (24, 5.0)):
        spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, window, softcap)
        compare(paged, isa, spec, torch.bfloat16, block_size=block_size, **BATCHES["mixed"])


def test_the_number_of_threads_changes_nothing(paged, isa: Isa) -> None:
    spec = AttentionSpec(6, 2, 32, 32**-0.5)
    step = paged(spec, **BATCHES["mixed"])
    REFERENCE.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    attention = NativeAttention(load(isa))
    before = torch.get_num_threads()
    outputs = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            outputs.append(attention.attend(step.queries, step.kv, step.batch, spec))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_large_scores_neither_overflow_nor_vanish(paged, isa: Isa) -> None:
    spec = AttentionSpec(6, 2, 32, 40.0)
    step = paged(spec, **BATCHES["mixed"])
    REFERENCE.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    actual = NativeAttention(load(isa)).attend(step.queries, step.kv, step.batch, spec)
    expected = REFERENCE.attention(step.queries, step.kv, step.batch, spec)
    # Scores of some thousands carry an error of 2^-12 each.
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-3)


def test_a_sequence_of_nan_spoils_its_own_rows_alone(paged, isa: Isa) -> None:
    spec = AttentionSpec(6, 2, 32, 32**-0.5)
    step = paged(spec, decodes=(9, 30, 17), chunks=((4, 40), (0, 33)))
    for rows in (slice(1, 2), slice(3, 43)):
        step.keys[rows], step.values[rows] = torch.nan, torch.nan
    REFERENCE.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    actual = NativeAttention(load(isa)).attend(step.queries, step.kv, step.batch, spec)
    assert actual[1].isnan().all()
    assert actual[3:43].isnan().all()
    clean = [0, 2, *range(43, 76)]
    expected = REFERENCE.attention(step.queries, step.kv, step.batch, spec)
    torch.testing.assert_close(actual[clean], expected[clean], rtol=0, atol=TOLERANCE)


def test_native_queries_may_be_a_slice_of_the_fused_projection(paged, isa: Isa) -> None:
    spec = AttentionSpec(6, 2, 16, 0.25)
    step = paged(spec, decodes=(9, 30), chunks=((4, 20),))
    fused = torch.cat((step.queries, step.keys, step.values), dim=1)
    REFERENCE.write_kv(step.kv, fused[:, 6:8], fused[:, 8:], step.batch.kv_slots)
    attention = NativeAttention(load(isa))
    expected = REFERENCE.attention(step.queries, step.kv, step.batch, spec)
    for queries in (fused[:, :6], step.queries.transpose(0, 1).contiguous().transpose(0, 1)):
        actual = attention.attend(queries, step.kv, step.batch, spec)
        torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_narrow_queries_give_a_narrow_result(paged, isa: Isa) -> None:
    spec = AttentionSpec(6, 2, 32, 32**-0.5)
    step = paged(spec, dtype=torch.bfloat16, **BATCHES["mixed"])
    REFERENCE.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    actual = NativeAttention(load(isa)).attend(step.queries, step.kv, step.batch, spec)
    expected = REFERENCE.attention(step.queries, step.kv, step.batch, spec)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-5)


def test_native_rows_of_no_sequence_come_out_as_zeros(paged, isa: Isa) -> None:
    spec = AttentionSpec(4, 2, 16, 0.25)
    step = paged(spec, decodes=(9,), chunks=((0, 5),), padding_rows=7)
    REFERENCE.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    actual = NativeAttention(load(isa)).attend(step.queries, step.kv, step.batch, spec)
    assert actual[-7:].eq(0).all()


def test_an_empty_batch_is_an_empty_result(isa: Isa, paged) -> None:
    spec = AttentionSpec(4, 2, 16, 0.25)
    step = paged(spec, decodes=(9,))
    empty = type(step.batch)(
        torch.zeros(0, dtype=torch.int64),
        0,
        torch.zeros(0, 0, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        (),
    )
    output = NativeAttention(load(isa)).attend(step.queries[:0], step.kv, empty, spec)
    assert output.shape == (0, 64)
