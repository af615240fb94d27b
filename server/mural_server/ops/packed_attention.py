"""Paged attention from torch's own kernels: what is gathered and masked is planned once a step.

A page is one (block, kv head) of the pool, block_size x head_dim numbers in a row, so that a
gather of pages yields [kv heads, tokens, head_dim] in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from mural_server.ops.batch import AttentionBatch, AttentionSpec, KVLayer, PrefillChunk

QUERY_TILE = 64
"""Prefill queries per call: keys behind a tile are left out, and masks stay 64 x context."""

KEY_ROUNDING = 16
"""Short bf16 chunks gain up to a sixth from round key counts; the mask hides the added ones."""

MAX_PADDING = 1.25
"""Decodes are split by length where padding would gather more than so many times what is there."""

MIN_SPLIT_TOKENS = 1024
"""A split costs a handful of calls a layer; it must save the gathering of so many tokens."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decode rows that are padded to one length."""

    rows: torch.Tensor | slice
    pages: torch.Tensor
    """int64 [rows * kv heads * blocks]."""
    length: int
    """Keys per row, after padding."""
    mask: torch.Tensor | None
    """[rows, 1, 1, length], 0 or -inf; None: every row sees every key."""


@dataclass(frozen=True, slots=True)
class QueryTile:
    """Rows ``[start, end)`` of the batch against keys ``[lo, hi)`` of what the chunk gathered."""

    start: int
    end: int
    lo: int
    hi: int
    mask: torch.Tensor
    """[end - start, hi - lo], 0 or -inf."""


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    pages: torch.Tensor
    """int64 [kv heads * blocks]."""
    tiles: tuple[QueryTile, ...]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[PrefillPlan, ...]
    covers_all: bool

    @property
    def decodes_only(self) -> bool:
        return self.covers_all and not self.prefills and len(self.decodes) == 1


def attention_plan(
    batch: AttentionBatch, spec: AttentionSpec, block_size: int, dtype: torch.dtype
) -> AttentionPlan:
    """The step's index tensors and masks for layers like ``spec``; made once per batch."""
    key = ("packed", spec.num_kv_heads, spec.sliding_window, block_size, dtype)
    plan = batch.plans.get(key)
    if not isinstance(plan, AttentionPlan):
        plan = _make_plan(batch, spec, block_size, dtype)
        batch.plans[key] = plan
    return plan


def _make_plan(
    batch: AttentionBatch, spec: AttentionSpec, block_size: int, dtype: torch.dtype
) -> AttentionPlan:
    covered = batch.num_decodes + sum(chunk.end - chunk.start for chunk in batch.prefills)
    return AttentionPlan(
        decodes=_plan_decodes(batch, spec, block_size, dtype),
        prefills=tuple(_plan_chunk(chunk, spec, block_size, dtype) for chunk in batch.prefills),
        covers_all=covered == batch.num_rows,
    )


def _pages(blocks: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``blocks`` [..., n] → flat pages in the order [..., kv heads, n]."""
    heads = torch.arange(num_kv_heads, device=blocks.device).unsqueeze(1)
    return (blocks.unsqueeze(-2) * num_kv_heads + heads).flatten()


def _gather(pool: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Copy ``pages`` out of ``pool`` → [pages, block_size, head_dim]."""
    _, _, block_size, head_dim = pool.shape
    rows = pool.view(-1, block_size * head_dim).index_select(0, pages)
    return rows.view(-1, block_size, head_dim)


def _plan_decodes(
    batch: AttentionBatch, spec: AttentionSpec, block_size: int, dtype: torch.dtype
) -> tuple[DecodeGroup, ...]:
    if not batch.num_decodes:
        return ()
    lengths = batch.decode_lengths
    window = spec.sliding_window
    first = (lengths - window).clamp_(min=0) // block_size if window else torch.zeros_like(lengths)
    visible = (lengths - first * block_size).tolist()
    return tuple(
        _plan_decode_group(
            rows, max(visible[row] for row in rows), batch, first, spec, block_size, dtype
        )
        for rows in _split_by_length(visible)
    )


def _split_by_length(lengths: list[int]) -> list[list[int]]:
    """Rows in groups of like length, few and with little padding."""
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    groups: list[list[int]] = []
    while order:
        longest = lengths[order[-1]]
        padded = [longest - lengths[row] for row in order]
        wasteful = sum(padded) > (MAX_PADDING - 1) * sum(lengths[row] for row in order)
        cut = 0
        if wasteful:
            # Put aside the short rows whose padding is the most: the best single cut.
            savings = [(longest - lengths[order[at - 1]]) * at for at in range(1, len(order))]
            best = max(range(len(savings)), key=savings.__getitem__, default=None)
            if best is not None and savings[best] >= MIN_SPLIT_TOKENS:
                cut = best + 1
        groups.append(sorted(order[cut:]))
        order = order[:cut]
    return groups


def _plan_decode_group(
    rows: list[int],
    length: int,
    batch: AttentionBatch,
    first_block: torch.Tensor,
    spec: AttentionSpec,
    block_size: int,
    dtype: torch.dtype,
) -> DecodeGroup:
    everyone = len(rows) == batch.num_decodes
    index: torch.Tensor | slice = slice(0, batch.num_decodes)
    if not everyone:
        index = torch.tensor(rows, device=first_block.device)
    first, lengths = first_block[index], batch.decode_lengths[index]
    count = -(-length // block_size)
    columns = first.unsqueeze(1) + torch.arange(count, device=first.device)
    tables = batch.decode_tables[index]
    blocks = tables.gather(1, columns.clamp(max=tables.shape[1] - 1))
    blocks.masked_fill_(columns * block_size >= lengths.unsqueeze(1), 0)
    positions = first.unsqueeze(1) * block_size + torch.arange(length, device=first.device)
    hidden = positions >= lengths.unsqueeze(1)
    if spec.sliding_window:
        hidden |= positions < lengths.unsqueeze(1) - spec.sliding_window
    return DecodeGroup(
        rows=index,
        pages=_pages(blocks, spec.num_kv_heads),
        length=length,
        mask=_additive(hidden, dtype)[:, None, None] if bool(hidden.any()) else None,
    )


def _additive(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    return mask.masked_fill_(hidden, float("-inf"))


def attend_decodes(
    queries: torch.Tensor, kv: KVLayer, group: DecodeGroup, spec: AttentionSpec
) -> torch.Tensor:
    """One query per sequence: ``queries`` [rows, heads, head_dim] → [rows, heads * head_dim]."""
    count = queries.shape[0]
    folded = queries.view(count, spec.num_kv_heads, -1, spec.head_dim)
    keys, values = (
        _gather(pool, group.pages).view(count, spec.num_kv_heads, -1, spec.head_dim)[
            :, :, : group.length
        ]
        for pool in kv
    )
    return _attend(folded, keys, values, group.mask, spec).reshape(count, -1)


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    spec: AttentionSpec,
) -> torch.Tensor:
    """[n, heads, queries, head_dim] over [n, heads, keys, head_dim]."""
    if spec.logit_softcap is None:
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=spec.scale
        )
    scores = (queries * spec.scale) @ keys.transpose(-2, -1)
    scores.div_(spec.logit_softcap).tanh_().mul_(spec.logit_softcap)
    if mask is not None:
        scores += mask
    return scores.softmax(-1) @ values


def _plan_chunk(
    chunk: PrefillChunk, spec: AttentionSpec, block_size: int, dtype: torch.dtype
) -> PrefillPlan:
    count = chunk.end - chunk.start
    window = spec.sliding_window
    skipped = max(0, chunk.context + 1 - window) // block_size if window else 0
    base = skipped * block_size
    tiles = []
    end_of_keys = 0
    for first in range(0, count, QUERY_TILE):
        last = min(first + QUERY_TILE, count)
        earliest = chunk.context + first - base  # position of the tile's first query
        lo = max(0, earliest + 1 - window) if window else 0
        hi = lo + _round_up(chunk.context + last - base - lo, KEY_ROUNDING)
        end_of_keys = max(end_of_keys, hi)
        tiles.append(
            QueryTile(
                start=chunk.start + first,
                end=chunk.start + last,
                lo=lo,
                hi=hi,
                mask=_tile_mask(earliest, last - first, lo, hi, window, dtype, chunk.blocks.device),
            )
        )
    blocks = chunk.blocks[skipped:]
    missing = -(-end_of_keys // block_size) - blocks.shape[0]
    if missing > 0:
        # Block 0 belongs to nobody and holds nothing but zeros and padding rows' finite keys.
        blocks = F.pad(blocks, (0, missing))
    return PrefillPlan(pages=_pages(blocks, spec.num_kv_heads), tiles=tuple(tiles))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _tile_mask(
    earliest: int,
    count: int,
    lo: int,
    hi: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Queries ``earliest + [0, count)`` over keys ``[lo, hi)``: [count, hi - lo]."""
    keys = torch.arange(lo, hi, device=device)
    queries = torch.arange(earliest, earliest + count, device=device).unsqueeze(1)
    hidden = keys > queries
    if window:
        hidden |= queries - keys >= window
    return _additive(hidden, dtype)


def attend_chunk(
    queries: torch.Tensor,
    kv: KVLayer,
    plan: PrefillPlan,
    spec: AttentionSpec,
    output: torch.Tensor,
) -> None:
    """One chunk; writes its rows of ``output`` [rows, heads * head_dim].

    KV heads stand as the batch and their query heads as the heads of the call, so that keys and
    values are expanded views and nothing but the result is copied.
    """
    shape = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, -1, spec.head_dim)
    keys, values = (
        _gather(pool, plan.pages).view(shape[0], 1, -1, shape[3]).expand(shape) for pool in kv
    )
    for tile in plan.tiles:
        count = tile.end - tile.start
        rows = queries[tile.start : tile.end].view(count, shape[0], shape[1], shape[3])
        mixed = _attend(
            rows.permute(1, 2, 0, 3),
            keys[:, :, tile.lo : tile.hi],
            values[:, :, tile.lo : tile.hi],
            tile.mask,
            spec,
        )
        output[tile.start : tile.end].view(rows.shape).copy_(mixed.permute(2, 0, 1, 3))
