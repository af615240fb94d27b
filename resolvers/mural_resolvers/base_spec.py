"""What fits a base model: module names and shapes, rank limit and supported kinds, as one JSON.

The server writes it from the loaded model; whoever must judge an adapter without a model (the
CLI, the router, an upload) reads it.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from mural_resolvers.errors import InvalidInput

__all__ = ["ALL_KINDS", "BaseSpec", "ModuleKind", "ModuleSpec"]

ModuleKind = Literal["linear", "embedding", "lm_head"]
ALL_KINDS: tuple[ModuleKind, ...] = ("linear", "embedding", "lm_head")


class ModuleSpec(msgspec.Struct, frozen=True):
    """One module of the base that an adapter may target.

    A linear module or ``lm_head`` maps ``in_features`` to ``out_features``. For an embedding
    ``in_features`` is the vocabulary and ``out_features`` the hidden size.
    """

    kind: ModuleKind
    in_features: int
    out_features: int

    def __post_init__(self) -> None:
        if self.in_features <= 0 or self.out_features <= 0:
            raise ValueError("a module's features are positive")


class BaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a served base model takes; ``modules`` has Hugging Face's full dotted names.

    ``model_names`` are the names under which the base is served, the first being the main one.
    ``max_lora_rank`` is the largest rank that any module of an adapter may have.
    """

    model_names: tuple[str, ...]
    modules: dict[str, ModuleSpec]
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_lora_rank: int
    supported_kinds: tuple[ModuleKind, ...] = ALL_KINDS
    tie_word_embeddings: bool = False

    def to_json(self) -> bytes:
        """Give the canonical JSON: sorted keys, UTF-8, the same bytes for equal specs."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> BaseSpec:
        """Read ``to_json``'s form; raise ``InvalidInput`` naming what does not fit."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError) as error:
            raise InvalidInput(f"This is not a base spec: {error}.") from None
        except RecursionError:
            raise InvalidInput("This is not a base spec: it is nested too deep.") from None

    @property
    def hash(self) -> str:
        """The sha256 (hex) of the canonical JSON."""
        return hashlib.sha256(self.to_json()).hexdigest()
