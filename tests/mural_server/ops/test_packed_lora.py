"""PackedOps' shrink and expand against ReferenceOps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from mural_server.ops import (
    LoRASegment,
    PackedOps,
    ReferenceOps,
    build_lora_batch,
    segments_of,
)

REFERENCE = ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16)
IN_FEATURES = 48
SLICES = {"one": (64,), "qkv": (72, 24, 24), "gate_up": (40, 40)}

MIXED_RANKS = [(0, 8), (8, 24), (24, 28), (0, 0), (28, 92), (100, 116)]
"""Slot 3 is empty; rank rows 92:100 and 116:120 belong to nobody."""

RANKS = {
    "mixed ranks": MIXED_RANKS,
    "equal ranks": [(8 * slot, 8 * slot + 8) for slot in (4, 1, 0, 9, 3, 2)],
}
FORMS = {
    "groups": {"max_gap": 200, "min_buckets": 100},
    "split groups": {"max_gap": 0, "min_buckets": 100},
    "buckets": {"min_buckets": 1},
}

ROWS = {
    "one row": segments_of([1]),
    "one base row": segments_of([-1]),
    "one adapter": segments_of([4] * 7),
    "one adapter among base rows": segments_of([-1, 2, -1, 2, 2, -1]),
    "mixed decodes": segments_of([0, 4, -1, 2, 1, 1, 5, 0, -1]),
    "decodes and chunks": [
        *segments_of([5, -1, 2, 0]),
        LoRASegment(4, 70, 1),
        LoRASegment(70, 80, 4),
        LoRASegment(80, 140, -1),
        LoRASegment(140, 141, 0),
        LoRASegment(141, 190, 2),
    ],
}


def stacks(
    outs: Sequence[int], ranks: Sequence[tuple[int, int]], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A and B of all slots; rank rows that no slot owns hold NaN, as fresh memory may."""
    total = 120
    a = torch.full((len(outs), total, IN_FEATURES), torch.nan, dtype=dtype)
    b = [torch.full((total, out), torch.nan, dtype=dtype) for out in outs]
    for lo, hi in ranks:
        a[:, lo:hi] = torch.randn(len(outs), hi - lo, IN_FEATURES).div(IN_FEATURES**0.5).to(dtype)
        for stack in b:
            stack[lo:hi] = torch.randn(hi - lo, stack.shape[1]).div(max(hi - lo, 1) ** 0.5)
    return a, b


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """bf16: one rounding to 2^-8, as in the reference; they differ where a sum lies between two."""
    tolerance = 2e-6 if actual.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outs", SLICES.values(), ids=SLICES.keys())
@pytest.mark.parametrize("segments", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_lora_agrees_with_the_reference(
    dtype: torch.dtype,
    outs: tuple[int, ...],
    segments: list[LoRASegment],
    ranks: list[tuple[int, int]],
    form: dict[str, Any],
) -> None:
    a, b = stacks(outs, ranks, dtype)
    batch = build_lora_batch(segments, ranks, **form)
    rows = segments[-1].end
    x, before = torch.randn(rows, IN_FEATURES).to(dtype), torch.randn(rows, sum(outs)).to(dtype)
    actual, expected = before.clone(), before.clone()
    PackedOps(dtype).lora(actual, x, a, b, batch)
    REFERENCE.lora(expected, x, a, b, batch)
    close(actual, expected)
    base = batch.row_slots < 0
    assert torch.equal(actual[base], before[base])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("segments", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_lora_embedding_agrees_with_the_reference(
    dtype: torch.dtype,
    segments: list[LoRASegment],
    ranks: list[tuple[int, int]],
    form: dict[str, Any],
) -> None:
    a, b = stacks((64,), ranks, dtype)
    batch = build_lora_batch(segments, ranks, **form)
    rows = segments[-1].end
    ids, before = torch.randint(IN_FEATURES, (rows,)), torch.randn(rows, 64).to(dtype)
    actual, expected = before.clone(), before.clone()
    PackedOps(dtype).lora_embedding(actual, ids, a[0], b[0], batch)
    REFERENCE.lora_embedding(expected, ids, a[0], b[0], batch)
    close(actual, expected)
    base = batch.row_slots < 0
    assert torch.equal(actual[base], before[base])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_activations_may_be_wider_than_the_stacks(form: dict[str, Any]) -> None:
    a, b = stacks((72, 24, 24), MIXED_RANKS, torch.bfloat16)
    batch = build_lora_batch(ROWS["decodes and chunks"], MIXED_RANKS, **form)
    rows = batch.row_slots.shape[0]
    x, actual = torch.randn(rows, IN_FEATURES), torch.randn(rows, 120)
    expected = actual.clone()
    PackedOps(torch.bfloat16).lora(actual, x, a, b, batch)
    REFERENCE.lora(expected, x, a, b, batch)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_whole_stack_and_a_part_of_it_shrink_alike(dtype: torch.dtype) -> None:
    outs, ranks = (72, 24, 24), [(0, 40), (40, 80), (80, 120)]
    a, b = stacks(outs, ranks, dtype)
    x = torch.randn(6, IN_FEATURES).to(dtype)
    for slots in ([0, 1, 2, 0, 1, 2], [1, 2, 1, 2, 1, 2]):
        batch = build_lora_batch(segments_of(slots), ranks)
        actual, expected = torch.zeros(2, 6, 120, dtype=dtype)
        PackedOps(dtype).lora(actual, x, a, b, batch)
        REFERENCE.lora(expected, x, a, b, batch)
        close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_absent_member_is_zero_rows_and_adds_nothing(dtype: torch.dtype) -> None:
    a, b = stacks((72, 24, 24), MIXED_RANKS, dtype)
    lo, hi = MIXED_RANKS[1]
    a[1, lo:hi], b[1][lo:hi] = 0, 0
    before = torch.randn(2, 120).to(dtype)
    after = before.clone()
    batch = build_lora_batch(segments_of([1, 0]), MIXED_RANKS)
    PackedOps(dtype).lora(after, torch.randn(2, IN_FEATURES).to(dtype), a, b, batch)
    assert torch.equal(after[0, 72:96], before[0, 72:96])
    assert not torch.equal(after[1, 72:96], before[1, 72:96])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_overflow_of_one_adapter_does_not_reach_anothers_rows(
    dtype: torch.dtype, form: dict[str, Any]
) -> None:
    ops = PackedOps(dtype)
    a, b = stacks((64,), MIXED_RANKS, dtype)
    x, before = torch.randn(3, IN_FEATURES).to(dtype), torch.randn(3, 64).to(dtype)
    batch = build_lora_batch(segments_of([0, 1, -1]), MIXED_RANKS, **form)
    calm = before.clone()
    ops.lora(calm, x, a, b, batch)
    lo, hi = MIXED_RANKS[1]
    a[0, lo:hi] = torch.finfo(dtype).max
    wild = before.clone()
    ops.lora(wild, x, a, b, batch)
    assert not wild[1].isfinite().all()
    assert torch.equal(wild[[0, 2]], calm[[0, 2]])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_base_row_next_to_an_adapters_keeps_infinities_and_nan(
    dtype: torch.dtype, form: dict[str, Any]
) -> None:
    a, b = stacks((64,), MIXED_RANKS, dtype)
    y = torch.randn(3, 64).to(dtype)
    y[1, :3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    before = y.clone()
    batch = build_lora_batch(segments_of([0, -1, 1]), MIXED_RANKS, **form)
    PackedOps(dtype).lora(y, torch.randn(3, IN_FEATURES).to(dtype), a, b, batch)
    torch.testing.assert_close(y[1], before[1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_gets_like_answers_alone_and_in_a_mix(
    dtype: torch.dtype, form: dict[str, Any]
) -> None:
    ops = PackedOps(dtype)
    a, b = stacks((72, 24, 24), MIXED_RANKS, dtype)
    slots = [0, 4, -1, 2, 1, 5]
    x = torch.randn(len(slots), IN_FEATURES).to(dtype)
    together = torch.zeros(len(slots), 120, dtype=dtype)
    ops.lora(together, x, a, b, build_lora_batch(segments_of(slots), MIXED_RANKS, **form))
    for row, slot in enumerate(slots):
        alone = torch.zeros(1, 120, dtype=dtype)
        batch = build_lora_batch(segments_of([slot]), MIXED_RANKS, **form)
        ops.lora(alone, x[row : row + 1], a, b, batch)
        close(together[row : row + 1], alone)


def test_no_adapters_leave_everything_bit_for_bit() -> None:
    a, b = stacks((64,), MIXED_RANKS, torch.float32)
    y = torch.randn(4, 64)
    y[0, 0] = -0.0
    before = y.clone()
    batch = build_lora_batch(segments_of([-1] * 4), MIXED_RANKS)
    PackedOps(torch.float32).lora(y, torch.randn(4, IN_FEATURES), a, b, batch)
    assert torch.equal(y.view(torch.int32), before.view(torch.int32))
