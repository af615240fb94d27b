"""Token ids to text, one step at a time: whole characters only, and stop strings cut out."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer

__all__ = ["Decoded", "IncrementalDetokenizer", "StopStrings", "TokenText", "TokenTexts"]

CONTEXT_TOKENS = 6
"""Prompt tokens that a decoder sees before the first generated one."""
MAX_HELD_TOKENS = 8
"""A character has four bytes at most: what more tokens cannot complete is not one."""
REPLACEMENT = "\ufffd"


class TokenText(NamedTuple):
    """One token by itself, as the logprobs of the OpenAI API show it."""

    text: str
    data: bytes


class TokenTexts:
    """What the tokens of one tokenizer say; made once and shared by every sequence.

    A byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM) is known by its decoder, and its tokens are
    bytes whatever stands around them. Every other decoder is asked about tokens in context.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._backend = tokenizer
        state = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        self._kinds = {part["type"] for part in state.get("decoders", [state]) if part}
        self.is_byte_level = self._kinds == {"ByteLevel"}
        self._byte_of = _byte_of_char()
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added.items() if token.special)
        self._added = {i: token.content for i, token in added.items()}
        self._data: dict[int, bytes] = {}

    def data(self, token_id: int) -> bytes:
        """Give the bytes of a token; none for an id that the vocabulary does not have."""
        found = self._data.get(token_id)
        if found is None:
            found = self._data[token_id] = self._read(token_id)
        return found

    def token_text(self, token_id: int) -> TokenText:
        """Give a token's bytes and their text, in which half a character is a replacement."""
        data = self.data(token_id)
        return TokenText(data.decode("utf-8", "replace"), data)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Give the text of tokens that stand together, special ones included."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=False)
        return text

    def _read(self, token_id: int) -> bytes:
        name: str | None = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if self.is_byte_level:
            # The library's decoder treats added tokens alike: as they are unless all maps.
            known = all(char in self._byte_of for char in name)
            return bytes(self._byte_of[char] for char in name) if known else name.encode()
        if token_id in self._added:
            return name.encode()
        if "ByteFallback" in self._kinds and len(name) == 6 and name.startswith("<0x"):
            return bytes.fromhex(name[3:5])
        if self._kinds & {"Replace", "Metaspace"}:
            return name.replace("\u2581", " ").encode()
        return self.decode([token_id]).encode()


def _byte_of_char() -> dict[str, int]:
    """The printable stand-ins of byte-level BPE, from "Language Models are Unsupervised
    Multitask Learners" (Radford et al., 2019)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


class _CharacterStream(Protocol):
    """Tokens in, whole characters out."""

    def add(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """Give up waiting: what is no character becomes a replacement character."""
        ...


class _ByteLevelStream:
    """Exact and linear: the bytes of a sequence are those of its tokens, one after another."""

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], skipped: frozenset[int]) -> None:
        self._data = texts.data
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt of token ids may end within a character, which the output then completes.
        for token_id in prompt:
            self.add(token_id)

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._data(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """For decoders that treat a token by its neighbours (a space dropped at the start, bytes
    gathered): what the last tokens say with the new one, less what they said without it.

    The library's ``DecodeStream`` does the same, but cannot be flushed, and waits for ever, at
    a cost that grows with the square, when the bytes never make a character.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int], skipped: frozenset[int]) -> None:
        self._decode = texts.decode
        self._skipped = skipped
        self._said = [token_id for token_id in prompt if token_id not in skipped]
        self._said_text = self._decode(self._said)
        self._held: list[int] = []

    def add(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        text = self._decode(self._said + self._held)
        if text.endswith(REPLACEMENT) and len(self._held) < MAX_HELD_TOKENS:
            return ""
        return self._say(text)

    def flush(self) -> str:
        return self._say(self._decode(self._said + self._held)) if self._held else ""

    def _say(self, text: str) -> str:
        new = text[len(self._said_text) :]
        if new:
            self._said = self._held
        else:
            # Tokens that say nothing are no context by themselves, yet may open the text.
            self._said = (self._said + self._held)[:CONTEXT_TOKENS]
        self._said_text = self._decode(self._said)
        self._held = []
        return new


class _Node:
    """A state of the automaton: the longest end of the text that begins a stop string."""

    __slots__ = ("depth", "fail", "next", "stop")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.fail: _Node | None = None
        self.next: dict[str, _Node] = {}
        self.stop: str | None = None
        """The longest stop string that ends here."""


class StopStrings:
    """Finds the stop string that is complete first, reading each character once.

    The automaton of Aho and Corasick (1975). Of two that are complete with the same character
    the longer one counts. Made once per request and shared by its sequences.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self.root = _Node(0)
        for stop in stops:
            node = self.root
            for char in stop:
                node = node.next.setdefault(char, _Node(node.depth + 1))
            node.stop = stop
        self._link()

    def __bool__(self) -> bool:
        return bool(self.root.next)

    def _link(self) -> None:
        queue = list(self.root.next.values())
        for node in queue:
            node.fail = node.fail or self.root
            node.stop = node.stop or node.fail.stop
            for char, child in node.next.items():
                child.fail = self.step(node.fail, char)
                queue.append(child)

    def step(self, node: _Node, char: str) -> _Node:
        at: _Node | None = node
        while at is not None:
            following = at.next.get(char)
            if following is not None:
                return following
            at = at.fail
        return self.root


class Decoded(NamedTuple):
    """What some tokens added."""

    text: str
    num_tokens: int
    """How many of the given tokens count: all, or those up to the one that completed a stop."""
    stop: str | None
    """The stop string that was found; the sequence is over."""


class IncrementalDetokenizer:
    """The text of one sequence as its tokens come, at a constant cost per token.

    Text is held back while it is half a character or may be the beginning of a stop string.
    Put together, the pieces are what the tokenizer decodes the whole output to, cut at the first
    stop string. A stop string counts from the token after the first ``min_tokens`` on; it may
    have begun before.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        stop: StopStrings | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        skipped = texts.special if skip_special_tokens else frozenset()
        stream = _ByteLevelStream if texts.is_byte_level else _WindowStream
        self._stream: _CharacterStream = stream(texts, prompt_token_ids[-CONTEXT_TOKENS:], skipped)
        self._stops = stop if stop else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._node = stop.root if stop else _Node(0)
        self._held = ""

    def add(self, token_ids: Sequence[int]) -> Decoded:
        """Give the text that these tokens settle. Not to be called after a stop was found."""
        if self._stops is None:
            self._num_tokens += len(token_ids)
            return Decoded("".join(map(self._stream.add, token_ids)), len(token_ids), None)
        text = ""
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            piece, stop = self._watch(self._stream.add(token_id))
            text += piece
            if stop is not None:
                return Decoded(text, count, stop)
        return Decoded(text, len(token_ids), None)

    def finish(self) -> Decoded:
        """Give what was held back, now that no token will follow."""
        text = self._stream.flush()
        if self._stops is None:
            return Decoded(text, 0, None)
        piece, stop = self._watch(text)
        held, self._held = ("", "") if stop else (self._held, "")
        return Decoded(piece + held, 0, stop)

    def _watch(self, new: str) -> tuple[str, str | None]:
        """Give the text that can be no part of a stop string any more, or the stop string."""
        stops = self._stops
        assert stops is not None
        text, first = self._held + new, len(self._held)
        counts = self._num_tokens > self._min_tokens
        node = self._node
        for end, char in enumerate(new, first + 1):
            node = stops.step(node, char)
            if node.stop is None:
                continue
            if counts:
                return text[: end if self._include_stop else end - len(node.stop)], node.stop
            while not node.next and node.fail is not None:
                node = node.fail
        self._node = node
        settled = len(text) - node.depth
        self._held = text[settled:]
        return text[:settled], None
