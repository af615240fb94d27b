"""Two real vLLM servers behind `mural route`, asked by the openai client and by vLLM's own.

Requests whose answers are compared go one after another: vLLM for CPUs answers the base's requests
with an adapter's weights where both are in one batch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from mural_resolvers.tenants import mint_key

pytestmark = pytest.mark.vllm

START_S, BENCH_S = 60.0, 300.0
MAX_TOKENS = 40
BENCH_REQUESTS = 24


@dataclass
class Fleet:
    """A router and the two it sends to."""

    url: str
    admin: str
    keys: dict[str, str]
    servers: list
    router_log: Path

    def client(self, tenant: str) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=self.keys[tenant], max_retries=0, timeout=120
        )

    def counted(self, family: str) -> dict[str, float]:
        """A family of the router's counters, by the value of its one label."""
        text = httpx.get(f"{self.admin}/metrics").text
        line = rf'^mural_router_{family}_total{{\w+="([^"]*)"}} (\S+)$'
        return {label: float(count) for label, count in re.findall(line, text, re.MULTILINE)}

    def complete(self, tenant: str, model: str, prompt: list[int] | str):
        """The text, the model that the answer names, and the replica."""
        with self.client(tenant) as client:
            raw = client.completions.with_raw_response.create(
                model=model, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0
            )
        answer = raw.parse()
        return answer.choices[0].text, answer.model, raw.headers["x-mural-replica"]


def logged(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text(errors="replace")):
            return found[1]
        time.sleep(0.1)
    pytest.fail(f"no {pattern!r} in the router's log:\n{log.read_text()[-4000:]}")


@pytest.fixture(scope="module")
def fleet(serve_vllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("router")
    minted = {tenant: mint_key() for tenant in ("acme", "globex")}
    tenants = [
        {"id": tenant, "keys": [{"id": key.key_id, "sha256": key.sha256}]}
        for tenant, key in minted.items()
    ]
    (folder / "tenants.yaml").write_text(json.dumps({"tenants": tenants}))
    (folder / "aliases.yaml").write_text(json.dumps({"acme": {"stable": [{"version": "v1"}]}}))
    log = folder / "router.log"
    with ExitStack() as held:
        servers = [held.enter_context(serve_vllm(adapters=2, sequences=4)) for _ in range(2)]
        command = [sys.executable, "-m", "mural_router.commands", "--port", "0"]
        command += ["--admin-port", "0", "--tenants-file", str(folder / "tenants.yaml")]
        command += ["--aliases-file", str(folder / "aliases.yaml"), "--no-access-log"]
        for name, server in zip(("one", "two"), servers, strict=True):
            command += ["--replica", f"http://127.0.0.1:{server.port},engine=vllm,name={name}"]
        with log.open("wb") as output:
            router = subprocess.Popen(command, stdout=output, stderr=output)
        held.callback(router.wait, 60)
        held.callback(router.terminate)
        url = logged(log, r"routing on (http://\S+)")
        admin = logged(log, r"admin pages on (http://\S+)")
        ready_by = time.monotonic() + START_S
        while httpx.get(f"{admin}/ready").status_code != 200:
            assert time.monotonic() < ready_by, log.read_text()[-4000:]
            time.sleep(0.2)
        yield Fleet(url, admin, {t: key.key for t, key in minted.items()}, servers, log)


def test_greedy_texts_through_the_router_are_murals(fleet, reference) -> None:
    for place, prompt in enumerate(reference.prompts):
        for tenant, model in (("acme", "acme:v1"), ("globex", "globex:v1"), ("acme", "smollm2")):
            text, named, _ = fleet.complete(tenant, model, prompt)
            assert text == reference.texts[model][place]
            assert named == model


def test_an_adapters_requests_stay_at_its_home(fleet, reference) -> None:
    for tenant, model in (("acme", "acme:v1"), ("globex", "globex:v1")):
        homes = {fleet.complete(tenant, model, prompt)[2] for prompt in reference.prompts}
        assert len(homes) == 1


def test_vllm_is_asked_for_the_exact_version_behind_an_alias(fleet, reference) -> None:
    text, named, _ = fleet.complete("acme", "acme:stable", reference.prompts[0])
    assert (text, named) == (reference.texts["acme:v1"][0], "acme:v1")
    served = {
        card["id"]
        for server in fleet.servers
        for card in server.client.get("/v1/models").json()["data"]
    }
    assert not any("stable" in name for name in served)


def test_what_is_not_the_callers_never_reaches_vllm(fleet, reference) -> None:
    logs = [server.log.stat().st_size for server in fleet.servers]
    with pytest.raises(openai.PermissionDeniedError):
        fleet.complete("globex", "acme:v1", reference.prompts[0])
    with pytest.raises(openai.NotFoundError):
        fleet.complete("acme", "acme:v9", reference.prompts[0])
    news = b"".join(
        server.log.read_bytes()[size:] for server, size in zip(fleet.servers, logs, strict=True)
    )
    assert b"acme:v9" in news
    assert b"globex" not in news


def test_a_stream_comes_in_pieces_and_its_tokens_are_counted(fleet, reference) -> None:
    before = fleet.counted("tokens")["completion"]
    with fleet.client("acme") as client:
        stream = client.completions.create(
            model="acme:v1",
            prompt=reference.prompts[0],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
        )
        pieces = [event.choices[0].text for event in stream if event.choices]
    assert len(pieces) > 3
    assert "".join(pieces) == reference.texts["acme:v1"][0]
    assert fleet.counted("tokens")["completion"] > before


@dataclass
class Plain:
    """Asks as a plain client does: with texts for prompts, all on one connection that is kept."""

    connection: HTTPConnection
    key: str

    def whole(self, model: str, prompt: str) -> dict[str, Any]:
        answer = json.loads(self._answer(model, prompt))
        assert answer["model"] == model
        return answer

    def stream(self, model: str, prompt: str) -> list[dict[str, Any]]:
        """All events but the last."""
        *events, last, rest = self._answer(model, prompt, stream=True).split(b"\n\n")
        assert (last, rest) == (b"data: [DONE]", b"")
        return [json.loads(event.removeprefix(b"data: ")) for event in events]

    def _answer(self, model: str, prompt: str, **members: Any) -> bytes:
        body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        headers = {"authorization": f"Bearer {self.key}", "content-type": "application/json"}
        socket = self.connection.sock
        self.connection.request(
            "POST", "/v1/completions", json.dumps(body | members).encode(), headers
        )
        assert self.connection.sock is socket or socket is None
        response = self.connection.getresponse()
        data = response.read()
        assert response.status == 200, data
        assert response.headers["x-mural-adapter"] == model
        return data


def change(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: after[name] - before.get(name, 0) for name in after}


@pytest.mark.parametrize(("tenant", "model"), [("acme", "acme:v1"), ("globex", "globex:v1")])
def test_plain_requests_are_carried_by_the_express_way(fleet, reference, tenant, model) -> None:
    host = fleet.url.removeprefix("http://")
    with closing(HTTPConnection(host, timeout=120)) as connection:
        client = Plain(connection, fleet.keys[tenant])
        # From here on a connection to its home is kept.
        client.whole(model, reference.chats[0])
        ways, used, http = (fleet.counted(each) for each in ("express", "tokens", "http"))
        whole = [client.whole(model, chat) for chat in reference.chats]
        streams = [client.stream(model, chat) for chat in reference.chats]
    asked = len(reference.chats)
    texts = reference.texts[model]
    assert [answer["choices"][0]["text"] for answer in whole] == texts
    pieces = [[event["choices"][0]["text"] for event in stream] for stream in streams]
    assert ["".join(each) for each in pieces] == texts
    assert all(len(each) > 3 for each in pieces)
    # Nobody asked for the usage of the streams: it is counted, and not passed on.
    assert not any(event.get("usage") for stream in streams for event in stream)
    usage = [answer["usage"] for answer in whole]
    assert [each["prompt_tokens"] for each in usage] == list(map(len, reference.prompts))
    assert change(used, fleet.counted("tokens")) == {
        kind: 2 * sum(each[f"{kind}_tokens"] for each in usage) for kind in ("prompt", "completion")
    }
    # A stream begins on it, and goes on as any other.
    assert change(ways, fleet.counted("express")) == {
        "whole": asked,
        "unfolded": asked,
        "refused": 0,
    }
    assert change(http, fleet.counted("http")) == {
        "requests": 2 * asked,
        "refused": 0,
        "replica_connections": 0,
    }


def test_the_openai_clients_requests_are_plain(fleet, reference) -> None:
    model, text = "acme:v1", reference.texts["acme:v1"][0]
    fleet.complete("acme", model, reference.chats[0])
    ways = fleet.counted("express")
    assert fleet.complete("acme", model, reference.chats[0])[:2] == (text, model)
    with fleet.client("acme") as client:
        stream = client.completions.create(
            model=model,
            prompt=reference.chats[0],
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
        )
        assert "".join(event.choices[0].text for event in stream) == text
    assert change(ways, fleet.counted("express")) == {"whole": 1, "unfolded": 1, "refused": 0}


def test_vllms_own_load_generator_runs_through_the_router(fleet, vllm_command, base_model) -> None:
    run = subprocess.run(
        [
            *(str(vllm_command), "bench", "serve", "--backend", "openai"),
            *("--base-url", fleet.url, "--endpoint", "/v1/completions"),
            *("--model", "acme:v1", "--tokenizer", str(base_model)),
            *("--dataset-name", "random", "--random-input-len", "64"),
            *("--random-output-len", "16", "--num-prompts", str(BENCH_REQUESTS)),
            *("--max-concurrency", "4", "--ignore-eos", "--disable-tqdm"),
            *("--header", f"Authorization=Bearer {fleet.keys['acme']}"),
        ],
        capture_output=True,
        text=True,
        timeout=BENCH_S,
    )
    print(run.stdout[-3000:])
    assert run.returncode == 0, run.stderr[-3000:]
    assert re.search(rf"Successful requests:\s+{BENCH_REQUESTS}\b", run.stdout)
    assert re.search(rf"Total generated tokens:\s+{BENCH_REQUESTS * 16}\b", run.stdout)


def test_a_killed_vllm_is_left_and_its_adapters_answer_elsewhere(fleet, reference) -> None:
    _, _, home = fleet.complete("acme", "acme:v1", reference.prompts[0])
    lost = fleet.servers[("one", "two").index(home)]
    lost.kill()
    text, _, elsewhere = fleet.complete("acme", "acme:v1", reference.prompts[0])
    assert text == reference.texts["acme:v1"][0]
    assert elsewhere != home
