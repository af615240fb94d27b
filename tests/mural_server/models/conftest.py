"""A paged KV pool and a batch builder: what the engine does, in thirty lines."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from mural_server.models.base import CausalLM
from mural_server.models.loader import load_model
from mural_server.ops.base import Ops
from mural_server.ops.batch import AttentionBatch, KVLayer, PrefillChunk
from mural_server.ops.select import select_ops

BLOCK_SIZE = 8
NUM_BLOCKS = 96


@dataclass
class PagedSequence:
    tokens: list[int]
    computed: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedRunner:
    """Runs chunks of sequences in shared steps; the pool starts out full of another's garbage."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        generator = torch.Generator().manual_seed(7)
        self.kv = [
            KVLayer(*(self._garbage(spec.num_kv_heads, spec.head_dim, generator) for _ in "kv"))
            for spec in model.attention_specs
        ]
        self.free = list(range(1, NUM_BLOCKS))
        random.Random(3).shuffle(self.free)

    def step(self, work: Sequence[tuple[PagedSequence, int]]) -> list[torch.Tensor]:
        """Compute the next ``count`` tokens of each sequence; logits [count, vocab] of each.

        Sequences with a count of 1 are decodes, the others prefill chunks.
        """
        decodes = [item for item in work if item[1] == 1]
        chunks = [item for item in work if item[1] > 1]
        ordered = [*decodes, *chunks]
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        prefills: list[PrefillChunk] = []
        for sequence, count in ordered:
            start, end = sequence.computed, sequence.computed + count
            while len(sequence.blocks) * BLOCK_SIZE < end:
                sequence.blocks.append(self.free.pop())
            if count > 1:
                row = len(ids)
                blocks = torch.tensor(sequence.blocks)
                prefills.append(PrefillChunk(row, row + count, start, blocks))
            ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [
                sequence.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                for at in range(start, end)
            ]
            sequence.computed = end
        batch = AttentionBatch(
            kv_slots=torch.tensor(slots),
            num_decodes=len(decodes),
            decode_tables=_padded([sequence.blocks for sequence, _ in decodes]),
            decode_lengths=torch.tensor([sequence.computed for sequence, _ in decodes]).long(),
            prefills=tuple(prefills),
        )
        with torch.inference_mode():
            hidden = self.model(torch.tensor(ids), torch.tensor(positions), batch, self.kv)
            logits = self.model.compute_logits(hidden)
        parts = logits.split([count for _, count in ordered])
        by_sequence = {
            id(sequence): part for (sequence, _), part in zip(ordered, parts, strict=True)
        }
        return [by_sequence[id(sequence)] for sequence, _ in work]

    def _garbage(self, heads: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
        shape = (NUM_BLOCKS, heads, BLOCK_SIZE, head_dim)
        return torch.randn(shape, generator=generator).mul_(4).to(self.model.dtype)


def _padded(tables: list[list[int]]) -> torch.Tensor:
    width = max((len(table) for table in tables), default=1)
    rows = [table + [0] * (width - len(table)) for table in tables]
    return torch.tensor(rows, dtype=torch.long).reshape(len(tables), width)


@pytest.fixture(params=["reference", "packed"])
def make_ops(request: pytest.FixtureRequest) -> Callable[[torch.dtype], Ops]:
    return lambda dtype: select_ops(dtype, wanted=request.param).ops


@pytest.fixture
def load(make_ops: Callable[[torch.dtype], Ops]) -> Callable[..., CausalLM]:
    def load_at(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
        return load_model(str(path), dtype=dtype, ops=make_ops(dtype))

    return load_at


@pytest.fixture
def paged() -> Callable[[CausalLM], PagedRunner]:
    return PagedRunner


@pytest.fixture
def new_sequence() -> Callable[[Sequence[int]], PagedSequence]:
    return lambda tokens: PagedSequence(list(tokens))


@pytest.fixture(scope="session")
def oracle_logits() -> Callable[..., torch.Tensor]:
    """transformers' logits [tokens, vocab] of one sequence, computed whole, without a cache."""
    from transformers import AutoModelForCausalLM

    loaded: dict[tuple[str, torch.dtype], AutoModelForCausalLM] = {}

    def logits(
        path: Path, tokens: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        key = (str(path), dtype)
        if key not in loaded:
            folder, file = (path.parent, path.name) if path.suffix == ".gguf" else (path, None)
            loaded[key] = AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=file, dtype=dtype, attn_implementation="eager"
            ).eval()
        with torch.inference_mode():
            return loaded[key](torch.tensor([list(tokens)]), use_cache=False).logits[0]

    return logits
