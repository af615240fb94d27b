"""The compiled shrink and expand against ReferenceOps."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mural_server.ops import LoRABatch, LoRASegment, ReferenceOps, build_lora_batch, segments_of
from mural_server.ops.native.library import Isa, available, load
from mural_server.ops.native.lora import NativeLoRA

REFERENCE = ReferenceOps()
ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(isa not in available(), reason=f"no {isa} here"))
    for isa in ("avx2", "avx512", "avx512fp16")
]
pytestmark = [
    pytest.mark.skipif(not available(), reason="the native operators were not built"),
    pytest.mark.parametrize("isa", ISAS),
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SLICES = {"one": (64,), "qkv": (72, 24, 24), "gate_up": (400, 400), "odd": (3, 131)}
RANKS = {
    "mixed ranks": [(0, 8), (8, 24), (24, 27), (0, 0), (28, 92), (100, 116)],
    "equal ranks": [(8 * slot, 8 * slot + 8) for slot in (4, 1, 0, 9, 3, 2)],
    "rank one": [(3 * slot, 3 * slot + 1) for slot in (4, 1, 0, 9, 3, 2)],
}
"""Slot 3 of the first is empty; rank rows between and behind the slots' belong to nobody."""

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
    outs: Sequence[int], ranks: Sequence[tuple[int, int]], dtype: torch.dtype, in_features: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A and B of all slots; rank rows that no slot owns hold NaN, as fresh memory may."""
    total = 120
    a = torch.full((len(outs), total, in_features), torch.nan, dtype=dtype)
    b = [torch.full((total, out), torch.nan, dtype=dtype) for out in outs]
    for lo, hi in ranks:
        a[:, lo:hi] = torch.randn(len(outs), hi - lo, in_features).div(in_features**0.5).to(dtype)
        for stack in b:
            stack[lo:hi] = torch.randn(hi - lo, stack.shape[1]).div(max(hi - lo, 1) ** 0.5)
    return a, b


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outs", SLICES.values(), ids=SLICES.keys())
@pytest.mark.parametrize("ranks", RANKS.values(), ids=RANKS.keys())
@pytest.mark.parametrize("in_features", [16, 45, 576])
def test_native_lora_agrees_with_the_reference(
    isa: Isa,
    dtype: torch.dtype,
    outs: tuple[int, ...],
    ranks: list[tuple[int, int]],
    in_features: int,
) -> None:
    a, b = stacks(outs, ranks, dtype, in_features)
    native = NativeLoRA(load(isa))
    for segments in ROWS.values():
        batch = build_lora_batch(segments, ranks)
        rows = segments[-1].end
        x, before = torch.randn(rows, in_features), torch.randn(rows, sum(outs))
        actual, expected = before.clone(), before.clone()
        native.add(actual, x, a, b, batch)
        REFERENCE.lora(expected, x, a, b, batch)
        torch.testing.assert_close(actual, expected, rtol=5e-6, atol=5e-6)
        base = batch.row_slots < 0
        assert torch.equal(actual[base], before[base])


def test_narrow_activations_are_rounded_once(isa: Isa) -> None:
    a, b = stacks((72, 24), RANKS["mixed ranks"], torch.bfloat16, 48)
    batch = build_lora_batch(ROWS["decodes and chunks"], RANKS["mixed ranks"])
    x, actual = torch.randn(190, 48).bfloat16(), torch.randn(190, 96).bfloat16()
    expected = actual.clone()
    NativeLoRA(load(isa)).add(actual, x, a, b, batch)
    REFERENCE.lora(expected, x, a, b, batch)
    torch.testing.assert_close(actual, expected, rtol=8e-3, atol=8e-3)


def test_native_lora_takes_rows_that_are_apart(isa: Isa) -> None:
    a, b = stacks((72, 24), RANKS["mixed ranks"], torch.bfloat16, 48)
    batch = build_lora_batch(ROWS["mixed decodes"], RANKS["mixed ranks"])
    x, y = torch.randn(9, 100)[:, 7:55], torch.randn(9, 200)
    expected = y.clone()
    NativeLoRA(load(isa)).add(y[:, 50:146], x, a, b, batch)
    REFERENCE.lora(expected[:, 50:146], x, a, b, batch)
    torch.testing.assert_close(y, expected, rtol=5e-6, atol=5e-6)


def test_a_batch_without_rows_or_adapters_changes_nothing(isa: Isa) -> None:
    a, b = stacks((72, 24), RANKS["mixed ranks"], torch.bfloat16, 48)
    for segments in ([], segments_of([-1, -1])):
        batch = build_lora_batch(segments, RANKS["mixed ranks"])
        y = torch.randn(len(segments), 96)
        before = y.clone()
        NativeLoRA(load(isa)).add(y, torch.randn(len(segments), 48), a, b, batch)
        assert torch.equal(y, before)


def test_an_overflow_of_one_adapter_stays_in_its_own_rows(isa: Isa) -> None:
    ranks = RANKS["mixed ranks"]
    a, b = stacks((64,), ranks, torch.float32, 48)
    x, before = torch.randn(12, 48), torch.randn(12, 64)
    slots = [0, 1, -1] * 4
    batch = build_lora_batch(segments_of(slots), ranks)
    native = NativeLoRA(load(isa))
    calm, wild = before.clone(), before.clone()
    native.add(calm, x, a, b, batch)
    lo, hi = ranks[1]
    a[0, lo:hi] = torch.finfo(torch.float32).max
    native.add(wild, x, a, b, batch)
    own = torch.tensor(slots) == 1
    assert not wild[own].isfinite().all()
    assert torch.equal(wild[~own], calm[~own])


def test_nan_of_one_row_stays_in_it(isa: Isa) -> None:
    ranks = RANKS["equal ranks"]
    a, b = stacks((64,), ranks, torch.bfloat16, 48)
    x, y = torch.randn(40, 48), torch.randn(40, 64)
    x[5], y[7] = torch.nan, torch.inf
    batch = build_lora_batch(segments_of([1] * 40), ranks)
    NativeLoRA(load(isa)).add(y, x, a, b, batch)
    assert y[5].isnan().all()
    assert y[7].isinf().all()
    assert y[[row for row in range(40) if row not in (5, 7)]].isfinite().all()


def test_one_batch_serves_stacks_of_different_shapes_and_contents(isa: Isa) -> None:
    ranks = RANKS["mixed ranks"]
    batch: LoRABatch = build_lora_batch(ROWS["decodes and chunks"], ranks)
    native = NativeLoRA(load(isa))
    for outs, in_features in (((64,), 48), ((72, 24, 24), 100), ((3, 131), 16)):
        a, b = stacks(outs, ranks, torch.bfloat16, in_features)
        for _ in range(2):
            x, actual = torch.randn(190, in_features), torch.randn(190, sum(outs))
            expected = actual.clone()
            native.add(actual, x, a, b, batch)
            REFERENCE.lora(expected, x, a, b, batch)
            torch.testing.assert_close(actual, expected, rtol=5e-6, atol=5e-6)
            a[:, 8:24] *= 2  # a slot is filled anew in place


def test_a_rows_result_depends_on_no_other_row_and_on_no_thread(isa: Isa) -> None:
    ranks = RANKS["mixed ranks"]
    a, b = stacks((400, 131), ranks, torch.bfloat16, 576)
    segments = ROWS["decodes and chunks"]
    x, before = torch.randn(190, 576), torch.randn(190, 531)
    native, threads = NativeLoRA(load(isa)), torch.get_num_threads()
    together = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = before.clone()
            native.add(y, x, a, b, build_lora_batch(segments, ranks))
            together.append(y)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(together[0], together[1])
    assert torch.equal(together[0], together[2])
    for row in (0, 3, 17, 75, 189):
        slot = next(s.slot for s in segments if s.start <= row < s.end)
        alone = before[row : row + 1].clone()
        native.add(alone, x[row : row + 1], a, b, build_lora_batch(segments_of([slot]), ranks))
        assert torch.equal(alone[0], together[0][row])
