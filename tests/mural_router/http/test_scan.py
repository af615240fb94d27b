"""What the native reader accepts, those in Python accept and read alike: by properties."""

from __future__ import annotations

import re
from random import Random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mural_router.http.head import END
from mural_router.proxy.relay import _NOT_PASSED_ON
from mural_router.routing.ask import HEADERS
from tests.mural_router.http.scan_alike import (
    TRACE,
    is_accepted_alike,
    is_answered_alike,
    native_reader,
    plain_answer,
    plain_request,
)
from tests.mural_router.http.scan_messages import Writer, answer, request

pytestmark = native_reader

# Seeds, and many messages of each: to draw every choice from hypothesis takes ten times as long.
SEEDS = st.integers(0, 1 << 64)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_what_is_accepted_of_requests_is_read_as_the_readers_in_python_read_it(seed: int) -> None:
    random = Random(seed)
    for _ in range(20):
        is_accepted_alike(Writer(random).request())


@settings(max_examples=40, deadline=None)
@given(SEEDS)
def test_what_is_accepted_of_answers_is_read_as_the_readers_in_python_read_it(seed: int) -> None:
    random = Random(seed)
    for _ in range(20):
        is_answered_alike(Writer(random).answer())


# As a text: of bytes in either case hypothesis makes no examples.
NOT_PASSED_ON = re.compile(_NOT_PASSED_ON.pattern.decode("ascii"))


@settings(max_examples=100, deadline=None)
@given(st.from_regex(NOT_PASSED_ON, fullmatch=True, alphabet=st.characters(codec="latin-1")))
def test_no_field_that_is_not_passed_on_is_passed_on_here(line: str) -> None:
    data = answer(fields=line[2:].encode("latin-1") + b"\r\nx: kept\r\n")
    plain = plain_answer(data)
    if plain is not None:
        assert is_answered_alike(data)
        assert plain[0] == b"\r\ncontent-length: 2\r\nx: kept"


def test_every_field_that_routing_reads_is_known_here() -> None:
    """A session's id decides nothing where an adapter has one home; the others are given."""
    assert {"x-session-id", "x-request-id", *TRACE} == HEADERS
    fields = [f"{name.title()}: \t{name}! \r\n" for name in sorted(HEADERS)]
    plain = plain_request(request(fields="".join(fields).encode()))
    assert plain is not None
    assert plain[8:] == (
        "x-request-id!",
        b"\r\ntraceparent: traceparent!\r\ntracestate: tracestate!",
    )
    absent = plain_request(request())
    assert absent is not None
    assert absent[8:] == (None, b"")


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
@example(b"")
def test_any_bytes_may_stand_for_a_body_a_head_or_an_answer(data: bytes) -> None:
    is_accepted_alike(data)
    is_accepted_alike(data + END)
    is_accepted_alike(request(data))
    is_answered_alike(data)
    is_answered_alike(b"HTTP/1.1 200 OK\r\n%b" % data)
    assert is_answered_alike(answer(data)) is bool(data)


def test_written_messages_are_often_accepted_and_often_not() -> None:
    """So that the properties above are about something."""
    random = Random(20240101)
    requests = [is_accepted_alike(Writer(random).request()) for _ in range(1000)]
    assert 0.3 < sum(requests) / len(requests) < 0.8
    answers = [is_answered_alike(Writer(random).answer()) for _ in range(1000)]
    assert 0.3 < sum(answers) / len(answers) < 0.8
