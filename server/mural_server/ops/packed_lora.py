"""Shrink and expand from torch's own products: by groups of rows, or one bucket per adapter.

Pairs and hidden values are float32 whatever the stacks hold: in bfloat16 these small products cost
from as much (128 rows) to 2.2 times as much (one row), most of it oneDNN's fixed price per call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mural_server.ops.base import LoRABatch, LoRABuckets, LoRAGroup

__all__ = ["add_lora", "add_lora_embedding"]


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    batch: LoRABatch,
) -> None:
    """As `Ops.lora`."""
    for group in batch.groups:
        _add_group(y[group.start : group.end], x[group.start : group.end], a, b, group)
    for buckets in batch.buckets:
        rows = slice(buckets.start, buckets.end)
        _add_buckets(y[rows], x[rows], a, b, buckets)


def add_lora_embedding(
    y: torch.Tensor, ids: torch.Tensor, a: torch.Tensor, b: torch.Tensor, batch: LoRABatch
) -> None:
    """As `Ops.lora_embedding`."""
    for group in batch.groups:
        columns = a[group.lo : group.hi].index_select(1, ids[group.start : group.end])
        hidden = _hide(columns.t().float(), group.mask)
        _add(y[group.start : group.end], hidden, b[group.lo : group.hi].float())
    for buckets in batch.buckets:
        ids_by_slot = ids[buckets.start : buckets.end][buckets.rows].view(buckets.slots, 1, -1)
        pairs = _pairs(a, buckets)
        columns = pairs.gather(2, ids_by_slot.expand(-1, buckets.rank, -1))
        hidden = columns.transpose(1, 2).float()
        _expand(y[buckets.start : buckets.end], hidden, b, buckets)


def _add_group(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    group: LoRAGroup,
) -> None:
    wide = x.float()
    column = 0
    for shrink, expand in zip(a, b, strict=True):
        width = expand.shape[1]
        hidden = torch.mm(wide, shrink[group.lo : group.hi].float().t())
        hidden = _hide(hidden, group.mask)
        _add(y.narrow(1, column, width), hidden, expand[group.lo : group.hi].float())
        column += width


def _hide(hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Zero in place what is not a row's own; times 0 would turn another adapter's Inf to NaN."""
    return hidden if mask is None else hidden.masked_fill_(mask, 0.0)


def _add(y: torch.Tensor, hidden: torch.Tensor, expand: torch.Tensor) -> None:
    if y.dtype == torch.float32:
        y.addmm_(hidden, expand)
    else:
        y.add_(torch.mm(hidden, expand))


def _add_buckets(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: Sequence[torch.Tensor],
    buckets: LoRABuckets,
) -> None:
    wide = x.index_select(0, buckets.rows).float().view(buckets.slots, -1, x.shape[1])
    column = 0
    for shrink, expand in zip(a, b, strict=True):
        width = expand.shape[1]
        hidden = torch.bmm(wide, _pairs(shrink, buckets).float().transpose(1, 2))
        _expand(y.narrow(1, column, width), hidden, expand, buckets)
        column += width


def _pairs(stack: torch.Tensor, buckets: LoRABuckets) -> torch.Tensor:
    """``stack`` [rank rows, n] → [slots, rank, n], a view where the slots lie side by side."""
    rows = buckets.rank_rows
    chosen = stack[rows] if isinstance(rows, slice) else stack.index_select(0, rows)
    return chosen.view(buckets.slots, buckets.rank, -1)


def _expand(
    y: torch.Tensor, hidden: torch.Tensor, expand: torch.Tensor, buckets: LoRABuckets
) -> None:
    """Add ``hidden`` [slots, places, rank] · B to the rows that the places stand for."""
    slots, places, _ = hidden.shape
    deltas = hidden.new_empty(slots * places + 1, expand.shape[1])
    deltas[-1].zero_()  # what rows without an adapter here are given
    torch.bmm(hidden, _pairs(expand, buckets).float(), out=deltas[:-1].view(slots, places, -1))
    y.add_(deltas.index_select(0, buckets.places))
