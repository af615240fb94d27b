"""From "which rows are whose" to the few products that compute a step's LoRA share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from mural_server.ops.base import LoRABatch, LoRABuckets, LoRAGroup

MIN_RUN_ROWS = 16
"""From so many adjacent rows of one adapter on, a product of their own is the cheaper form."""

MAX_GAP_RANK_ROWS = 64
"""A wider gap of other adapters' rank rows is not computed and masked, but split around."""

MIN_BUCKETS = 4
"""From so many adapters of one rank on, a batched product beats one over all their rank rows."""


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
    min_buckets: int = MIN_BUCKETS,
    device: torch.device | None = None,
) -> LoRABatch:
    """Group a step's rows.

    ``segments`` cover the rows in order and without a hole (decode rows one by one, then the
    chunks). ``rank_rows[s]`` are the rank rows of slot ``s`` in every stack, (0, 0) where the
    slot is empty; no two slots overlap. Raises ValueError for a hole and for a row of an empty
    slot: a row must never be answered without its adapter. ``min_run``, ``max_gap`` and
    ``min_buckets`` decide between forms of equal results.
    """
    runs = _merge(segments)
    for run in runs:
        if run.slot >= 0 and rank_rows[run.slot][0] == rank_rows[run.slot][1]:
            raise ValueError(f"rows {run.start}:{run.end} ask for slot {run.slot}, which is empty")
    groups: list[LoRAGroup] = []
    buckets: list[LoRABuckets] = []

    def add_short(stretch: Sequence[LoRASegment]) -> None:
        bucketed = _bucketed_slots(stretch, rank_rows, min_buckets)
        buckets.extend(_buckets(stretch, slots, rank_rows, device) for slots in bucketed)
        taken = {slot for slots in bucketed for slot in slots}
        rest = [run._replace(slot=-1) if run.slot in taken else run for run in stretch]
        groups.extend(_mixed_groups(rest, rank_rows, max_gap, device))

    stretch: list[LoRASegment] = []
    for run in runs:
        if run.end - run.start < min_run:
            stretch.append(run)
            continue
        add_short(stretch)
        stretch = []
        if run.slot >= 0:
            groups.append(LoRAGroup(run.start, run.end, *rank_rows[run.slot], mask=None))
    add_short(stretch)
    return LoRABatch(
        groups=tuple(groups),
        rank_rows=tuple(rank_rows),
        row_slots=torch.tensor(
            [run.slot for run in runs for _ in range(run.start, run.end)],
            dtype=torch.int64,
            device=device,
        ),
        buckets=tuple(buckets),
    )


def _bucketed_slots(
    runs: Sequence[LoRASegment], rank_rows: Sequence[tuple[int, int]], min_buckets: int
) -> list[list[int]]:
    """The slots of each rank that enough slots have, in the order of their rank rows."""
    by_rank: dict[int, list[int]] = {}
    for slot in sorted({run.slot for run in runs if run.slot >= 0}, key=rank_rows.__getitem__):
        lo, hi = rank_rows[slot]
        by_rank.setdefault(hi - lo, []).append(slot)
    return [slots for slots in by_rank.values() if len(slots) >= min_buckets]


def _buckets(
    runs: Sequence[LoRASegment],
    slots: Sequence[int],
    rank_rows: Sequence[tuple[int, int]],
    device: torch.device | None,
) -> LoRABuckets:
    rows_of: dict[int, list[int]] = {slot: [] for slot in slots}
    for run in runs:
        if run.slot in rows_of:
            rows_of[run.slot] += range(run.start, run.end)
    start = min(rows[0] for rows in rows_of.values())
    end = max(rows[-1] for rows in rows_of.values()) + 1
    width = max(len(rows) for rows in rows_of.values())
    held = [0] * (len(slots) * width)
    places = [len(held)] * (end - start)
    for index, rows in enumerate(rows_of.values()):
        for place, row in enumerate(rows, start=index * width):
            held[place] = row - start
            places[row - start] = place
    owned = [row for slot in slots for row in range(*rank_rows[slot])]
    side_by_side = owned[-1] - owned[0] == len(owned) - 1
    return LoRABuckets(
        start=start,
        end=end,
        slots=len(slots),
        rank=len(owned) // len(slots),
        rank_rows=slice(owned[0], owned[-1] + 1)
        if side_by_side
        else torch.tensor(owned, device=device),
        rows=torch.tensor(held, device=device),
        places=torch.tensor(places, device=device),
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
