"""A model's tokenizer: what it takes to use one, and what it takes to hand one over.

transformers makes it of the model's files (`mural_server.models.source`) in the engine's process.
To use it the library beneath is enough, so that the API process loads neither transformers nor
torch, which cost it half of its start.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

__all__ = ["ModelTokenizer", "TokenizerState"]


class TokenizerState(msgspec.Struct, frozen=True, kw_only=True):
    """A tokenizer on its way from one process to another."""

    backend: str
    """The tokenizers library's own JSON, as in a ``tokenizer.json``."""
    split_special_tokens: bool
    """A special token in a text is then read as any other text."""
    special_tokens: dict[str, str]
    """``bos_token`` and its like, which templates write out."""
    chat_template: str | None
    """The one called "default" where the model has several."""


class ModelTokenizer:
    """Texts to token ids and back, as transformers has them. Threads may share one: none changes
    it."""

    def __init__(self, state: TokenizerState) -> None:
        self.backend: Tokenizer = Tokenizer.from_str(state.backend)
        # A file may tell to cut or to fill up; here whoever asks is told of a prompt's length.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = state.split_special_tokens
        self.special_tokens = state.special_tokens
        self.chat_template = state.chat_template

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids, between those that the model wants around a text if asked for."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones included."""
        return self.backend.decode(ids, skip_special_tokens=False)

    def names(self, ids: Sequence[int]) -> list[str | None]:
        """The tokens as the vocabulary spells them; None for an id that it does not have."""
        return [self.backend.id_to_token(token_id) for token_id in ids]
