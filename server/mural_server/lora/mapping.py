"""Which rows of a step are whose adapter's, as the engine says it: by `lora_int_id`, 0 for none."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ChunkMapping", "LoRAMapping"]


@dataclass(frozen=True, slots=True)
class ChunkMapping:
    """A prefill chunk: consecutive rows of one sequence."""

    num_rows: int
    lora_id: int


@dataclass(frozen=True, slots=True)
class LoRAMapping:
    """The rows of a step in order: one per running sequence, then the prefill chunks."""

    decode_ids: tuple[int, ...] = ()
    """The adapter of each decode row."""
    chunks: tuple[ChunkMapping, ...] = ()
    """The chunks behind them; padding rows are a chunk of id 0."""
    sampled_ids: tuple[int, ...] = ()
    """The adapter of each row that is given to ``compute_logits``, in that order."""

    @property
    def num_rows(self) -> int:
        return len(self.decode_ids) + sum(chunk.num_rows for chunk in self.chunks)

    @property
    def lora_ids(self) -> frozenset[int]:
        """The distinct adapters of the step."""
        ids = {*self.decode_ids, *self.sampled_ids, *(chunk.lora_id for chunk in self.chunks)}
        return frozenset(ids - {0})
