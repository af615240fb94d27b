"""Streams in any pieces come out in whole events."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_resolvers.errors import Unavailable
from mural_router.http.chunks import LAST_CHUNK, ChunkDecoder, chunk
from mural_router.http.errors import BrokenAnswer
from mural_router.http.scan import plain_events
from mural_router.proxy.events import MAX_EVENT_BYTES, EventRelay, error_event
from mural_router.proxy.usage import UsageReader, find_usage

USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"total_tokens":9,"completion_tokens":2}}\n\n'
)
RUNNING = b'data: {"choices":[{"text":"x"}],"usage":{"prompt_tokens":7,"completion_tokens":1}}\n\n'
DONE = b"data: [DONE]\n\n"

EVENTS = st.lists(
    st.sampled_from(
        [
            b'data: {"choices":[{"text":"a"}]}\n\n',
            b'data: {"choices":[{"text":"b\\n\\n"}],"usage":null}\n\n',
            b": a comment\n\n",
            b"event: x\r\ndata: y\r\n\r\n",
            RUNNING,
        ]
    ),
    max_size=6,
)
CUTS = st.lists(st.integers(0, 100_000), max_size=10)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


def payload_of(data: bytes) -> bytes:
    decoder = ChunkDecoder()
    payload, rest = decoder.feed(data)
    assert decoder.done
    assert rest == b""
    return payload


def relayed(relay: EventRelay, writes: list[bytes], reads: list[int]) -> tuple[list[bytes], bytes]:
    """What is sent for a stream of these chunks that arrives in these pieces; and all of it."""
    raw = b"".join(map(chunk, writes)) + LAST_CHUNK
    decoder, sent = ChunkDecoder(), []
    for piece in pieces_of(raw, reads):
        whole = decoder.whole
        payload, _ = decoder.feed(piece)
        sent.append(relay.feed(piece, payload, whole and decoder.whole))
    return sent, b"".join(sent) + relay.end()


@settings(deadline=None)
@given(EVENTS, CUTS, CUTS, st.booleans())
def test_every_event_comes_out_once_and_only_the_asked_one_is_hidden(
    events: list[bytes], writes: list[int], reads: list[int], hide: bool
) -> None:
    stream = b"".join([*events, USAGE, DONE])
    relay = EventRelay(hide_usage=hide)
    _, whole = relayed(relay, pieces_of(stream, writes), reads)
    assert payload_of(whole) == b"".join([*events, *([] if hide else [USAGE]), DONE])
    assert relay.usage == (7, 2)


@settings(deadline=None)
@given(EVENTS, CUTS, CUTS)
def test_an_error_can_follow_at_any_time(
    events: list[bytes], writes: list[int], reads: list[int]
) -> None:
    relay = EventRelay(hide_usage=False)
    sent, _ = relayed(relay, pieces_of(b"".join(events), writes), reads)
    for end in range(len(sent) + 1):
        text = payload_of(b"".join(sent[:end]) + error_event(Unavailable("Gone.")))
        before, last = text[: text.rfind(b"data: ")], text[text.rfind(b"data: ") :]
        assert before == b"" or before.endswith((b"\n\n", b"\n\r\n"))
        assert json.loads(last.removeprefix(b"data: "))["error"]["message"] == "Gone."


def test_a_usual_chunk_goes_on_as_it_came() -> None:
    relay = EventRelay(hide_usage=True)
    event = b'data: {"choices":[{"text":"a"}]}\n\n'
    raw = chunk(event)
    assert relay.feed(raw, event, True) is raw


def test_an_event_without_an_end_is_bounded() -> None:
    relay = EventRelay(hide_usage=False)
    piece = b"x" * (MAX_EVENT_BYTES // 4)
    for _ in range(4):
        assert relay.feed(chunk(piece), piece, True) == b""
    with pytest.raises(BrokenAnswer):
        relay.feed(chunk(piece), piece, True)


def test_an_unfinished_last_event_is_passed_on_when_the_stream_ends_well() -> None:
    relay = EventRelay(hide_usage=False)
    assert relay.feed(chunk(b"data: x"), b"data: x", True) == b""
    assert relay.end() == chunk(b"data: x") + LAST_CHUNK


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        (b'{"usage":{"prompt_tokens":3,"completion_tokens":4}}', (3, 4)),
        (b'{"usage": {"completion_tokens": 4, "prompt_tokens": 3}}', (3, 4)),
        (b'{"usage":{"prompt_tokens":3}}', (3, 0)),
        (b'{"usage":null}', None),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":99}"}', None),
        (
            b'{"text":"\\"usage\\":{\\"prompt_tokens\\":99}","usage":{"prompt_tokens":3}}',
            (3, 0),
        ),
        (b'{"usage":{"prompt_tokens":99999999999999999999}}', None),
        (b"", None),
    ],
)
def test_what_counts_as_usage(text: bytes, usage: tuple[int, int] | None) -> None:
    assert find_usage(text) == usage


@given(CUTS)
def test_a_usage_is_read_from_any_pieces(cuts: list[int]) -> None:
    text = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":45},"more":"%b"}'
    reader = UsageReader()
    for piece in pieces_of(text % (b"x" * 2000), cuts):
        reader.feed(piece)
    assert reader.usage == (3, 45)


PIECES = st.one_of(
    st.lists(
        st.sampled_from([b'data: {"a":1}\n\n', b"data: x\r\n\r\n", DONE, USAGE, RUNNING, b"data"])
    )
    .map(lambda events: b"".join(map(chunk, events)))
    .flatmap(lambda raw: st.sampled_from([raw, raw + LAST_CHUNK, raw[:-1], raw[1:], b"0" + raw])),
    st.binary(max_size=40),
    st.text("0123456789aF\r\ndx", max_size=40).map(str.encode),
)


@pytest.mark.skipif(plain_events is None, reason="the native reader is not built")
@settings(max_examples=500, deadline=None)
@given(PIECES)
def test_what_is_passed_on_unread_is_what_would_be_passed_on(raw: bytes) -> None:
    assert plain_events is not None
    if not plain_events(raw):
        return
    decoder, relay = ChunkDecoder(), EventRelay(hide_usage=True)
    payload, rest = decoder.feed(raw)
    assert (rest, decoder.whole, decoder.done) == (b"", True, False)
    assert relay.feed(raw, payload, True) == raw
    assert (relay.held, relay.usage) == (b"", None)


@pytest.mark.skipif(plain_events is None, reason="the native reader is not built")
@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        (chunk(b"data: x\n\n"), True),
        (chunk(b"data: x\r\n\r\n") + chunk(DONE), True),
        (b"A\r\ndata: 12\n\n\r\n", True),
        (b"", False),
        (chunk(b"data: x\n"), False),
        (chunk(b"data: x") + chunk(b"\n\n"), False),
        (chunk(b"data: x\n\n")[:-1], False),
        (chunk(b"data: x\n\n") + b"5", False),
        (chunk(USAGE), False),
        (chunk(DONE) + LAST_CHUNK, False),
        (b"00000009\r\ndata: x\n\n\r\n", True),
        (b"000000009\r\ndata: x\n\n\r\n", False),
        (b"9;x=1\r\ndata: x\n\n\r\n", False),
        (b"ffffffff\r\ndata: x\n\n\r\n", False),
    ],
)
def test_a_piece_is_plain_or_not(raw: bytes, plain: bool) -> None:
    assert plain_events is not None
    assert plain_events(raw) is plain
