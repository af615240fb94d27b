"""The native reader is held to those in Python: what it accepts they accept, and read alike."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mural_router.http import scan, upstream
from mural_router.http.exchange import Exchange
from mural_router.http.head import END, parse_request_head, parse_response_head
from mural_router.http.settings import HttpSettings
from mural_router.proxy.content import refuse_other_content
from mural_router.proxy.paths import Answerer, place_of
from mural_router.proxy.relay import ask_of, passed_on
from mural_router.routing.inspect_body import inspect_body, model_value

TRACE = ("traceparent", "tracestate")
MAX_HEAD = HttpSettings().max_head_bytes
MAX_FIELDS = HttpSettings().max_head_fields

must_be_built = os.environ.get("MURAL_NATIVE") == "1" and (
    Path(sysconfig.get_path("include"), "Python.h").is_file()
)
native_reader = pytest.mark.skipif(
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
