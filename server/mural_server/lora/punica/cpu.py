"""The wrapper over a backend's `Ops`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from mural_server.lora.mapping import LoRAMapping
from mural_server.lora.punica.base import PunicaWrapper
from mural_server.lora.punica.kernel_meta import LoRAKernelMeta
from mural_server.lora.rank_rows import RankRows
from mural_server.lora.stack import LoRAStack
from mural_server.ops.base import LoRABatch, Ops
from mural_server.ops.lora_batch import LoRASegment, build_lora_batch

__all__ = ["PunicaWrapperCPU"]


class PunicaWrapperCPU(PunicaWrapper):
    """Groups the rows once per mapping; a layer's call is one operator."""

    def __init__(self, ops: Ops, max_rows: int, max_loras: int, device: torch.device) -> None:
        super().__init__()
        self._ops = ops
        self._device = device
        self._token_meta = _LazyMeta(LoRAKernelMeta(max_rows, max_loras, device))
        self._logits_meta = _LazyMeta(LoRAKernelMeta(max_rows, max_loras, device))
        self._rows = build_lora_batch((), ())
        self._logits_rows = self._rows

    @property
    def token_meta(self) -> LoRAKernelMeta:
        return self._token_meta.get(self._rows)

    @property
    def logits_meta(self) -> LoRAKernelMeta:
        return self._logits_meta.get(self._logits_rows)

    def update_metadata(
        self, mapping: LoRAMapping, slot_of: dict[int, int], rank_rows: Sequence[RankRows]
    ) -> None:
        segments = _segments(mapping, slot_of)
        self._rows = self._batch(segments, rank_rows)
        self.active_slots = _bits(segments)
        self.update_logits_metadata(mapping.sampled_ids, slot_of, rank_rows)

    def update_logits_metadata(
        self, lora_ids: Sequence[int], slot_of: dict[int, int], rank_rows: Sequence[RankRows]
    ) -> None:
        segments = [
            LoRASegment(row, row + 1, _slot(lora_id, slot_of))
            for row, lora_id in enumerate(lora_ids)
        ]
        self._logits_rows = self._batch(segments, rank_rows)
        self.active_logits_slots = _bits(segments)

    def _batch(self, segments: Iterable[LoRASegment], rank_rows: Sequence[RankRows]) -> LoRABatch:
        return build_lora_batch(segments, rank_rows, device=self._device)

    def add_lora_linear(self, y: torch.Tensor, x: torch.Tensor, stack: LoRAStack) -> None:
        self._ops.lora(y, x, stack.a, stack.b, self._rows)

    def add_lora_embedding(self, y: torch.Tensor, ids: torch.Tensor, stack: LoRAStack) -> None:
        self._ops.lora_embedding(y, ids, stack.a[0], stack.b[0], self._rows)

    def add_lora_logits(self, y: torch.Tensor, x: torch.Tensor, stack: LoRAStack) -> None:
        self._ops.lora(y, x, stack.a, stack.b, self._logits_rows)


class _LazyMeta:
    """Index tensors that are worked out when asked for: the CPU's operators go by the groups."""

    def __init__(self, meta: LoRAKernelMeta) -> None:
        self._meta = meta
        self._batch: LoRABatch | None = None

    def get(self, batch: LoRABatch) -> LoRAKernelMeta:
        if batch is not self._batch:
            self._meta.prepare_tensors(batch.row_slots)
            self._batch = batch
        return self._meta


def _segments(mapping: LoRAMapping, slot_of: dict[int, int]) -> list[LoRASegment]:
    segments = [
        LoRASegment(row, row + 1, _slot(lora_id, slot_of))
        for row, lora_id in enumerate(mapping.decode_ids)
    ]
    row = len(segments)
    for chunk in mapping.chunks:
        segments.append(LoRASegment(row, row + chunk.num_rows, _slot(chunk.lora_id, slot_of)))
        row += chunk.num_rows
    return segments


def _slot(lora_id: int, slot_of: dict[int, int]) -> int:
    return slot_of[lora_id] if lora_id else -1


def _bits(segments: Iterable[LoRASegment]) -> int:
    bits = 0
    for slot in {segment.slot for segment in segments if segment.end > segment.start}:
        if slot >= 0:
            bits |= 1 << slot
    return bits
