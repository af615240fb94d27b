"""Batches over a paged pool, built sequence by sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from mural_server.ops import (
    AttentionBatch,
    AttentionSpec,
    KVLayer,
    PrefillChunk,
    ReferenceOps,
)


@dataclass
class Paged:
    """A step whose sequences' earlier tokens stand in the pool; this step's rows do not yet."""

    kv: KVLayer
    batch: AttentionBatch
    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    histories: list[tuple[torch.Tensor, torch.Tensor]]
    """Per sequence all keys and values [tokens, kv heads, head_dim], this step's included."""

    def fresh_kv(self) -> KVLayer:
        return KVLayer(self.kv.keys.clone(), self.kv.values.clone())


PagedMaker = Callable[..., Paged]


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


@pytest.fixture
def paged() -> PagedMaker:
    return make_paged


def make_paged(
    spec: AttentionSpec,
    *,
    decodes: Sequence[int] = (),
    chunks: Sequence[tuple[int, int]] = (),
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding_rows: int = 0,
    leftover: float = float("nan"),
) -> Paged:
    """``decodes``: lengths, own token included; ``chunks``: (context, tokens) each.

    Blocks are handed out at random and hold ``leftover`` from an earlier owner.
    """
    shapes = [(length - 1, 1) for length in decodes] + list(chunks)
    needed = [-(-(context + count) // block_size) for context, count in shapes]
    free = (torch.randperm(sum(needed)) + 1).tolist()
    pool_shape = (sum(needed) + 1, spec.num_kv_heads, block_size, spec.head_dim)
    kv = KVLayer(torch.zeros(pool_shape, dtype=dtype), torch.zeros(pool_shape, dtype=dtype))
    kv.keys[1:], kv.values[1:] = leftover, leftover
    tables = torch.zeros(len(decodes), max(needed[: len(decodes)], default=0), dtype=torch.int64)
    slots: list[int] = []
    prefills = []
    histories = []
    for index, ((context, count), size) in enumerate(zip(shapes, needed, strict=True)):
        blocks = [free.pop() for _ in range(size)]
        places = [
            blocks[at // block_size] * block_size + at % block_size for at in range(context + count)
        ]
        keys, values = torch.randn(2, context + count, *spec[1:3]).to(dtype)
        histories.append((keys, values))
        ReferenceOps().write_kv(
            kv, keys[:context], values[:context], torch.tensor(places[:context])
        )
        if index < len(decodes):
            tables[index, :size] = torch.tensor(blocks)
        else:
            start = len(slots)
            prefills.append(PrefillChunk(start, start + count, context, torch.tensor(blocks)))
        slots += places[context:]
    news = [
        (keys[context:], values[context:])
        for (keys, values), (context, _) in zip(histories, shapes, strict=True)
    ]
    rows = len(slots) + padding_rows
    blank = torch.zeros(padding_rows, *spec[1:3], dtype=dtype)
    return Paged(
        kv=kv,
        batch=AttentionBatch(
            # Padding rows write into block 0, behind its first token.
            kv_slots=torch.tensor(slots + [1] * padding_rows),
            num_decodes=len(decodes),
            decode_tables=tables,
            decode_lengths=torch.tensor(decodes, dtype=torch.int64),
            prefills=tuple(prefills),
        ),
        queries=torch.randn(rows, spec.num_heads, spec.head_dim).to(dtype),
        keys=torch.cat([keys for keys, _ in news] + [blank]),
        values=torch.cat([values for _, values in news] + [blank]),
        histories=histories,
    )
