"""An answer that passes by comes out as it went in, but for the usage that nobody asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_router.http.errors import BrokenAnswer
from mural_router.picker import answer
from mural_router.picker.answer import AnswerReader

TEXT = b'data: {"choices":[{"text":"a"}]}\n\n'
TRICK = rb'data: {"choices":[{"text":"\"usage\":{\"prompt_tokens\":9}"}]}' + b"\n\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\r\n\r\n"


def passed(reader: AnswerReader, text: bytes, cuts: list[int]) -> bytes:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(edges)]
    return b"".join(
        [reader.feed(piece, ends=False) for piece in pieces] + [reader.feed(b"", ends=True)]
    )


@given(
    events=st.lists(st.sampled_from([TEXT, TRICK, USAGE, DONE]), max_size=8),
    rest=st.sampled_from([b"", b"data: {", b"\n"]),
    cuts=st.lists(st.integers(0, 1000), max_size=8),
)
def test_only_the_hidden_usage_is_missing_however_the_stream_is_cut(
    events: list[bytes], rest: bytes, cuts: list[int]
) -> None:
    reader = AnswerReader(events=True, hide_usage=True)
    text = b"".join(events) + rest
    assert passed(reader, text, cuts) == b"".join(e for e in events if e != USAGE) + rest
    assert reader.usage == ((3, 2) if USAGE in events else None)


@given(text=st.binary(max_size=200), cuts=st.lists(st.integers(0, 1000), max_size=5))
@pytest.mark.parametrize(("events", "hide_usage"), [(True, False), (False, True)])
def test_what_has_nothing_to_hide_passes_as_it_comes(
    events: bool, hide_usage: bool, text: bytes, cuts: list[int]
) -> None:
    assert passed(AnswerReader(events=events, hide_usage=hide_usage), text, cuts) == text


def test_an_event_that_does_not_end_is_not_held_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(answer, "MAX_HELD_BYTES", 100)
    reader = AnswerReader(events=True, hide_usage=True)
    with pytest.raises(BrokenAnswer, match="an event does not end"):
        reader.feed(b"x" * 101, ends=False)
