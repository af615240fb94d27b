"""A tokenizer that was handed over does what transformers does with the one it was made of."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    AutoTokenizer,
    GemmaTokenizer,
    LlamaTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from mural_server.models.location import default_model_path
from mural_server.models.source import load_tokenizer, tokenizer_state
from mural_server.tokenizer import ModelTokenizer, TokenizerState

CHARACTERS = "aé世🙂🧑‍🚀 \n\u0301 ß1234don't"
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<bos>", "<eos>"]
TEXT = st.lists(st.text(CHARACTERS, max_size=12) | st.sampled_from(SPECIAL), max_size=6).map(
    "".join
)


def handed_over(tokenizer: PreTrainedTokenizerBase) -> ModelTokenizer:
    """As over the border of the core's process."""
    frame = msgspec.msgpack.encode(tokenizer_state(tokenizer))
    return ModelTokenizer(msgspec.msgpack.decode(frame, type=TokenizerState))


PIECES = ["<unk>", "<s>", "</s>", "<bos>", "<eos>", "<pad>", "▁", "▁a", "a", "é", "世", "1", "d"]
PIECES += [f"<0x{byte:02X}>" for byte in range(256)]
VOCABULARY = {piece: i for i, piece in enumerate(PIECES)}
BYTES = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def truncating() -> PreTrainedTokenizerFast:
    """With what a ``tokenizer.json`` may tell besides: to cut texts and to fill them up."""
    tokenizer = Tokenizer(models.BPE(vocab=BYTES, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", pad_token="</s>")


MADE: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "llama": lambda: LlamaTokenizer(vocab=VOCABULARY, merges=[("▁", "a")]),
    "llama with an end": lambda: LlamaTokenizer(
        vocab=VOCABULARY, merges=[("▁", "a")], add_bos_token=True, add_eos_token=True
    ),
    "llama without a beginning": lambda: LlamaTokenizer(
        vocab=VOCABULARY, merges=[("▁", "a")], add_bos_token=False
    ),
    "qwen2": lambda: Qwen2Tokenizer(vocab=BYTES, merges=[]),
    "qwen2 that splits special tokens": lambda: Qwen2Tokenizer(
        vocab=BYTES, merges=[], split_special_tokens=True, eos_token="<|im_end|>"
    ),
    "gemma": lambda: GemmaTokenizer(vocab=VOCABULARY, merges=[("▁", "a")]),
    "truncating": truncating,
}
BOTH = {name: (made, handed_over(made)) for name, make in MADE.items() for made in [make()]}


@pytest.mark.parametrize("name", BOTH)
@given(text=TEXT)
@settings(max_examples=60, deadline=None)
def test_texts_become_the_same_tokens_and_those_the_same_text(name: str, text: str) -> None:
    theirs, ours = BOTH[name]
    for special in (True, False):
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, special) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)
        assert ours.names(ids) == theirs.convert_ids_to_tokens(ids)


@pytest.mark.parametrize("name", BOTH)
def test_special_tokens_are_the_same(name: str) -> None:
    theirs, ours = BOTH[name]
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.special_tokens["eos_token"] == theirs.eos_token


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_models_folder_gives_the_tokenizer_that_transformers_reads(
    family: str, tiny_model: Callable[[str], Path]
) -> None:
    path = tiny_model(family)
    theirs, ours = AutoTokenizer.from_pretrained(path), handed_over(load_tokenizer(str(path)))
    text = "grüß <|im_start|>don't\n 12345🙂"
    assert ours.encode(text, True) == theirs.encode(text)
    assert ours.chat_template == theirs.chat_template


def test_smollm2_from_its_gguf_file_is_the_same() -> None:
    path = default_model_path()
    theirs = load_tokenizer(path)
    ours = handed_over(theirs)
    for text in ("two  spaces\n\nand don't", "grüß 🖌 12345", "<|im_start|>user\nhi<|im_end|>"):
        assert ours.encode(text, True) == theirs.encode(text)
        assert ours.decode(ours.encode(text, True)) == text
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens == theirs.special_tokens_map


def test_of_several_templates_the_default_is_taken() -> None:
    tokenizer = MADE["qwen2"]()
    tokenizer.chat_template = {"tool_use": "tools", "default": "plain"}
    assert tokenizer_state(tokenizer).chat_template == "plain"
    tokenizer.chat_template = {"tool_use": "tools"}
    assert tokenizer_state(tokenizer).chat_template is None


def test_threads_may_share_one() -> None:
    """The tokenizer's thread encodes while the event loop decodes."""
    _, tokenizer = BOTH["llama"]
    text = "a é世🙂" * 2000
    expected = tokenizer.encode(text, True)
    found: list[bool] = []

    def encode() -> None:
        found.extend(tokenizer.encode(text, True) == expected for _ in range(5))

    threads = [threading.Thread(target=encode) for _ in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert tokenizer.decode(expected[:8]) == tokenizer.backend.decode(
            expected[:8], skip_special_tokens=False
        )
    assert found == [True] * 10
