"""Grouping of rows: each row meets its own rank rows once, and no unowned ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mural_server.ops import LoRABatch, LoRABuckets, LoRASegment, build_lora_batch, segments_of

EIGHT = [(16 * slot, 16 * slot + 16) for slot in range(8)]


def seen(batch: LoRABatch, rows: int) -> list[list[int]]:
    """Per row the rank rows that some group or bucket shows to it, with repetitions."""
    found: list[list[int]] = [[] for _ in range(rows)]
    for group in batch.groups:
        for row in range(group.start, group.end):
            for rank_row in range(group.lo, group.hi):
                if group.mask is None or not group.mask[row - group.start, rank_row - group.lo]:
                    found[row].append(rank_row)
    for buckets in batch.buckets:
        shown = rank_rows_of(buckets)
        width = len(buckets.rows) // buckets.slots
        for index, place in enumerate(buckets.places.tolist()):
            if place < len(buckets.rows):
                assert buckets.rows[place] == index
                first = place // width * buckets.rank
                found[buckets.start + index] += shown[first : first + buckets.rank]
    return found


def rank_rows_of(buckets: LoRABuckets) -> list[int]:
    rows = buckets.rank_rows
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()


def test_no_adapters_make_no_groups() -> None:
    batch = build_lora_batch(segments_of([-1] * 5), EIGHT)
    assert batch.groups == ()
    assert batch.row_slots.tolist() == [-1] * 5
    assert build_lora_batch([], EIGHT).groups == ()


def test_one_adapter_in_all_rows_takes_its_own_rank_rows_without_a_mask() -> None:
    (group,) = build_lora_batch(segments_of([3] * 16), EIGHT).groups
    assert (group.start, group.end, group.lo, group.hi, group.mask) == (0, 16, 48, 64, None)


def test_decodes_share_a_group_and_long_chunks_have_their_own() -> None:
    segments = [*segments_of([0, 1, -1, 2]), LoRASegment(4, 68, 1), LoRASegment(68, 132, 0)]
    mixed, first, second = build_lora_batch(segments, EIGHT).groups
    assert (mixed.start, mixed.end, mixed.lo, mixed.hi) == (0, 4, 0, 48)
    assert mixed.mask is not None
    assert (first.start, first.end, first.lo, first.hi, first.mask) == (4, 68, 16, 32, None)
    assert (second.start, second.end, second.lo, second.hi) == (68, 132, 0, 16)


def test_a_wide_gap_of_others_rank_rows_is_split_around() -> None:
    near = build_lora_batch(segments_of([0, 2]), EIGHT, max_gap=16)
    far = build_lora_batch(segments_of([0, 3]), EIGHT, max_gap=16)
    assert [(g.lo, g.hi) for g in near.groups] == [(0, 48)]
    assert [(g.lo, g.hi) for g in far.groups] == [(0, 16), (48, 64)]


def test_rank_rows_that_no_slot_owns_are_never_covered() -> None:
    ranks = [(0, 8), (0, 0), (16, 24), (24, 40)]
    batch = build_lora_batch(segments_of([0, 2, 3]), ranks)
    assert [(g.lo, g.hi) for g in batch.groups] == [(0, 8), (16, 40)]


def test_scattered_rows_of_many_adapters_of_one_rank_go_into_buckets() -> None:
    batch = build_lora_batch(segments_of([-1, 2, 1, 2, -1, 0]), EIGHT, min_buckets=3)
    (buckets,) = batch.buckets
    assert batch.groups == ()
    assert (buckets.start, buckets.end, buckets.slots, buckets.rank) == (1, 6, 3, 16)
    assert buckets.rank_rows == slice(0, 48)
    assert buckets.rows.tolist() == [4, 0, 1, 0, 0, 2]
    assert buckets.places.tolist() == [4, 2, 5, 6, 0]


def test_buckets_know_rank_rows_that_do_not_lie_side_by_side() -> None:
    batch = build_lora_batch(segments_of([5, 0, 3]), EIGHT, min_buckets=3)
    (buckets,) = batch.buckets
    assert rank_rows_of(buckets) == [*range(16), *range(48, 64), *range(80, 96)]
    assert seen(batch, 3) == [list(range(80, 96)), list(range(16)), list(range(48, 64))]


def test_other_ranks_stay_in_a_group_beside_the_buckets() -> None:
    ranks = [(0, 8), (8, 16), (16, 20), (20, 28)]
    batch = build_lora_batch(segments_of([3, 2, 0, 1]), ranks, min_buckets=3)
    assert [(g.start, g.end, g.lo, g.hi, g.mask) for g in batch.groups] == [(1, 2, 16, 20, None)]
    assert [buckets.slots for buckets in batch.buckets] == [3]


def test_a_row_of_an_empty_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="slot 1, which is empty"):
        build_lora_batch(segments_of([0, 1]), [(0, 8), (0, 0)])


def test_segments_must_follow_each_other() -> None:
    with pytest.raises(ValueError, match="does not begin where the last ended"):
        build_lora_batch([LoRASegment(0, 2, 0), LoRASegment(3, 4, 0)], EIGHT)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[LoRASegment]]:
    rank_rows, at = [], 0
    for _ in range(draw(st.integers(1, 6))):
        at += draw(st.sampled_from([0, 0, 5, 60]))
        rank = draw(st.sampled_from([0, 2, 4, 8]))
        rank_rows.append((at, at + rank) if rank else (0, 0))
        at += rank
    order = draw(st.permutations(rank_rows))
    usable = [-1] + [slot for slot, (lo, hi) in enumerate(order) if hi > lo]
    segments, row = [], 0
    for _ in range(draw(st.integers(0, 12))):
        count = draw(st.sampled_from([0, 1, 1, 1, 3, 10]))
        segments.append(LoRASegment(row, row + count, draw(st.sampled_from(usable))))
        row += count
    return list(order), segments


@given(layouts(), st.integers(1, 12), st.integers(0, 20), st.integers(1, 4))
def test_every_row_sees_its_own_rank_rows_exactly_once(
    layout, min_run: int, max_gap: int, min_buckets: int
) -> None:
    rank_rows, segments = layout
    batch = build_lora_batch(
        segments, rank_rows, min_run=min_run, max_gap=max_gap, min_buckets=min_buckets
    )
    slots = [segment.slot for segment in segments for _ in range(segment.start, segment.end)]
    assert batch.row_slots.tolist() == slots
    expected = [list(range(*rank_rows[slot])) if slot >= 0 else [] for slot in slots]
    assert seen(batch, len(slots)) == expected
    owned = {row for lo, hi in rank_rows for row in range(lo, hi)}
    assert all(owned.issuperset(range(group.lo, group.hi)) for group in batch.groups)
    assert all(owned.issuperset(rank_rows_of(buckets)) for buckets in batch.buckets)
    assert all(g.mask is None or g.mask.dtype == torch.bool for g in batch.groups)
