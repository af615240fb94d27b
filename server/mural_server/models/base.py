"""What the engine, the LoRA manager and the loader know of a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from mural_resolvers.base_spec import BaseSpec, ModuleKind, ModuleSpec
from mural_server.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from mural_server.layers.linear import LinearBase
from mural_server.layers.logits import LogitsProcessor
from mural_server.models.architecture import Architecture
from mural_server.models.decoder import Decoder, DecoderLayer, PreNormDecoderLayer
from mural_server.ops.base import Ops
from mural_server.ops.batch import AttentionBatch, KVLayer

__all__ = ["CausalLM"]


class CausalLM(nn.Module, ABC):
    """A decoder with a token table and an output projection.

    Module names equal Hugging Face's, but for the fused ones that ``packed_modules_mapping``
    spells out. A child may be replaced by a wrapper of the same call.
    """

    packed_modules_mapping: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }
    layer_class: ClassVar[type[DecoderLayer]] = PreNormDecoderLayer

    def __init__(self, architecture: Architecture, ops: Ops, dtype: torch.dtype) -> None:
        super().__init__()
        self.ops = ops
        self.dtype = dtype
        self.architecture = architecture
        self.num_layers = len(architecture.layers)
        self.vocab_size = architecture.vocab_size
        self.hidden_size = architecture.hidden_size
        self.max_position = architecture.max_position
        self.tie_word_embeddings = architecture.tie_word_embeddings
        self.attention_specs = tuple(
            architecture.attention_spec(layer) for layer in architecture.layers
        )
        self.model = Decoder(architecture, ops, dtype, self.layer_class)
        self.lm_head = ParallelLMHead(ops, self.hidden_size, self.vocab_size)
        self.logits_processor = LogitsProcessor(self.lm_head, architecture.final_logit_softcap)
        # Taken before any wrapper stands between; the tuple keeps it out of the module tree.
        self._base_embedding = (self.model.embed_tokens,)
        self._targets = dict(self._lora_targets())

    @classmethod
    @abstractmethod
    def describe(cls, config: PreTrainedConfig) -> Architecture:
        """Read a configuration; raise `UnsupportedModel` for what is not implemented."""

    def forward(
        self, ids: Tensor, positions: Tensor, batch: AttentionBatch, kv: Sequence[KVLayer]
    ) -> Tensor:
        """``ids``, ``positions`` int64 [rows] → hidden states [rows, hidden], normalised.

        ``kv`` has one entry a layer; this step's keys and values are written into it.
        """
        hidden: Tensor = self.model(ids, positions, batch, kv)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``hidden`` [n, hidden], cut to the rows that are sampled → logits [n, vocab]."""
        logits: Tensor = self.logits_processor(hidden)
        return logits

    def base_spec(self, names: Sequence[str], max_lora_rank: int) -> BaseSpec:
        """What an adapter may target: every linear under its unfused name, table and lm_head."""
        return BaseSpec(
            model_names=tuple(names),
            modules=dict(self._targets),
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            max_lora_rank=max_lora_rank,
            tie_word_embeddings=self.tie_word_embeddings,
        )

    def base_weight(self, module_name: str) -> Tensor | None:
        """The raw weight [vocab, hidden] of ``model.embed_tokens`` or ``lm_head``, else None.

        An untied ``lm_head`` is unpacked by multiplying the identity, which is exact.
        """
        if module_name not in ("model.embed_tokens", "lm_head"):
            return None
        if module_name == "model.embed_tokens" or self.tie_word_embeddings:
            return self._base_embedding[0].weight
        identity = torch.eye(self.hidden_size, dtype=self.dtype)
        return self.ops.linear(identity, self.lm_head.packed).t()

    def _lora_targets(self) -> list[tuple[str, ModuleSpec]]:
        targets: list[tuple[str, ModuleSpec]] = []
        for name, module in self.named_modules():
            if isinstance(module, VocabParallelEmbedding):
                spec = ModuleSpec("embedding", module.num_embeddings, module.embedding_dim)
                targets.append((name, spec))
            elif isinstance(module, LinearBase):
                kind: ModuleKind = "lm_head" if isinstance(module, ParallelLMHead) else "linear"
                targets += [
                    (member, ModuleSpec(kind, module.in_features, size))
                    for member, size in zip(
                        self.member_names(name), module.output_slices, strict=True
                    )
                ]
        return targets

    def member_names(self, name: str) -> tuple[str, ...]:
        """Hugging Face's names of what is fused into module ``name``; itself where nothing is."""
        parent, _, leaf = name.rpartition(".")
        members = self.packed_modules_mapping.get(leaf, (leaf,))
        return tuple(f"{parent}.{member}" if parent else member for member in members)
