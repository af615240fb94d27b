"""What the native reader takes for plain and what it leaves, by tables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

import pytest

from mural_router.http import scan, upstream
from mural_router.http.head import END
from tests.mural_router.http.scan_alike import (
    is_accepted_alike,
    is_answered_alike,
    native_reader,
    plain_answer,
    plain_answer_head,
    plain_request,
)
from tests.mural_router.http.scan_messages import BODY, answer, request

pytestmark = native_reader


def with_model(*members: bytes) -> bytes:
    return request(b"{%b}" % b",".join((b'"model":"acme:v1"', *members)))


def test_what_is_said_of_a_request() -> None:
    body = '{"stream":true,"max_tokens":7,"prompt":"Grüße","model" : "acme:v1"}'.encode()
    data = request(body, b"Authorization:\tBearer mural_0_\xe9 \r\n")
    plain = plain_request(data)
    assert plain is not None
    assert plain[0] == b"/v1/completions\n=Bearer mural_0_\xe9\nacme:v1"
    assert plain[1:4] == (len('"Grüße"'.encode()), 7, True)
    assert data[plain[4] :] == body
    assert data[plain[5] : plain[6]] == b'"acme:v1"'


def test_an_empty_authorization_is_not_an_absent_one() -> None:
    empty, absent = plain_request(request(fields=b"authorization:\r\n")), plain_request(request())
    assert empty is not None
    assert absent is not None
    assert empty[0] == b"/v1/completions\n=\nacme:v1"
    assert absent[0] == b"/v1/completions\n\nacme:v1"


@pytest.mark.parametrize(
    "data",
    [
        request(),
        request(BODY, b"Content-Type: application/json\r\nConnection: Keep-Alive\r\n"),
        request(BODY, b"x: 1\r\nx: 2\r\naccept-encoding: gzip\r\nx-mural-tenant: other\r\n"),
        request(BODY, b"authorization: " + b"x" * 512 + b"\r\n"),
        request(line=b"POST /v1/chat/completions HTTP/1.1"),
        request(b' \r\n\t{ "model" : "m" } \n'),
        with_model(b'"prompt":"a","messages":[{"role":"user","content":"\\"model\\": 1"}]'),
        with_model(b'"messages":null'),
        with_model(b'"n":1,"stream":false,"max_tokens":0,"max_completion_tokens":999999999'),
        with_model(b'"x":1,"x":2,"tools":[{"a":[1.5e3,-0,true,null,{}]}]'),
        with_model(b'"messages":' + b"[" * 64 + b"]" * 64),
        with_model(b'"prompt":"\\ud83d\\ude00 \\u00e9\\u0000 \xf0\x9f\x98\x80"'),
        with_model(b'"stream":true,"stream_options":{"include_usage":true}'),
        with_model(b'"stream_options" : { "include_usage" : true } ,"stop":["stream_options"]'),
        with_model(b'"stream_options":{"include_usage":true},"x":{"stream_options":null}'),
        request(BODY, b"Content-Type: Application/json; charset=UTF-8\r\n"),
        request(BODY, b"X-Session-Id: s\r\nx-session-id: t\r\nTraceParent: \xe9\r\n"),
        request(BODY, b"x-request-id: " + b"~" * 128 + b"\r\ntracestate:\r\n"),
        with_model(b'"prompt":["Hi"]'),
        with_model(b'"prompt": [ [1, 2,3] ] '),
        with_model(b'"prompt":[1,2 ,"a"]'),
        with_model(b'"prompt":[ ]'),
        with_model(b'"prompt":[""]'),
        with_model(b'"prompt":[%b0]' % (b"1," * 5000)),
        with_model(b'"prompt":"%b"' % (b"x" * (1 << 20))),
        with_model(b'"user":"u","prompt":"stream_options and \\"cache_salt\\""'),
    ],
)
def test_what_is_plain(data: bytes) -> None:
    assert is_accepted_alike(data)


@pytest.mark.parametrize(
    "data",
    [
        # In pieces, or with more behind it.
        b"",
        *(request()[:cut] for cut in (1, 10, 31, 40, -40, -1)),
        request() + b"P",
        request() + request(),
        # Other lines.
        request(line=b"GET /v1/completions HTTP/1.1"),
        request(line=b"POST /v1/completions HTTP/1.0"),
        request(line=b"POST /v1/completions?a=1 HTTP/1.1"),
        request(line=b"POST /v1/completions/ HTTP/1.1"),
        request(line=b"POST /v1/embeddings HTTP/1.1"),
        request(line=b"POST http://a/v1/completions HTTP/1.1"),
        request(line=b"POST /v1/%63ompletions HTTP/1.1"),
        # Fields that the slow way treats in a special manner, or refuses.
        request(host=b""),
        request(host=b"host: a\r\nhost: a\r\n"),
        request(host=b"host: [::1]\r\n"),
        request(host=b"host:\r\n"),
        request(host=b"host: a:\r\n"),
        request(host=b"host: a:123456\r\n"),
        request(host=b"host: a, b\r\n"),
        *(
            request(fields=field + b"\r\n")
            for field in (
                b"content-length: 36",
                b"transfer-encoding: chunked",
                b"transfer-encoding:",
                b"Expect: 100-continue",
                b"connection: close",
                b"connection: keep-alive, te",
                b"connection:",
                b"content-encoding: identity",
                b"content-encoding: gzip",
                b"content-type: text/plain",
                b"content-type: application/json;charset=utf-8",
                b"content-type: application/json; charset=latin-1",
                b"content-type: application/json\r\ncontent-type: application/json",
                b"authorization: a\r\nauthorization: a",
                b"authorization: " + b"x" * 513,
                b"traceparent: 00-0-0-00\r\ntraceparent: 00-0-0-00",
                b"tracestate: a=b\r\ntracestate:",
                b"X-Request-Id: a\r\nx-request-id: a",
                b"x-request-id:",
                b"x-request-id: a b",
                b"x-request-id: \xe9",
                b"x-request-id: " + b"a" * 129,
                b"x : a",
                b" x: a",
                b": a",
                b"x",
                b"x: a\0",
                b"x: a\x7f",
                b"x: a\r",
                b"x: a\n",
                b"x: a\r\n b",
                "é: a".encode(),
            )
        ),
        request().replace(b"content-length: 36", b"content-length: +36"),
        request().replace(b"content-length: 36", b"content-length: 36, 36"),
        request().replace(b"content-length: 36", b"content-length: " + b"0" * 14 + b"36"),
        request().replace(b"content-length: 36", b"content-length: 999999999999999"),
        request().replace(b"content-length: 36\r\n", b""),
        # Bodies.
        request(b""),
        request(b"{}"),
        request(b"[]"),
        request(b'"model"'),
        request(b'{"prompt":"Hi"}'),
        request(b'{"model":null}'),
        request(b'{"model":1}'),
        request(b'{"model":"a b"}'),
        request('{"model":"ä"}'.encode()),
        request(b'{"model":"a\\u003ab"}'),
        request(b'{"model":"%b"}' % (b"x" * 513)),
        request(b'{"m\\u006fdel":"a"}'),
        request(b"\xef\xbb\xbf" + BODY),
        request(BODY + b"\0"),
        request(BODY + b"{}"),
        request(BODY[:-1]),
        request(BODY[:-1] + b",}"),
        request(b"{" + BODY[1:].replace(b":", b"", 1)),
        *(
            with_model(member)
            for member in (
                b'"model":"other:v1"',
                b'"m\\u006fdel":"other:v1"',
                b'"metadata":{"model":"x"}',
                b'"stop":["model"]',
                b'"prompt":"\\u006d"',
                b'"prompt":"\\\\u006d"',
                b'"stream":true,"stream_options":{"include_usage":false}',
                b'"stream":true,"stream_options":{}',
                b'"stream_options":{"include_usage":true,"x":1}',
                b'"stream_options":{"include_usage":true,"include_usage":false}',
                b'"stream_options":{"include_us\\u0061ge":true}',
                b'"stream_options":{"include_usage":1}',
                b'"stream_options":{"include_usage":true}}',
                b'"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}',
                b'"stream_options":null',
                b'"x":{"stream_options":1}',
                b'"cache_salt":"a"',
                b'"x":["cache_salt"]',
                b'"stream":null',
                b'"stream":1',
                b'"stream":"true"',
                b'"stream":true,"stream":false',
                b'"\\u0073tream":true',
                b'"n":2',
                b'"n":null',
                b'"n":1.0',
                b'"n":"1"',
                b'"n":1,"n":1',
                b'"max_tokens":null',
                b'"max_tokens":-1',
                b'"max_tokens":1.0',
                b'"max_tokens":1e3',
                b'"max_tokens":"50"',
                b'"max_tokens":01',
                b'"max_tokens":1000000000',
                b'"max_tokens":1,"max_tokens":2',
                b'"max_completion_tokens":true',
                b'"prompt":["a","b"]',
                b'"prompt":[[1],[2]]',
                b'"prompt":["a",[1]]',
                b'"prompt":["a",]',
                b'"prompt":[1,]',
                b'"prompt":[1',
                b'"prompt":[',
                b'"prompt":["%b"]' % (b"x" * (1 << 20)),
                b'"prompt":{}',
                b'"prompt":1',
                b'"prompt":null',
                b'"prompt":"a","prompt":"b"',
                b'"messages":[],"messages":[]',
                b'"user":null',
                b'"user":{}',
                b'"messages":' + b"[" * 65 + b"]" * 65,
                b'"prompt":"\xff"',
                b'"prompt":"\xed\xa0\x80"',
                b'"prompt":"\xc0\x80"',
                b'"prompt":"\xe0\x80\x80"',
                b'"prompt":"\xf0\x80\x80\x80"',
                b'"prompt":"\xf4\x90\x80\x80"',
                b'"prompt":"\xc3"',
                b'"prompt":"\\ud83d"',
                b'"prompt":"\\ude00\\ud83d"',
                b'"prompt":"\\ud83d\\u0041"',
                b'"prompt":"\\ud83d\\n"',
                b'"prompt":"\\ud83d\\ude0"',
                b'"prompt":"\n"',
                b'"prompt":"\0"',
                b'"prompt":"\\x"',
                b'"prompt":"\\u00g0"',
                b'"x":NaN',
                b'"x":.5',
                b'"x":1.',
                b'"x":-',
                b'"x":01',
                b'"x":tru',
                b'"x":\'a\'',
                b'"x":[1,]',
                b'"x":{"a"}',
                b'x:1',
                b"",
            )
        ),
    ],
)  # fmt: skip
def test_what_is_not_plain_is_left_to_the_readers_in_python(data: bytes) -> None:
    assert plain_request(data) is None


def test_the_limits_of_a_head_are_those_of_the_readers_in_python() -> None:
    data = request(BODY, b"a: b\r\n" * 5)
    size = len(data) - len(BODY)
    assert is_accepted_alike(data, size, 7)
    assert not is_accepted_alike(data, size - 1, 7)
    assert not is_accepted_alike(data, size, 6)


@pytest.mark.parametrize(
    ("fields", "passed"),
    [
        (b"", b""),
        (b"Date:  now \r\nX: \xe9\r\n", b"\r\nDate:  now \r\nX: \xe9"),
        (b"Server: a\r\nConnection: Keep-Alive\r\nKeep-Alive: timeout=5\r\n", b""),
        (b"x: 1\r\nx: 2\r\nx-request-id: r\r\n", b"\r\nx: 1\r\nx: 2"),
        (b"X-Mural-Digest: sha256:0\r\nx-mural: y\r\n", b"\r\nx-mural: y"),
        (b"te: a\r\ntrailer: b\r\nupgrade: c\r\nproxy-connection: d\r\n", b""),
        (b"server: " + b"x" * 16000 + b"\r\n", b""),
    ],
)
def test_what_is_passed_on_of_an_answer(fields: bytes, passed: bytes) -> None:
    data = answer(b"{}", fields)
    plain = plain_answer(data)
    assert plain is not None
    assert plain[0] == b"\r\ncontent-length: 2" + passed
    assert data[plain[1] :] == b"{}"
    assert is_answered_alike(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        *(answer()[:cut] for cut in (1, 12, 17, 30, -2, -1)),
        answer() + b"x",
        answer(b""),
        answer(line=b"HTTP/1.0 200 OK"),
        answer(line=b"HTTP/1.1 100 Continue"),
        answer(line=b"HTTP/1.1 204 No Content"),
        answer(line=b"HTTP/1.1 401 Unauthorized"),
        answer(line=b"HTTP/1.1 503 Busy"),
        answer(line=b"HTTP/1.1 2000"),
        answer(line=b"HTTP/1.1 200 a\0"),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(),
        b"HTTP/1.1 200 OK\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        answer(fields=b"transfer-encoding: chunked\r\n"),
        answer(fields=b"content-length: 2\r\n"),
        answer(fields=b"connection: close\r\n"),
        answer(fields=b"connection: keep-alive, close\r\n"),
        answer(fields=b"x: 1\r\nconnection: x\r\n"),
        answer(fields=b"Connection: Keep-Alive, x\r\nx: 1\r\n"),
        answer(fields=b"connection: keep-alive\r\nx: 1\r\nconnection: x\r\n"),
        answer(fields=b"connection:\r\n"),
        answer(fields=b"x : a\r\n"),
        answer(fields=b"x: a\r\n b\r\n"),
        answer(fields=b"x: " + b"y" * 2048 + b"\r\n"),
        # More than any head may have, though nothing of it is passed on.
        answer(fields=b"server: " + b"x" * 16384 + b"\r\n"),
        answer(fields=b"server: " + b"x" * upstream._MAX_HEAD_BYTES + b"\r\n"),
    ],
)
def test_answers_that_are_not_plain_are_left_to_the_readers_in_python(data: bytes) -> None:
    assert plain_answer(data) is None
    # Nor is it held, but for a plain head whose body is not of its length.
    held = plain_answer_head(data.partition(END)[0] + END)
    assert held is (data in (answer()[:-2], answer()[:-1], answer() + b"x"))


@pytest.mark.parametrize("arguments", [(), (b"",), ("", 1, 1), (b"", "1", 1), (b"", 1, 1 << 70)])
def test_arguments_of_other_types_are_refused(arguments: tuple[object, ...]) -> None:
    assert scan.plain_request is not None
    with pytest.raises((TypeError, OverflowError)):
        cast("Callable[..., object]", scan.plain_request)(*arguments)


def test_what_is_read_leaves_no_references_behind() -> None:
    data, said = request(), answer(fields=b"date: now\r\n")
    before = sys.getrefcount(data), sys.getrefcount(said), sys.getrefcount(True)
    for _ in range(1000):
        plain_request(data)
        plain_answer(said)
    after = sys.getrefcount(data), sys.getrefcount(said), sys.getrefcount(True)
    assert all(abs(a - b) < 500 for a, b in zip(after, before, strict=True))
