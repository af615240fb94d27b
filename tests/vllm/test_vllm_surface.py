"""What the router reads of vLLM, and what its ordinary tests recorded of it, held to a real one.

Recordings lie where they are played: ``tests/mural_router/fleet/vllm_*`` and
``tests/mural_router/proxy/vllm_*``. Where vLLM changes what is looked at, these tests fail; the
live answers that they name can take the recordings' place.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.follower import Listener
from mural_router.fleet.report import Report
from mural_router.fleet.scrape import VLLMFollower
from mural_router.fleet.vllm_metrics import _SAMPLE, _labels, read_metrics
from mural_router.placement import Residency

pytestmark = pytest.mark.vllm

ROUTER = Path(__file__).parents[1] / "mural_router"
BOUND_S = 60.0
LONG = {"max_tokens": 400, "ignore_eos": True, "stream": True}
# As the router asks: with a salt of the tenant's, and for a stream's usage.
SALTED = {"max_tokens": 8, "temperature": 0, "cache_salt": "a tenant's"}
ANSWERS: dict[str, dict[str, Any]] = {
    "completion": {"model": "acme:v1", **SALTED},
    "stream": {
        "model": "acme:v1",
        **SALTED,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    "unknown_model": {"model": "acme:v9", **SALTED},
}


# -- answers --------------------------------------------------------------------------------------


def answer_of(port: int, body: dict[str, Any]) -> bytes:
    """An answer's bytes as they come, head and framing included."""
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: vllm\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port), BOUND_S) as connection:
        connection.sendall(head.encode() + data)
        answer = b""
        while not is_whole(answer):
            piece = connection.recv(65536)
            assert piece, answer
            answer += piece
    return answer


def is_whole(answer: bytes) -> bool:
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    fields = fields_of(head)
    if fields.get("transfer-encoding") == "chunked":
        return body.endswith(b"0\r\n\r\n")
    return len(body) == int(fields["content-length"])


def fields_of(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


def chunks_of(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        assert body[int(size, 16) :].startswith(b"\r\n")
        body = body[int(size, 16) + 2 :]


def keys_of(value: Any) -> Any:
    """JSON without what it says: its keys and its kinds; of a list each kind once."""
    if isinstance(value, dict):
        return {key: keys_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return once(map(keys_of, value))
    return type(value).__name__


def once(kinds: Iterator[Any]) -> list[Any]:
    """Without repetitions of the one before."""
    found: list[Any] = []
    for kind in kinds:
        if not found or found[-1] != kind:
            found.append(kind)
    return found


def shape_of_events(chunk: bytes) -> list[Any]:
    *events, rest = chunk.split(b"\n\n")
    assert rest == b""
    return [
        event if event == b"data: [DONE]" else keys_of(json.loads(event.removeprefix(b"data: ")))
        for event in events
    ]


def shape_of(answer: bytes) -> tuple[Any, ...]:
    """Status, names of fields, kind of content, and the keys of its body or of its events."""
    head, _, body = answer.partition(b"\r\n\r\n")
    fields = fields_of(head)
    if fields.get("transfer-encoding") == "chunked":
        *chunks, last = chunks_of(body)
        assert last == b""
        told: Any = once(map(shape_of_events, chunks))
    else:
        told = keys_of(json.loads(body))
    return head.split(b"\r\n")[0], sorted(fields), fields["content-type"], told


@pytest.mark.parametrize("name", ANSWERS)
def test_recorded_answers_are_shaped_as_live_ones(vllm, reference, tmp_path, name) -> None:
    live = tmp_path / f"vllm_{name}.http"
    live.write_bytes(answer_of(vllm.port, ANSWERS[name] | {"prompt": reference.chats[0]}))
    recorded = ROUTER / "proxy" / live.name
    assert shape_of(recorded.read_bytes()) == shape_of(live.read_bytes()), live


# -- metrics and models ---------------------------------------------------------------------------


class Heard(Listener):
    """What a follower told last."""

    def __init__(self) -> None:
        self.report: Report | None = None

    def heard(self, report: Report) -> None:
        self.report = report

    def alive(self) -> None:
        raise AssertionError("a pod has no state stream")

    def lost(self, error: str, *, refused: bool) -> None:
        """A busy machine: it asks again."""


@contextmanager
def one_running(vllm, prompt: str) -> Iterator[None]:
    """While a request for acme:v1 runs, and a step has told of it."""
    body = {"model": "acme:v1", "prompt": prompt, **LONG}
    with vllm.client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        pieces = answer.iter_raw()
        next(pieces)
        yield


def read_of(text: bytes) -> dict[bytes, set[str]]:
    """What the router's reader looks at, with its labels."""
    return {sample[1]: set(_labels(sample[2] or b"")) for sample in _SAMPLE.finditer(text)}


def test_what_is_read_of_the_recorded_metrics_is_in_live_ones(vllm, reference, tmp_path) -> None:
    live = tmp_path / "vllm_metrics.txt"
    with one_running(vllm, reference.chats[0]):
        deadline = time.monotonic() + BOUND_S
        found = read_metrics(text := vllm.client.get("/metrics").content)
        while not found.running:
            assert time.monotonic() < deadline, text
            found = read_metrics(text := vllm.client.get("/metrics").content)
    live.write_bytes(text)
    assert (found.model_name, found.running, found.waiting, found.slots) == ("smollm2", 1, 0, 1)
    assert found.adapters == {"acme/default:v1": Residency(level="slot")}
    assert 0 < found.kv_usage < 1
    assert found.generated > 0
    assert not found.reports
    recorded = ROUTER / "fleet" / live.name
    assert read_of(recorded.read_bytes()) == read_of(text), live


def test_the_recorded_list_of_models_is_shaped_as_a_live_one(vllm, reference, tmp_path) -> None:
    vllm.text("acme:v1", reference.prompts[0])
    live = tmp_path / "vllm_models.json"
    live.write_bytes(vllm.client.get("/v1/models").content)
    recorded = json.loads((ROUTER / "fleet" / live.name).read_bytes())
    assert keys_of(recorded) == keys_of(json.loads(live.read_bytes())), live


async def test_a_real_pod_is_followed(vllm, reference) -> None:
    heard = Heard()
    follower = VLLMFollower(
        Endpoint("a", "127.0.0.1", vllm.port, engine="vllm"),
        heard,
        api_key=lambda: None,
        ssl=lambda: None,
        interval_s=0.1,
    )
    following = asyncio.create_task(follower.run())
    try:
        with one_running(vllm, reference.chats[0]):
            async with asyncio.timeout(BOUND_S):
                while heard.report is None or not heard.report.tokens_per_s:  # noqa: ASYNC110 - nothing tells of it
                    await asyncio.sleep(0.01)
        report = heard.report
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert report.ready
    assert report.base_names == ("smollm2",)
    assert (report.slots, report.running, report.waiting) == (1, 1, 0)
    assert report.adapters == {"acme/default:v1": Residency(level="slot")}
