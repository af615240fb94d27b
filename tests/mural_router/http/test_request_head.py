"""Which heads of requests are read, and how; the oracles are h11 and llhttp."""

from __future__ import annotations

import contextlib

import h11
import httptools
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mural_resolvers.errors import MuralError
from mural_router.http.errors import BadRequest, HeadTooLarge, VersionNotSupported
from mural_router.http.head import RequestHead, parse_request_head, refuse_hopeless

PLAIN = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"


def parse(head: bytes) -> RequestHead:
    return parse_request_head(head, 100)


def test_what_a_head_says() -> None:
    head = parse(
        b"POST /v1/x?a=%20b HTTP/1.1\r\nHost: a.b:80\r\nX-Y: \t one two \t\r\nx-y:\r\n"
        b"Content-Length: 12\r\nConnection: keep-alive, TE\r\nExpect: 100-Continue\r\n\r\n"
    )
    assert (head.method, head.path, head.query, head.minor) == ("POST", "/v1/x", "a=%20b", 1)
    assert (head.length, head.chunked, head.keep, head.expects_continue) == (12, False, True, True)
    assert head.values(b"x-y") == (b"one two", b"")
    assert len(head.fields) == 6


@pytest.mark.parametrize(
    ("connection", "minor", "keeps"),
    [
        ("", 1, True),
        ("", 0, False),
        ("connection: close\r\n", 1, False),
        ("connection: Close\r\n", 1, False),
        ("connection: keep-alive, close\r\n", 1, False),
        ("connection: close\r\nconnection: keep-alive\r\n", 1, False),
        ("connection: keep-alive\r\n", 0, True),
    ],
)
def test_how_long_a_connection_stays(connection: str, minor: int, keeps: bool) -> None:
    text = f"GET / HTTP/1.{minor}\r\nhost: a\r\n{connection}\r\n"
    assert parse(text.encode()).keep is keeps


@pytest.mark.parametrize("part", [PLAIN[:end] for end in range(1, len(PLAIN) - 1)])
def test_any_beginning_of_a_proper_head_may_go_on(part: bytes) -> None:
    refuse_hopeless(part.removesuffix(b"\r"))


@pytest.mark.parametrize("part", [b"\x16\x03\x01", b"\r\nGET", b" GET", b"get /", b"GET /\n"])
def test_what_no_byte_can_repair_is_not_waited_for(part: bytes) -> None:
    with pytest.raises(BadRequest):
        refuse_hopeless(part)


def test_other_versions_are_named_as_such() -> None:
    for version in (b"2", b"2.0", b"1.2", b"0.9", b"9.9"):
        with pytest.raises(VersionNotSupported):
            parse(b"GET / HTTP/%b\r\nhost: a\r\n\r\n" % version)
    with pytest.raises(VersionNotSupported):
        parse(b"PRI * HTTP/2.0\r\n\r\n")


def test_fields_are_counted() -> None:
    parse(b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 99 + b"\r\n")
    with pytest.raises(HeadTooLarge):
        parse(b"GET / HTTP/1.1\r\nhost: a\r\n" + b"a: b\r\n" * 100 + b"\r\n")


def status_of(head: bytes) -> int:
    try:
        parse(head)
    except MuralError as error:
        return error.status
    return 200


class Heard:
    """What llhttp reads."""

    def __init__(self, data: bytes) -> None:
        self.fields: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.ends = 0
        parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(httptools.HttpParserUpgrade):
            parser.feed_data(data)
        self.method = parser.get_method().decode()

    def on_url(self, url: bytes) -> None:
        self.url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name.lower(), value.strip(b" \t")))

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.ends += 1


TOKENS = st.sampled_from(
    [
        b"host: a",
        b"Host:a:80",
        b"content-length: 3",
        b"Content-Length:3",
        b"content-length: 0",
        b"content-length: +3",
        b"content-length: 3, 3",
        b"transfer-encoding: chunked",
        b"Transfer-Encoding: CHUNKED",
        b"transfer-encoding: chunked, identity",
        b"transfer-encoding: identity",
        b"connection: close",
        b"connection: upgrade",
        b"expect: 100-continue",
        b"x-a:  b c ",
        b"x_b:\t",
        b"content-length : 3",
        b" content-length: 3",
        b"x: a\rb",
        b"x: a\nb",
        b"x: a\0b",
        b"\xff: a",
        b"x: \xe4",
        b"",
    ]
)
LINES = st.lists(TOKENS, max_size=6)
ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\n ", b"\r\r\n", b"\0\r\n"])
STARTS = st.sampled_from(
    [b"GET / HTTP/1.1", b"POST /a?b HTTP/1.1", b"GET / HTTP/1.0"] * 3
    + [b"GET  / HTTP/1.1", b"GET /\t HTTP/1.1", b"GET / HTTP/1.1 ", b"GET /a b HTTP/1.1", b"GET /"]
)


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """Heads that are proper often enough, and improper in what parsers differ about."""
    pieces = [draw(STARTS), draw(ENDS)]
    for line in draw(LINES):
        pieces += [line, draw(ENDS)]
    return b"".join([*pieces, b"\r\n"])


@settings(max_examples=600, deadline=None)
@given(heads())
@example(b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n")
@example(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\n\r\n")
def test_what_is_accepted_is_read_alike_by_others(head: bytes) -> None:
    """A request that we take has one meaning: h11 and llhttp see the same one in it."""
    try:
        ours = parse(head)
    except MuralError:
        return
    body = b"3\r\nabc\r\n0\r\n\r\n" if ours.chunked else b"abc"[: ours.length]
    assert ours.length in (0, 3)
    target = f"{ours.path}?{ours.query}" if ours.query else ours.path

    connection = h11.Connection(h11.SERVER)
    connection.receive_data(head + body)
    request = connection.next_event()
    assert isinstance(request, h11.Request)
    assert (request.method.decode(), request.target.decode()) == (ours.method, target)
    # h11 writes this one's value in lower case.
    fields = [(n, v.lower() if n == b"transfer-encoding" else v) for n, v in ours.fields]
    assert [(name, value) for name, value in request.headers] == fields
    data = b""
    while isinstance(event := connection.next_event(), h11.Data):
        data += bytes(event.data)
    assert isinstance(event, h11.EndOfMessage)
    assert data == (b"abc" if ours.chunked or ours.length else b"")
    assert connection.trailing_data == (b"", False)

    heard = Heard(head + body)
    assert (heard.method, heard.url.decode()) == (ours.method, target)
    assert heard.fields == list(ours.fields)
    assert (heard.body, heard.ends) == (data, 1)


@settings(max_examples=600, deadline=None)
@given(heads(), st.data())
def test_a_changed_byte_is_refused_or_read_alike_by_others(
    head: bytes, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(head) - 1))
    byte = data.draw(st.binary(min_size=0, max_size=2))
    changed = head[:at] + byte + head[at + 1 :]
    if changed.endswith(b"\r\n\r\n") and changed.count(b"\r\n\r\n") == 1:
        try:
            ours = parse(changed)
        except MuralError:
            return
        if ours.length <= 10:
            body = b"0\r\n\r\n" if ours.chunked else b"x" * ours.length
            try:
                heard = Heard(changed + body)
            except httptools.HttpParserInvalidMethodError:
                return  # No path allows a method that llhttp does not know.
            assert heard.fields == list(ours.fields)
            assert heard.ends == 1


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for head in (data, b"GET / HTTP/1.1\r\nhost: a\r\n" + data + b"\r\n\r\n"):
        assert status_of(head) in (200, 400, 417, 431, 501, 505)
