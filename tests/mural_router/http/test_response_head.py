"""Which heads of answers are believed."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_router.http.errors import BrokenAnswer
from mural_router.http.head import parse_response_head


@pytest.mark.parametrize(
    ("lines", "status", "length", "keep"),
    [
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n", 200, 5, True),
        ("HTTP/1.1 200\r\ncontent-length: 5\r\n", 200, 5, True),
        ("HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n", 200, None, True),
        ("HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n", 200, 5, False),
        ("HTTP/1.0 200 OK\r\ncontent-length: 5\r\n", 200, 5, False),
        ("HTTP/1.1 204 No Content\r\n", 204, 0, True),
        ("HTTP/1.1 304 Not Modified\r\n", 304, 0, True),
        ("HTTP/1.1 100 Continue\r\n", 100, 0, True),
    ],
)
def test_what_an_answer_says(lines: str, status: int, length: int | None, keep: bool) -> None:
    head = parse_response_head(lines.encode() + b"\r\n")
    assert (head.status, head.length, head.keep) == (status, length, keep)


@pytest.mark.parametrize(
    "lines",
    [
        "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 5\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5, 5\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: -5\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n",
        "HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n",
        "HTTP/1.1 204 No Content\r\ncontent-length: 5\r\n",
        "HTTP/1.1 204 No Content\r\ntransfer-encoding: chunked\r\n",
        "HTTP/1.1 2000 OK\r\ncontent-length: 5\r\n",
        "HTTP/1.1 099 OK\r\ncontent-length: 5\r\n",
        "HTTP/2 200 OK\r\ncontent-length: 5\r\n",
        "HTTP/1.1 200 OK\r\ncontent-length : 5\r\n",
        "HTTP/1.1 200 OK\r\na: b\r\n c\r\ncontent-length: 5\r\n",
        "HTTP/1.1 200 OK\ncontent-length: 5\r\n",
    ],
)
def test_an_answer_without_one_certain_frame_is_broken(lines: str) -> None:
    with pytest.raises(BrokenAnswer):
        parse_response_head(lines.encode() + b"\r\n")


@given(st.binary(max_size=200))
def test_any_bytes_are_an_answer_or_broken(data: bytes) -> None:
    for head in (data, b"HTTP/1.1 200 OK\r\n" + data + b"\r\n\r\n"):
        with contextlib.suppress(BrokenAnswer):
            parse_response_head(head)
