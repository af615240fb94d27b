"""The native reader is held to those in Python: what it accepts they accept, and read alike."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import cast

import aiohttp
import httpx
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mural_router.http import scan, upstream
from mural_router.http.exchange import Exchange
from mural_router.http.head import END, parse_request_head, parse_response_head
from mural_router.http.settings import HttpSettings
from mural_router.proxy.content import refuse_other_content
from mural_router.proxy.paths import Answerer, place_of
from mural_router.proxy.relay import _NOT_PASSED_ON, ask_of, passed_on
from mural_router.routing.ask import HEADERS
from mural_router.routing.inspect_body import inspect_body, model_value

ROOT = Path(__file__).parents[3]
TRACE = ("traceparent", "tracestate")
MAX_HEAD = HttpSettings().max_head_bytes
MAX_FIELDS = HttpSettings().max_head_fields

must_be_built = os.environ.get("MURAL_NATIVE") == "1" and (
    Path(sysconfig.get_path("include"), "Python.h").is_file()
)
pytestmark = pytest.mark.skipif(
    scan.plain_request is None and not must_be_built, reason="the native reader was not built"
)


def plain_request(
    data: bytes, max_head: int = MAX_HEAD, max_fields: int = MAX_FIELDS
) -> scan.PlainRequest | None:
    assert scan.plain_request is not None, "not built: make native"
    return scan.plain_request(data, max_head, max_fields)


def plain_answer(data: bytes) -> scan.PlainAnswer | None:
    assert scan.plain_answer is not None, "not built: make native"
    return scan.plain_answer(data)


def plain_answer_head(data: bytes) -> bool:
    assert scan.plain_answer_head is not None, "not built: make native"
    return scan.plain_answer_head(data)


def test_it_was_built_where_it_had_to_be_and_from_the_sources_that_stand_here() -> None:
    assert scan.plain_request is not None, "not built: make native"
    from mural_router.http._scan import SOURCE_DIGEST

    # By its path: to import the server's operators is to import torch.
    path = ROOT / "server" / "mural_server" / "ops" / "native" / "source_digest.py"
    spec = importlib.util.spec_from_file_location("mural_source_digest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.source_digest(ROOT / "router" / "native") == SOURCE_DIGEST, "stale: make native"


# -- what the readers in Python say ---------------------------------------------------------------


def is_accepted_alike(data: bytes, max_head: int = MAX_HEAD, max_fields: int = MAX_FIELDS) -> bool:
    """Whether a request is accepted; if it is, all that is said of it is compared."""
    plain = plain_request(data, max_head, max_fields)
    if plain is None:
        return False
    key, prompt_bytes, max_tokens, stream, body_at, model_at, after_model, *more = plain
    asks_usage, request_id, passed_on = more
    assert data.find(END, 0, max_head) + len(END) == body_at
    head = parse_request_head(data[:body_at], max_fields)
    assert (head.method, head.query, head.minor) == ("POST", "", 1)
    assert (head.keep, head.chunked, head.expects_continue) == (True, False, False)
    body = data[body_at:]
    assert head.length == len(body)
    assert place_of(head).answerer is Answerer.INFERENCE
    refuse_other_content(head)
    path, sent, model = (part.decode("latin-1") for part in key.split(b"\n"))
    ask = ask_of(cast("Exchange", SimpleNamespace(head=head, body=body)))
    traced = {name: ask.headers[name] for name in TRACE if name in ask.headers}
    lines = "".join(f"\r\n{name}: {value}" for name, value in traced.items())
    assert passed_on == lines.encode("latin-1")
    if request_id is None:
        assert "x-request-id" not in ask.headers
    else:
        assert ask.request_id == request_id
    assert ask.path == path
    assert ask.authorization == ((sent[1:],) if sent else ())
    assert sent[:1] in ("", "=")
    inspected = inspect_body(body)
    assert inspected.model == model
    assert inspected.stream is stream
    assert inspected.sequences == 1
    assert inspected.max_tokens == (None if max_tokens < 0 else max_tokens)
    assert inspected.prompt_bytes == prompt_bytes
    assert inspected.cache_salt is None
    assert inspected.include_usage is asks_usage
    assert inspected.body == body
    for other, salt in (("acme:v2", None), ("acme:v2", "0af3"), (model, None), (model, "0af3")):
        value = model_value(other, asks_usage=stream and not asks_usage, salt=salt)
        spliced = data[body_at:model_at] + value + data[after_model:]
        assert inspected.for_replica(other, salt) == spliced
    return True


def is_answered_alike(data: bytes) -> bool:
    """As `is_accepted_alike`, for an answer."""
    end = data.find(END) + len(END)
    if end >= len(END) and plain_answer_head(data[:end]):
        is_held_alike(data[:end])
    plain = plain_answer(data)
    if plain is None:
        return False
    fields, body_at, has_digest = plain
    assert plain_answer_head(data[:body_at])
    assert data.find(END, 0, upstream._MAX_HEAD_BYTES) + len(END) == body_at
    head = parse_response_head(data[:body_at])
    assert (head.status, head.keep, head.length) == (200, True, len(data) - body_at)
    assert head.length
    assert fields == passed_on(head)
    assert has_digest is (b"x-mural-digest" in head.named)
    return True


def is_held_alike(data: bytes) -> None:
    """A head is held for its body where the readers in Python take it, and both are plain."""
    head = parse_response_head(data)
    assert (head.status, head.keep) == (200, True)
    assert head.length
    assert not plain_answer_head(data + b"x")
    if head.length < 1 << 16:
        assert plain_answer(data + b"x" * head.length) is not None


# -- plausible messages ---------------------------------------------------------------------------

SPACES = ("", "", "", " ", " ", "\n", "\t", "\r\n  ")
MODELS = ("acme:v1", "acme/chat:v1", "m", "", "A.b_c-d:0", "x" * 512)
ODD_MODELS = ("x" * 513, "a b", "ä", "a\\u003ab", 'a\\"b', "\\u006dodel", "a\\\\b", "\x7f")
TEXTS = (
    *("Hi", "", " ", "ä", "界", "😀", "\x7f", "\\n", '\\"', "\\\\", "\\/", "\\u00e9"),
    "\\ud83d\\ude00",
    *('\\"model\\":', "model", '\\"stream_options\\"', "\\u0041", "\\\\u006d", "\\u001f", "{}[],:"),
)
ODD_TEXTS = ("\\u006d", "\\ud83d", "\\ud83dx", "\\ude00", "\\x", "\\u12", "\\", "\x00", "\n", '"')
NUMBERS = (
    *("0", "-0", "1", "12", "0.5", "-1.25", "1e5", "1E+5", "2e-3", "1.0", "9" * 30, "1e999"),
    *("123456789", "1234567890", "16"),
)
ODD_NUMBERS = ("01", "1.", ".5", "-", "+1", "1e", "0x1", "NaN", "Infinity", "1_0", "--1")
NAMES = ("temperature", "top_p", "stop", "seed", "x", "", "logit_bias", "Model", "best_of", "ä")
ODD_NAMES = (
    *("model", "m\\u006fdel", "stream_options", "cache_salt", "n", "stream", "prompt"),
    *("messages", "max_tokens", "user", "a\\nb", "\\u0073tream"),
)


class Writer:
    """Writes messages; ``odd`` says how often a part of one is out of the ordinary."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.odd = random.choice((0.0, 0.0, 0.0, 0.02, 0.2))

    def is_odd(self) -> bool:
        return self.odd > 0 and self.random.random() < self.odd

    def either(self, usual: tuple[str, ...], odd: tuple[str, ...]) -> str:
        return self.random.choice(odd if self.is_odd() else usual)

    def space(self) -> str:
        return self.random.choice(SPACES)

    def text(self) -> str:
        parts = [self.either(TEXTS, ODD_TEXTS) for _ in range(self.random.randrange(4))]
        return f'"{"".join(parts)}"'

    def value(self, depth: int = 0) -> str:
        kind = self.random.randrange(8 if depth < 3 else 6)
        if kind < 2:
            return self.text()
        if kind < 4:
            return self.either(NUMBERS, ODD_NUMBERS)
        if kind == 4 and self.is_odd():
            deep = self.random.choice((60, 63, 64, 65, 66, 200, 5000))
            return "[" * deep + "]" * deep
        if kind < 6:
            return self.either(("true", "false", "null"), ("True", "nul", "", "nulll", "-true"))
        items = range(self.random.randrange(4))
        if kind == 6:
            return self.joined("[", [self.value(depth + 1) for _ in items], "]")
        members = [(self.either(NAMES, ODD_NAMES), self.value(depth + 1)) for _ in items]
        return self.object(members)

    def joined(self, start: str, parts: list[str], end: str) -> str:
        between = self.either((",",), ("", ",,", ";"))
        inside = between.join(f"{self.space()}{part}{self.space()}" for part in parts)
        return f"{start}{inside or self.space()}{end}"

    def object(self, members: list[tuple[str, str]]) -> str:
        parts = [
            f'"{name}"{self.space()}{self.either((":",), ("", "::"))}{self.space()}{value}'
            for name, value in members
        ]
        return self.joined("{", parts, "}")

    def body(self) -> str:
        random = self.random
        members = [("model", f'"{self.either(MODELS, ODD_MODELS)}"')]
        usual: dict[str, Callable[[], str]] = {
            "prompt": self.text,
            "messages": self.value,
            "stream": lambda: random.choice(("true", "false")),
            "max_tokens": lambda: random.choice(("0", "1", "16", "999999999")),
            "max_completion_tokens": lambda: random.choice(("0", "7", "2147483")),
            "n": lambda: "1",
            "user": self.text,
            "stream_options": lambda: self.object(
                [("include_usage", self.either(("true",), ("false", "null", "1")))]
                * (random.choice((0, 2)) if self.is_odd() else 1)
            ),
        }
        for name, value in usual.items():
            if random.random() < 0.4:
                members.append((name, self.value() if self.is_odd() else value()))
        for _ in range(random.randrange(3)):
            members.append((self.either(NAMES, ODD_NAMES), self.value()))
        if self.is_odd():
            members.append(random.choice(members))
        if self.is_odd():
            members.remove(random.choice(members))
        random.shuffle(members)
        return self.space() + self.object(members) + self.space()

    def field(self, name: str, value: str) -> str:
        name = self.random.choice((name, name, name.title(), name.upper()))
        colon = self.either((": ", ":", ":\t  "), (" :", "", ":\r\n ", ":\0"))
        return name + colon + value + self.random.choice(("", "", " ", " \t"))

    def head(self, line: str, fields: list[str]) -> str:
        if self.is_odd():
            fields.append(self.random.choice(fields))
        self.random.shuffle(fields)
        ends = self.either(("\r\n",), ("\n", "\r", "\r\r\n", "\r\n\r\n"))
        last = self.either(("\r\n\r\n",), (ends,))
        return line + "".join(ends + field for field in fields) + last

    def length(self, body: bytes) -> str:
        size = len(body)
        return self.either(
            (str(size), str(size), f"{size:04}", f"{size:015}"),
            (f"{size:016}", str(size + 1), str(size - 1), f"+{size}", f"{size},{size}", "", "0"),
        )

    def request(self) -> bytes:
        body = self.body().encode("utf-8")
        line = self.either(
            ("POST /v1/completions HTTP/1.1", "POST /v1/chat/completions HTTP/1.1"),
            (
                *("GET /v1/completions HTTP/1.1", "POST /v1/completions HTTP/1.0"),
                *("POST /v1/completions?a=b HTTP/1.1", "POST http://a/v1/completions HTTP/1.1"),
                *("POST /v1/embeddings HTTP/1.1", "POST  /v1/completions HTTP/1.1"),
                *("POST /v1/completions/ HTTP/1.1", "POST /v1/Completions HTTP/1.1"),
            ),
        )
        host = self.either(
            ("a", "A.b-c_d:80", "10.0.0.1:8000", "localhost"),
            ("[::1]:80", "", "a:", "a:123456", "a b", "a/b", "a@b", "é"),
        )
        fields = [self.field("host", host), self.field("content-length", self.length(body))]
        usual = {
            "authorization": ("Bearer mural_0_abc", "", "Basic eA==", "é\tx", "b" * 512),
            "content-type": ("application/json", "Application/JSON; Charset=UTF-8"),
            "connection": ("keep-alive", "Keep-Alive"),
            "accept": ("*/*",),
            "accept-encoding": ("gzip, deflate",),
            "user-agent": ("curl/8.0", ""),
            "cookie": ("a=b; c=é",),
            "x-mural-tenant": ("other",),
            "x-request-id": ("r", "~!" * 64),
            "x-session-id": ("s", "", "é"),
            "traceparent": ("00-a-b-01", "", "é\tx"),
            "tracestate": ("a=b", ""),
            "te": ("trailers",),
        }
        for name, values in usual.items():
            if self.random.random() < 0.4:
                fields.append(self.field(name, self.random.choice(values)))
        odd = {
            "authorization": "b" * 513,
            "content-type": "application/json; charset=latin-1",
            "connection": "close",
            "content-encoding": "identity",
            "expect": "100-continue",
            "transfer-encoding": "chunked",
            "traceparent": "00-a-b-02",
            "tracestate": "a=c",
            "x-request-id": self.random.choice(("r", "", "a b", "é", "r" * 129)),
        }
        if self.is_odd():
            fields.append(self.field(*self.random.choice(list(odd.items()))))
        return self.mutated(self.head(line, fields).encode("latin-1") + body)

    def answer(self) -> bytes:
        body = self.value().encode("utf-8")
        line = self.either(
            ("HTTP/1.1 200 OK", "HTTP/1.1 200", "HTTP/1.1 200 ", "HTTP/1.1 200 \té"),
            ("HTTP/1.0 200 OK", "HTTP/1.1 201 Created", "HTTP/1.1 2000", "HTTP/1.1 200\tOK"),
        )
        fields = [self.field("content-length", self.length(body))]
        usual = {
            "connection": ("keep-alive", "Keep-Alive"),
            "content-type": ("application/json", "text/event-stream"),
            "date": ("Mon, 01 Jan 2024 00:00:00 GMT",),
            "keep-alive": ("timeout=5",),
            "proxy-authenticate": ("a",),
            "proxy-authentication-info": ("a",),
            "proxy-connection": ("keep-alive",),
            "proxy-connections": ("kept",),
            "server": ("uvicorn", "é"),
            "servers": ("kept",),
            "te": ("a",),
            "tea": ("kept",),
            "trailer": ("x",),
            "upgrade": ("h2c",),
            "x-mural": ("kept",),
            "x-mural-": ("",),
            "x-mural-digest": ("sha256:00",),
            "x-mural-retry": ("elsewhere",),
            "x-request-id": ("r",),
            "x-": ("kept",),
            "x": ("kept", ""),
            "x-long": ("y" * 900,),
        }
        for name, values in usual.items():
            if self.random.random() < 0.25:
                fields.append(self.field(name, self.random.choice(values)))
        odd = (
            *(("connection", "close"), ("connection", "keep-alive, tea"), ("connection", "x")),
            *(("transfer-encoding", "chunked"), ("content-length", "1")),
        )
        if self.is_odd():
            fields.append(self.field(*self.random.choice(odd)))
        return self.mutated(self.head(line, fields).encode("latin-1") + body)

    def mutated(self, data: bytes) -> bytes:
        """With a byte or a part flipped, cut, put in or doubled, or with its length made right."""
        random = self.random
        for _ in range(random.choice((0, 0, 0, 0, 1, 1, 2))):
            at = random.randrange(len(data) + 1)
            to = min(len(data), at + random.choice((0, 1, 1, 2, 8, 40)))
            part = random.choice(
                (
                    *(b"", data[at:to] * 2, bytes([random.randrange(256)]), b'"', b"\\", b"\0"),
                    *(b"\r\n", b" ", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
                    *(b'"model"', b"\\u006d", b"1", b",", b"}", b"["),
                )
            )
            data = data[:at] + part + data[to:]
        if random.random() < 0.5:
            data = with_true_length(data)
        return data


def with_true_length(data: bytes) -> bytes:
    """Mutations of a body would else be refused for its length alone."""
    head, end, body = data.partition(END)
    lines = head.split(b"\r\n")
    for index, line in enumerate(lines):
        name, colon, value = line.partition(b":")
        if name.lower() == b"content-length" and value.strip().isdigit():
            lines[index] = name + colon + b"%d" % len(body)
    return b"\r\n".join(lines) + end + body


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


# -- by tables ------------------------------------------------------------------------------------

BODY = b'{"model": "acme:v1", "prompt": "Hi"}'


def request(
    body: bytes = BODY,
    fields: bytes = b"",
    *,
    line: bytes = b"POST /v1/completions HTTP/1.1",
    host: bytes = b"host: a\r\n",
) -> bytes:
    length = b"content-length: %d\r\n" % len(body)
    return b"%b\r\n%b%b%b\r\n%b" % (line, host, length, fields, body)


def answer(body: bytes = b"{}", fields: bytes = b"", *, line: bytes = b"HTTP/1.1 200 OK") -> bytes:
    return b"%b\r\ncontent-length: %d\r\n%b\r\n%b" % (line, len(body), fields, body)


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
                b'"prompt":[1,2]',
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


# -- the usual clients ----------------------------------------------------------------------------

COMPLETION = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "acme:v1",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Hi"},
            }
        ],
    }
).encode()
MESSAGES = [{"role": "user", "content": 'Grüße 😀 "model": \\ \n'}]
PAYLOAD = {"model": "acme:v1", "messages": MESSAGES, "max_tokens": 16, "temperature": 0.5}


@contextmanager
def recorder() -> Iterator[tuple[str, list[bytes]]]:
    """An address that answers one request, and that request as it came."""
    seen: list[bytes] = []

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.settimeout(20)
            data = b""
            while not _is_whole(data):
                piece = connection.recv(65_536)
                assert piece
                data += piece
            seen.append(data)
            connection.sendall(
                answer(COMPLETION, b"content-type: application/json\r\nconnection: keep-alive\r\n")
            )

    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/v1", seen
    thread.join(20)
    assert seen


def _is_whole(data: bytes) -> bool:
    head, end, body = data.partition(END)
    return bool(end) and len(body) >= parse_request_head(head + end, 100).length


def with_openai(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="mural_0_a", max_retries=0) as client:
        client.chat.completions.create(
            model="acme:v1",
            messages=[{"role": "user", "content": "Grüße 😀"}],
            max_tokens=16,
            stop=["\n"],
            extra_body={"top_k": 3},
        )


def with_openai_async(url: str) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="mural_0_a", max_retries=0) as client:
            await client.completions.create(model="acme:v1", prompt="Hi", n=1, stream=False)

    asyncio.run(ask())


def with_httpx(url: str) -> None:
    httpx.post(f"{url}/chat/completions", json=PAYLOAD, headers={"authorization": "Bearer a"})


def with_aiohttp(url: str) -> None:
    async def ask() -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/chat/completions", json=PAYLOAD) as got,
        ):
            await got.read()

    asyncio.run(ask())


@pytest.mark.parametrize("ask", [with_openai, with_openai_async, with_httpx, with_aiohttp])
def test_what_the_usual_clients_send_is_plain(ask: Callable[[str], None]) -> None:
    with recorder() as (url, seen):
        ask(url)
    assert is_accepted_alike(seen[0]), seen


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_what_curl_sends_is_plain_once_it_says_that_it_is_json() -> None:
    async def ask(url: str) -> None:
        headers = ("-H", "authorization: Bearer a", "-H", "content-type: application/json")
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-s", "--noproxy", "*", *headers, "-d", json.dumps(PAYLOAD)),
            f"{url}/chat/completions",
            stdout=asyncio.subprocess.DEVNULL,
        )
        assert await asyncio.wait_for(curl.wait(), 20) == 0

    with recorder() as (url, seen):
        asyncio.run(ask(url))
    assert is_accepted_alike(seen[0]), seen


@pytest.mark.parametrize(
    "fields",
    [
        # Chromium's fetch, from a page of another origin.
        b"Host: router:8080\r\nConnection: keep-alive\r\nContent-Length: 36\r\n"
        b'sec-ch-ua-platform: "Linux"\r\nAuthorization: Bearer a\r\n'
        b"User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36\r\n"
        b'sec-ch-ua: "Chromium";v="131", "Not_A Brand";v="24"\r\n'
        b"Content-Type: application/json\r\nsec-ch-ua-mobile: ?0\r\nAccept: */*\r\n"
        b"Origin: http://localhost:3000\r\nSec-Fetch-Site: same-site\r\nSec-Fetch-Mode: cors\r\n"
        b"Sec-Fetch-Dest: empty\r\nReferer: http://localhost:3000/\r\n"
        b"Accept-Encoding: gzip, deflate, br, zstd\r\nAccept-Language: en-US,en;q=0.9\r\n",
        # Node's fetch.
        b"host: router:8080\r\nconnection: keep-alive\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer a\r\naccept: */*\r\naccept-language: *\r\nsec-fetch-mode: cors\r\n"
        b"user-agent: node\r\naccept-encoding: gzip, deflate\r\ncontent-length: 36\r\n",
        # Go's net/http.
        b"Host: router:8080\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: 36\r\n"
        b"Authorization: Bearer a\r\nContent-Type: application/json\r\nAccept-Encoding: gzip\r\n",
    ],
)
def test_what_other_clients_send_is_plain(fields: bytes) -> None:
    assert is_accepted_alike(b"POST /v1/chat/completions HTTP/1.1\r\n%b\r\n%b" % (fields, BODY))
