"""Turns a step's plan into tensors, runs the model, and samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from mural_server.engine.messages import TokenLogprobs
from mural_server.engine.request import Request
from mural_server.engine.sampler import SampledToken, Sampler, prompt_logprobs
from mural_server.engine.scheduler import Chunk, StepPlan
from mural_server.lora.mapping import ChunkMapping, LoRAMapping
from mural_server.models.base import CausalLM
from mural_server.ops import AttentionBatch, AttentionSpec, KVLayer, PrefillChunk
from mural_server.ops.zeroed import allocate_zeroed

PROMPT_LOGPROB_ROWS = 64
"""Rows of full-vocabulary logits held at once for prompt log-probabilities."""


class AdapterMapper(Protocol):
    """What the runner wants of the adapters: which rows are whose."""

    def set_mapping(self, mapping: LoRAMapping) -> None: ...
    def set_logits_mapping(self, lora_int_ids: tuple[int, ...]) -> None: ...


class StepTensors(NamedTuple):
    ids: torch.Tensor
    positions: torch.Tensor
    batch: AttentionBatch


class SampledRow(NamedTuple):
    """A request that gets its next token from this row of the batch."""

    request: Request
    row: int


class StepResult(NamedTuple):
    sampled: list[tuple[Request, SampledToken]]
    prompt_logprobs: list[tuple[Request, list[TokenLogprobs | None]]]


def allocate_kv(
    model: CausalLM, num_blocks: int, block_size: int, dtype: torch.dtype
) -> list[KVLayer]:
    """One pool a layer, [blocks, kv heads, block_size, head_dim] for keys and for values."""

    def pool(spec: AttentionSpec) -> torch.Tensor:
        shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
        return allocate_zeroed(shape, dtype, torch.device("cpu"))[0]

    return [KVLayer(pool(spec), pool(spec)) for spec in model.attention_specs]


def kv_bytes_per_block(model: CausalLM, block_size: int, dtype: torch.dtype) -> int:
    return sum(
        2 * spec.num_kv_heads * block_size * spec.head_dim * dtype.itemsize
        for spec in model.attention_specs
    )


class ModelRunner:
    def __init__(
        self,
        model: CausalLM,
        kv: Sequence[KVLayer],
        block_size: int,
        sampler: Sampler,
        adapters: AdapterMapper | None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._sampler = sampler
        self._adapters = adapters

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        tensors = self._prepare(plan)
        sampled_rows = self._sampled_rows(plan)
        if self._adapters is not None:
            self._adapters.set_mapping(
                LoRAMapping(
                    decode_ids=tuple(request.lora_int_id for request in plan.decodes),
                    chunks=tuple(ChunkMapping(n, r.lora_int_id) for r, n in plan.prefills),
                    sampled_ids=tuple(s.request.lora_int_id for s in sampled_rows),
                )
            )
        hidden = self._model(tensors.ids, tensors.positions, tensors.batch, self._kv)
        sampled = self._sample(hidden, sampled_rows)
        return StepResult(sampled, self._prompt_logprobs(hidden, plan))

    def _prepare(self, plan: StepPlan) -> StepTensors:
        size = self._block_size
        decodes = plan.decodes
        count = len(decodes)
        ids = np.empty(plan.num_tokens, dtype=np.int64)
        positions = np.empty(plan.num_tokens, dtype=np.int64)
        kv_slots = np.empty(plan.num_tokens, dtype=np.int64)
        tables = np.zeros((count, max((len(r.blocks) for r in decodes), default=0)), dtype=np.int64)
        for row, request in enumerate(decodes):
            position = request.num_computed
            ids[row] = request.tokens[position]
            positions[row] = position
            kv_slots[row] = request.blocks[position // size] * size + position % size
            tables[row, : len(request.blocks)] = request.blocks
        prefills = []
        row = count
        for request, length in plan.prefills:
            first, last = request.num_computed, request.num_computed + length
            end = row + length
            blocks = np.asarray(request.blocks[: -(-last // size)], dtype=np.int64)
            spots = np.arange(first, last)
            ids[row:end] = request.tokens[first:last]
            positions[row:end] = spots
            kv_slots[row:end] = blocks[spots // size] * size + spots % size
            prefills.append(PrefillChunk(row, end, first, torch.from_numpy(blocks)))
            row = end
        batch = AttentionBatch(
            kv_slots=torch.from_numpy(kv_slots),
            num_decodes=count,
            decode_tables=torch.from_numpy(tables),
            decode_lengths=torch.from_numpy(positions[:count] + 1),
            prefills=tuple(prefills),
        )
        return StepTensors(torch.from_numpy(ids), torch.from_numpy(positions), batch)

    def _sampled_rows(self, plan: StepPlan) -> list[SampledRow]:
        """The last row of every request whose tokens are all computed by this step."""
        rows = []
        end = 0
        for request, count in plan.chunks:
            end += count
            if request.remaining == count:
                rows.append(SampledRow(request, end - 1))
        return rows

    def _sample(
        self, hidden: torch.Tensor, rows: Sequence[SampledRow]
    ) -> list[tuple[Request, SampledToken]]:
        if not rows:
            return []
        index = torch.tensor([sampled.row for sampled in rows])
        logits = self._model.compute_logits(hidden[index])
        tokens = self._sampler.sample(logits, [sampled.request for sampled in rows])
        return [(s.request, token) for s, token in zip(rows, tokens, strict=True)]

    def _prompt_logprobs(
        self, hidden: torch.Tensor, plan: StepPlan
    ) -> list[tuple[Request, list[TokenLogprobs | None]]]:
        found = []
        start = 0
        for chunk in plan.chunks:
            if chunk.request.wants_prompt_logprobs:
                found.append((chunk.request, self._chunk_logprobs(hidden, chunk, start)))
            start += chunk.length
        return found

    def _chunk_logprobs(
        self, hidden: torch.Tensor, chunk: Chunk, row: int
    ) -> list[TokenLogprobs | None]:
        """Log-probabilities of the prompt tokens that follow the chunk's rows, from ``row`` on."""
        request, count = chunk
        first = request.num_computed
        found: list[TokenLogprobs | None] = [None] if first == 0 else []
        targets = request.tokens[first + 1 : min(first + count + 1, request.prompt_len)]
        for start in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            wanted = targets[start : start + PROMPT_LOGPROB_ROWS]
            if self._adapters is not None:
                self._adapters.set_logits_mapping((request.lora_int_id,) * len(wanted))
            rows = hidden[row + start : row + start + len(wanted)]
            found += prompt_logprobs(
                self._model.compute_logits(rows), wanted, request.sampling.prompt_logprobs or 0
            )
        return found
