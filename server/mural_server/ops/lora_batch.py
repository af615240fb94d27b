"""From "which rows are whose" to the few products that compute a step's LoRA share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from mural_server.ops.base import LoRABatch, LoRAGroup

MIN_RUN_ROWS = 16
"""From so many adjacent rows of one adapter on, a product of their own is the cheaper form."""

MAX_GAP_RANK_ROWS = 64
"""A wider gap of other adapters' rank rows is not computed and masked, but split around."""


class LoRASegment(NamedTuple):
    """Rows ``[start, end)`` belong to the adapter in ``slot``; -1: to none."""

    start: int
    end: int
    slot: int


def segments_of(row_slots: Sequence[int]) -> list[LoRASegment]:
    """One segment a row; for callers that know rows only."""
    return [LoRASegment(row, row + 1, slot) for row, slot in enumerate(row_slots)]


def build_lora_batch(
    segments: Iterable[LoRASegment],
    rank_rows: Sequence[tuple[int, int]],
    *,
    min_run: int = MIN_RUN_ROWS,
    max_gap: int = MAX_GAP_RANK_ROWS,
    device: torch.device | None = None,
) -> LoRABatch:
    """Group a step's rows.

    ``segments`` cover the rows in order and without a hole (decode rows one by one, then the
    chunks). ``rank_rows[s]`` are the rank rows of slot ``s`` in every stack, (0, 0) where the
    slot is empty; no two slots overlap. Raises ValueError for a hole and for a row of an empty
    slot: a row must never be answered without its adapter.
    """
    runs = _merge(segments)
    for run in runs:
        if run.slot >= 0 and rank_rows[run.slot][0] == rank_rows[run.slot][1]:
            raise ValueError(f"rows {run.start}:{run.end} ask for slot {run.slot}, which is empty")
    groups: list[LoRAGroup] = []
    stretch: list[LoRASegment] = []
    for run in runs:
        if run.end - run.start < min_run:
            stretch.append(run)
            continue
        groups += _mixed_groups(stretch, rank_rows, max_gap, device)
        stretch = []
        if run.slot >= 0:
            groups.append(LoRAGroup(run.start, run.end, *rank_rows[run.slot], mask=None))
    groups += _mixed_groups(stretch, rank_rows, max_gap, device)
    return LoRABatch(
        groups=tuple(groups),
        rank_rows=tuple(rank_rows),
        row_slots=torch.tensor(
            [run.slot for run in runs for _ in range(run.start, run.end)],
            dtype=torch.int64,
            device=device,
        ),
    )


def _merge(segments: Iterable[LoRASegment]) -> list[LoRASegment]:
    """Join neighbours of one slot; segments without rows vanish."""
    merged: list[LoRASegment] = []
    end = 0
    for segment in segments:
        if segment.start != end or segment.end < end:
            raise ValueError(f"segment {segment} does not begin where the last ended, at {end}")
        end = segment.end
        if segment.end == segment.start:
            continue
        if merged and merged[-1].slot == segment.slot:
            merged[-1] = merged[-1]._replace(end=end)
        else:
            merged.append(segment)
    return merged


def _mixed_groups(
    runs: Sequence[LoRASegment],
    rank_rows: Sequence[tuple[int, int]],
    max_gap: int,
    device: torch.device | None,
) -> list[LoRAGroup]:
    """Groups of concatenated ranks for adjacent short runs, one for each span of rank rows."""
    slots = {run.slot for run in runs if run.slot >= 0}
    groups = []
    for span in _spans(slots, rank_rows, max_gap):
        members = [run for run in runs if run.slot in span]
        start, end = members[0].start, members[-1].end
        lo = min(rank_rows[slot][0] for slot in span)
        hi = max(rank_rows[slot][1] for slot in span)
        alone = len(span) == 1 and sum(run.end - run.start for run in members) == end - start
        mask = None
        if not alone:
            inside = [run for run in runs if run.end > start and run.start < end]
            mask = _mask(inside, span, rank_rows, lo, hi, device)
        groups.append(LoRAGroup(start, end, lo, hi, mask))
    return groups


def _spans(
    slots: set[int], rank_rows: Sequence[tuple[int, int]], max_gap: int
) -> list[frozenset[int]]:
    """Sets of slots whose rank rows lie near each other with nothing unowned in between.

    Unowned rows may hold NaN, and a hidden rank row still takes part as 0 · B.
    """
    if not slots:
        return []
    occupied = sorted((lo, hi, slot) for slot, (lo, hi) in enumerate(rank_rows) if hi > lo)
    spans: list[set[int]] = []
    reach = -1  # end of the owned rows seen so far
    open_until: int | None = None  # end of the last span, while all rows behind it are owned
    for lo, hi, slot in occupied:
        if lo != reach:
            open_until = None
        reach = hi
        if slot not in slots:
            continue
        if open_until is not None and lo - open_until <= max_gap:
            spans[-1].add(slot)
        else:
            spans.append({slot})
        open_until = hi
    return [frozenset(span) for span in spans]


def _mask(
    runs: Sequence[LoRASegment],
    span: frozenset[int],
    rank_rows: Sequence[tuple[int, int]],
    lo: int,
    hi: int,
    device: torch.device | None,
) -> torch.Tensor:
    """bool [rows of ``runs``, hi - lo], True where a rank row is not the row's own."""
    owned = [
        rank_rows[run.slot] if run.slot in span else (hi, hi)
        for run in runs
        for _ in range(run.start, run.end)
    ]
    bounds = torch.tensor(owned, device=device)
    columns = torch.arange(lo, hi, device=device)
    return (columns < bounds[:, :1]) | (columns >= bounds[:, 1:])
