"""A real Envoy that asks the router where requests go, and two real servers: PEFT is the oracle."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.peers

PROMPT = "The quick brown fox"
START_S = 30.0
SOURCE = Path(__file__).resolve().parents[1] / "mural_router/picker/gateway.py"


def load_gateway():
    spec = importlib.util.spec_from_file_location("gateway", SOURCE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass
class Gateway:
    client: httpx.Client
    keys: dict[str, str]

    def ask(self, tenant: str, model: str, **more: object) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **more}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}
        return self.client.post("/v1/completions", json=body, headers=headers)


@pytest.fixture
def gateway(
    running, tenants, fleet_store, start_router: Callable, tmp_path: Path
) -> Iterator[Gateway]:
    made = load_gateway()
    program, picker_port, port = made.envoy_program(), made.free_port(), made.free_port()
    start_router(
        *(flag for replica in running for flag in ("--replica", replica.flag)),
        *("--tenants-file", str(tenants.path), "--store", str(fleet_store)),
        *("--ext-proc", str(picker_port), "--no-access-log"),
    )
    config = tmp_path / "envoy.json"
    replicas = [replica.port for replica in running]
    config.write_text(
        json.dumps(
            made.gateway(port=port, picker_port=picker_port, replicas=replicas, fail_open=False)
        )
    )
    command = (program, "-c", str(config), "--use-dynamic-base-id", "--concurrency", "1")
    with (tmp_path / "envoy.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            wait_for(client, process)
            yield Gateway(client, tenants.keys)
    finally:
        process.kill()
        process.wait()


def wait_for(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "Envoy ended"
        assert time.monotonic() < deadline
        try:
            # 500 until Envoy has found its picker healthy.
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)


def test_each_adapter_is_answered_by_its_own_weights_at_one_home(gateway, oracle) -> None:
    tokens = gateway.client.post(
        "/tokenize",
        headers={"authorization": f"Bearer {gateway.keys['acme']}"},
        json={"model": "tiny", "prompt": PROMPT},
    ).json()["tokens"]
    for seed in (1, 2):
        homes = set()
        for _ in range(3):
            answer = gateway.ask("acme", f"acme:v{seed}", logprobs=0)
            assert answer.status_code == 200, answer.text
            told = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
            assert told
            assert told == pytest.approx(oracle.logprobs(seed, tokens, len(told)), abs=1e-3)
            assert answer.headers["x-mural-adapter"] == f"acme:v{seed}"
            homes.add(answer.headers["x-mural-replica"])
        assert len(homes) == 1


def test_an_alias_is_made_exact_on_the_way(gateway) -> None:
    answer = gateway.ask("acme", "acme:latest")
    assert answer.json()["model"] == "acme:v3"
    assert answer.headers["x-mural-adapter"] == "acme:v3"


def test_a_stream_ends_as_it_should(gateway) -> None:
    answer = gateway.ask("acme", "acme:v1", stream=True)
    events = [line for line in answer.text.splitlines() if line]
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events[-1] == "data: [DONE]"
    assert not any('"usage":{' in event for event in events)


def test_keys_and_names_are_checked_before_anything(gateway) -> None:
    assert gateway.ask("", "acme:v1").status_code == 401
    refused = gateway.ask("globex", "acme:v1")
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
    assert gateway.ask("acme", "acme:v9").status_code == 404


def test_what_a_tenant_may_use_is_listed_and_nothing_else_is_reached(gateway) -> None:
    headers = {"authorization": f"Bearer {gateway.keys['acme']}"}
    assert gateway.client.get("/v1/models", headers=headers).status_code == 200
    for path in ("/metrics", "/mural/v1/state", "/v1/load_lora_adapter"):
        assert gateway.client.get(path, headers=headers).status_code == 404
