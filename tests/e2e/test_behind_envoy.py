"""A real Envoy that asks the router where requests go, and two real servers: PEFT is the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.mural_router.picker.gateway import envoy_program, free_port
from tests.mural_router.picker.gateway import gateway as configuration

pytestmark = pytest.mark.peers

PROMPT = "The quick brown fox"
START_S = 30.0


@dataclass
class Gateway:
    client: httpx.Client
    keys: dict[str, str]

    def ask(self, tenant: str, model: str, **more: object) -> httpx.Response:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **more}
        headers = {"authorization": f"Bearer {self.keys[tenant]}"} if tenant else {}
        return self.client.post("/v1/completions", json=body, headers=headers)


class Doors:
    """A port in front of each replica's own, which can be shut while the replica lives on."""

    def __init__(self, replicas) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._servers: dict[str, asyncio.Server] = {}
        self._open: dict[str, list[asyncio.StreamWriter]] = {}
        self.ports: list[int] = []
        self.flags: list[str] = []
        for replica in replicas:
            server = self._run(asyncio.start_server(self._to(replica.port), "127.0.0.1", 0))
            port = server.sockets[0].getsockname()[1]
            self._servers[f"127.0.0.1:{port}"] = server
            self.ports.append(port)
            self.flags.append(f"http://127.0.0.1:{port},control={replica.control_port}")

    @property
    def names(self) -> list[str]:
        """By which the router knows the replicas, in their order."""
        return list(self._servers)

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_S)

    def _to(self, port: int):
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            host, own, *_ = writer.get_extra_info("sockname")
            try:
                there, back = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.transport.abort()
                return
            self._open.setdefault(f"{host}:{own}", []).extend((writer, back))

            async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
                with contextlib.suppress(ConnectionError):
                    while piece := await source.read(65536):
                        sink.write(piece)
                        await sink.drain()
                sink.close()

            await asyncio.gather(pump(reader, back), pump(there, writer))

        return carry

    def shut(self, name: str) -> None:
        """Nobody listens at that replica's port any more, and what was connected is cut."""

        async def shutting() -> None:
            self._servers[name].close()
            for writer in self._open.pop(name, []):
                writer.transport.abort()

        self._run(shutting())

    def close(self) -> None:
        for name in self._servers:
            self.shut(name)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(START_S)
        self._loop.close()


@pytest.fixture
def doors(running) -> Iterator[Doors]:
    made = Doors(running)
    yield made
    made.close()


@pytest.fixture
def gateway(
    doors: Doors, tenants, fleet_store, start_router: Callable, tmp_path: Path
) -> Iterator[Gateway]:
    program, picker_port, port = envoy_program(), free_port(), free_port()
    start_router(
        *(flag for door in doors.flags for flag in ("--replica", door)),
        *("--tenants-file", str(tenants.path), "--store", str(fleet_store)),
        *("--ext-proc", str(picker_port), "--no-access-log"),
    )
    config = tmp_path / "envoy.json"
    config.write_text(
        json.dumps(
            configuration(port=port, picker_port=picker_port, replicas=doors.ports, fail_open=False)
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


def homes(gateway: Gateway, count: int) -> list[str]:
    """Who answers one adapter's requests; for each that was refused, an empty text."""
    found = []
    for _ in range(count):
        answer = gateway.ask("acme", "acme:v1")
        assert answer.status_code in (200, 503), answer.text
        if answer.status_code == 503:
            assert answer.json()["error"]["code"] == "unavailable"
            assert answer.headers["retry-after"]
        found.append(answer.headers["x-mural-replica"] if answer.status_code == 200 else "")
    return found


def test_a_replica_that_envoy_cannot_reach_costs_one_request_though_it_says_that_it_is_well(
    gateway, doors
) -> None:
    (home,) = set(homes(gateway, 3))
    doors.shut(home)
    first, *rest = homes(gateway, 6)
    assert first == ""
    assert set(rest) == {name for name in doors.names if name != home}


def test_a_killed_replica_s_adapters_are_answered_by_the_other_at_once(
    gateway, doors, running
) -> None:
    (home,) = set(homes(gateway, 3))
    running[doors.names.index(home)].process.kill()
    doors.shut(home)
    first, *rest = homes(gateway, 6)
    other = {name for name in doors.names if name != home}
    assert {first} <= {"", *other}
    assert set(rest) == other


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
