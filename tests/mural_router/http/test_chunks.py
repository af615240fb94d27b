"""Chunked bodies in any pieces; the oracle is llhttp."""

from __future__ import annotations

from itertools import pairwise

import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_router.http.chunks import LAST_CHUNK, ChunkDecoder, ChunkError, chunk

PAYLOADS = st.lists(st.binary(min_size=1, max_size=40), max_size=6)


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[a:b] for a, b in pairwise(places)]


def decoded(pieces: list[bytes]) -> tuple[bytes, bytes, bool]:
    decoder = ChunkDecoder()
    payload = rest = b""
    for piece in pieces:
        if decoder.done:
            rest += piece
            continue
        got, rest = decoder.feed(piece)
        payload += got
    return payload, rest, decoder.done


@given(PAYLOADS, st.lists(st.integers(0, 10_000), max_size=8), st.binary(max_size=9))
def test_any_pieces_give_the_payload_and_what_follows(
    payloads: list[bytes], cuts: list[int], after: bytes
) -> None:
    data = b"".join(map(chunk, payloads)) + LAST_CHUNK + after
    assert decoded(pieces_of(data, cuts)) == (b"".join(payloads), after, True)


@given(PAYLOADS, st.lists(st.integers(0, 10_000), max_size=8))
def test_whole_says_that_a_chunk_has_just_ended(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"".join(map(chunk, payloads))
    ends = {0}
    for payload in payloads:
        ends.add(max(ends) + len(chunk(payload)))
    decoder, fed = ChunkDecoder(), 0
    for piece in pieces_of(data, cuts):
        decoder.feed(piece)
        fed += len(piece)
        assert decoder.whole is (fed in ends)


@pytest.mark.parametrize(
    "data",
    [
        b"3;a=b\r\nabc\r\n0\r\n\r\n",
        b"3 \r\nabc\r\n0\r\n\r\n",
        b" 3\r\nabc\r\n0\r\n\r\n",
        b"+3\r\nabc\r\n0\r\n\r\n",
        b"-3\r\nabc\r\n0\r\n\r\n",
        b"0x3\r\nabc\r\n0\r\n\r\n",
        b"3_0\r\nabc\r\n0\r\n\r\n",
        b"\r\nabc\r\n0\r\n\r\n",
        b"100000003\r\nabc\r\n0\r\n\r\n",
        b"FFFFFFFFFFFFFFFF\r\nabc\r\n0\r\n\r\n",
        b"3\nabc\r\n0\r\n\r\n",
        b"3\r\nabc\n0\r\n\r\n",
        b"3\r\nabcd\r\n0\r\n\r\n",
        b"3\r\nab\r\n\r\n0\r\n\r\n",
        b"3\r\nabc\r\n0\r\nx: y\r\n\r\n",
        b"3\r\nabc\r\n0\r\n\n",
        b"3\r\nabc\r\n0\n\r\n",
        b"3\r\nabc0\r\n\r\n",
        b"3\rabc\r\n",
        b"3\0\r\nabc\r\n",
        b"\xb3\r\nabc\r\n",
    ],
)
def test_improper_chunks_are_refused_however_they_come(data: bytes) -> None:
    with pytest.raises(ChunkError):
        decoded([data])
    with pytest.raises(ChunkError):
        decoded([data[i : i + 1] for i in range(len(data))])


class Heard:
    """What llhttp reads of a chunked answer."""

    def __init__(self, data: bytes) -> None:
        self.body = b""
        self.ends = 0
        httptools.HttpResponseParser(self).feed_data(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + data
        )

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ends += 1


@settings(max_examples=500, deadline=None)
@given(PAYLOADS, st.data())
def test_a_changed_byte_is_refused_or_read_alike_by_others(
    payloads: list[bytes], data: st.DataObject
) -> None:
    proper = b"".join(map(chunk, payloads)) + LAST_CHUNK
    at = data.draw(st.integers(0, len(proper) - 1))
    changed = proper[:at] + data.draw(st.binary(max_size=2)) + proper[at + 1 :]
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=4))
    try:
        payload, rest, done = decoded(pieces_of(changed, cuts))
    except ChunkError:
        return
    if not rest:
        heard = Heard(changed)
        assert (heard.body, heard.ends) == (payload, int(done))
