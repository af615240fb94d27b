"""A router under requests that mean it harm, by the ten thousand: nothing of them stays."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from mural_resolvers.tenants import mint_key
from tests.mural_router.ready_server import control

REQUESTS = 60_000
WORKERS = 12
START_S = 60.0
ANSWER_S = 60.0
"""Of one request: the router's own bounds are shorter."""
GROWN_BYTES = 8 << 20
"""After the first third, when the caches of names are full. If each request that comes then left
a kilobyte behind it would be 40 MB; the allocator's own unrest is some 2 MB."""
MAX_SERIES = 600
"""Seven for each of 50 versions, which replicas have answered under; the rest are few."""
ADMIN = "the-admins-own-key"
ACME, GLOBEX = mint_key(), mint_key()
TENANTS = f"""\
tenants:
- id: acme
  keys: [{{id: {ACME.key_id}, sha256: {ACME.sha256}}}]
- id: globex
  keys: [{{id: {GLOBEX.key_id}, sha256: {GLOBEX.sha256}}}]
  limits: {{requests_per_minute: 60, concurrency: 2}}
"""
ROUTING = re.compile(r"routing on http://127\.0\.0\.1:(\d+)")
PAGES = re.compile(r"admin pages on (http://\S+)")
LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)


# -- what the router is in front of ---------------------------------------------------------------


ANSWER = b'{"id":"1","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
VLLM = {
    b"GET /health": b"",
    b"GET /metrics": b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n",
    b"GET /v1/models ": b'{"object":"list","data":[{"id":"base","parent":null}]}',
}


async def replica(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers every request under whatever name; a stream where one is asked for."""
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            found = LENGTH.search(head)
            body = await reader.readexactly(int(found[1])) if found else b""
            if b"chunked" in head:
                await reader.readuntil(b"0\r\n\r\n")
            if b'"stream":true' in body or b'"stream": true' in body:
                event = b'data: {"id":"1","choices":[{"index":0,"text":"word"}]}\n\n'
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
                    b"transfer-encoding: chunked\r\n\r\n"
                )
                for each in (event, event, b"data: [DONE]\n\n"):
                    writer.write(b"%x\r\n%b\r\n" % (len(each), each))
                    await asyncio.sleep(0)
                writer.write(b"0\r\n\r\n")
                continue
            answer = next((page for path, page in VLLM.items() if head.startswith(path)), ANSWER)
            writer.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
                % len(answer)
            )
            writer.write(answer)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError):
        pass  # The router has gone on.
    finally:
        writer.close()


# -- what it is asked -----------------------------------------------------------------------------

ODD = "\0\r\n\t /\\:.%~{}[]\"'é漢\u202e\ufeff\U0001f600aZ09_-"
POST = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


class Hostile:
    """Makes requests, none like another. ``ends``: its client goes when it is sent."""

    def __init__(self, seed: int, *, filling: bool) -> None:
        """``filling``: most of them have what the router remembers up to a number of them."""
        self._random = random.Random(seed)
        self._filling = filling

    def request(self) -> tuple[bytes, bool]:
        if self._filling and self._random.random() < 0.95:
            name = f"acme/{self._word()}{self._word()}:{self._word()}"
            content = {"model": name, "prompt": self._word(), "cache_salt": self._word()}
            return self._post(json.dumps(content).encode(), key=ACME.key), False
        kinds = (
            (30, self._inference),
            (8, self._garbled_json),
            (6, self._path),
            (6, self._model_card),
            (5, self._adapters),
            (5, self._aborted),
            (5, self._left),
            (5, self._no_http),
        )
        (make,) = self._random.choices([make for _, make in kinds], [share for share, _ in kinds])
        return make()

    def _word(self, most: int = 40) -> str:
        return f"{self._random.getrandbits(64):x}"[: self._random.randint(1, 16)] + "x" * (
            self._random.randint(0, most) if self._random.random() < 0.1 else 0
        )

    def _odd(self, most: int = 60) -> str:
        return "".join(self._random.choices(ODD, k=self._random.randint(0, most)))

    def _name(self) -> str:
        word = self._word
        return self._random.choice(
            (
                lambda: f"acme:{word()}",
                *[lambda: f"acme/{word()}:{word()}"] * 6,
                lambda: f"acme/{word()}",
                lambda: f"globex/{word()}:{word()}",
                lambda: f"{word()}/{word()}:{word()}",
                lambda: f"../{word()}:..",
                lambda: "base",
                self._odd,
                lambda: "a" * self._random.randint(100, 5_000),
            )
        )()

    def _key(self) -> str:
        return self._random.choice(
            (
                *[lambda: f"Bearer {ADMIN}"] * 8,
                *[lambda: f"Bearer {ACME.key}"] * 8,
                lambda: f"Bearer {GLOBEX.key}",
                lambda: f"Bearer mural_{self._word()}_{self._word()}",
                lambda: f"bearer  {ADMIN}  ",
                lambda: f"Basic {self._word()}",
                lambda: "x" * 600,
                lambda: "",
            )
        )()

    def _fields(self, key: str | None) -> list[str]:
        word, chance = self._word, self._random.random
        if key is not None:
            return ["host: a", f"authorization: Bearer {key}", f"x-request-id: {word(200)}"]
        fields = ["host: a", f"authorization: {self._key()}"]
        if chance() < 0.5:
            fields.append(f"x-request-id: {word(200)}")
        if chance() < 0.3:
            fields.append(f"x-session-id: {word(200)}")
        if chance() < 0.3:
            trace = f"00-{self._random.getrandbits(128):032x}-{self._random.getrandbits(64):016x}"
            fields.append(f"traceparent: {trace}-01")
        if chance() < 0.3:
            fields += [f"x-{word()}: {word(400)}" for _ in range(self._random.randint(1, 20))]
        if chance() < 0.2:
            fields += [f"x-mural-tenant: {word()}", f"x-mural-{word()}: {word()}"]
        if chance() < 0.1:
            fields.append(f"authorization: Bearer {word()}")
        return fields

    def _head(self, method: str, path: str, *fields: str, key: str | None = None) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", *self._fields(key), *fields]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("utf-8", "surrogatepass")

    def _post(self, body: bytes, *, key: str | None = None) -> bytes:
        path = self._random.choice(POST)
        fields = ("content-type: application/json", f"content-length: {len(body)}")
        return self._head("POST", path, *fields, key=key) + body

    def _content(self) -> dict[str, object]:
        word, chance = self._word, self._random.random
        content: dict[str, object] = {"model": self._name(), "prompt": word() * 20}
        if chance() < 0.3:
            content["messages"] = [{"role": "user", "content": word() * 20}]
        if chance() < 0.3:
            content["user"] = word(300)
        if chance() < 0.3:
            content["stream"] = True
        if chance() < 0.2:
            content["cache_salt"] = word(300)
        if chance() < 0.2:
            content[word()] = {word(): [word()]}
        if chance() < 0.2:
            content["max_tokens"] = self._random.choice((-1, 0, 10**30, 1.5, "many", None, 16))
        if chance() < 0.1:
            content["n"] = self._random.choice((0, 2, 10**9, "x"))
        return content

    def _inference(self) -> tuple[bytes, bool]:
        return self._post(json.dumps(self._content()).encode()), False

    def _garbled_json(self) -> tuple[bytes, bool]:
        whole = json.dumps(self._content()).encode()
        body = self._random.choice(
            (
                lambda: whole[: self._random.randint(0, len(whole))],
                lambda: b"[" * self._random.randint(1, 2_000),
                lambda: b'{"a":' * 1_500 + b"1" + b"}" * 1_500,
                lambda: self._random.randbytes(self._random.randint(0, 200)),
                lambda: b'{"model": "\\ud800' + self._word().encode() + b'"}',
                lambda: whole.replace(b"model", b"model\\u0000", 1),
                lambda: whole[:-1] + b', "model": "' + self._word().encode() + b'"}',
                lambda: b'{"model": ' + b"9" * self._random.randint(1, 5_000) + b"}",
                lambda: whole + b" " * self._random.randint(0, 20_000),
            )
        )()
        return self._post(body), False

    def _path(self) -> tuple[bytes, bool]:
        method = self._random.choice(("GET", "POST", "PUT", "DELETE", "PATCH", self._word(20)))
        path = self._random.choice(
            (
                lambda: f"/{self._word()}/{self._word()}",
                lambda: f"/v1/{self._word()}?{self._word()}={self._word(500)}",
                lambda: f"/metrics?{self._word()}",
                lambda: f"/v1/load_lora_adapter/{self._word()}",
                lambda: "/v1/models",
                lambda: "/" + "%2e%2e/" * self._random.randint(1, 50) + self._word(),
            )
        )()
        return self._head(method, path, "content-length: 0"), False

    def _model_card(self) -> tuple[bytes, bool]:
        name = self._name().encode("utf-8", "surrogatepass")
        quoted = "".join(f"%{byte:02x}" for byte in name[:1_000])
        return self._head("GET", f"/v1/models/{quoted}"), False

    def _adapters(self) -> tuple[bytes, bool]:
        """An upload, chunked, into a tenant's store that is made up."""
        path = f"/v1/adapters/{self._word()}/{self._word()}/{self._word()}"
        method = self._random.choice(("GET", "POST", "PUT", "DELETE"))
        if method in ("GET", "DELETE"):
            return self._head(method, path), False
        data = self._random.randbytes(self._random.randint(1, 3_000))
        chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data)
        return self._head(method, path, "transfer-encoding: chunked") + chunked, False

    def _aborted(self) -> tuple[bytes, bool]:
        """A body that does not come."""
        whole = self._post(json.dumps(self._content()).encode())
        if self._random.random() < 0.5:
            head, _, body = whole.partition(b"\r\n\r\n")
            head = re.sub(rb"content-length: \d+", b"transfer-encoding: chunked", head)
            whole = head + b"\r\n\r\n" + b"%x\r\n%b" % (len(body) + 9, body)
        return whole[: -self._random.randint(1, 20)], True

    def _left(self) -> tuple[bytes, bool]:
        """A client that does not wait for its answer."""
        return self._inference()[0], True

    def _no_http(self) -> tuple[bytes, bool]:
        word = self._word
        return self._random.choice(
            (
                lambda: self._random.randbytes(self._random.randint(1, 300)) + b"\r\n\r\n",
                lambda: f"GET /{word()} HTTP/9.9\r\n\r\n".encode(),
                lambda: b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 500 + b"\r\n",
                lambda: f"GET /health HTTP/1.1\nhost: {word()}\n\n".encode(),
                lambda: f"POST /tokenize HTTP/1.1\r\nhost: a\r\n{word()} : b\r\n\r\n".encode(),
                lambda: (
                    f"POST /tokenize HTTP/1.1\r\nhost: a\r\ncontent-length: {word()}\r\n"
                    "transfer-encoding: chunked\r\n\r\n".encode()
                ),
                lambda: b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
            )
        )(), True


# -- how it is asked ------------------------------------------------------------------------------


@dataclass
class Clients:
    """Clients that send and read, each on connections of its own."""

    port: int
    statuses: Counter[int] = field(default_factory=Counter)
    sent: int = 0
    odd: list[bytes] = field(default_factory=list)
    """Requests that were answered 500."""

    async def send(self, requests: int, seed: int, *, filling: bool = False) -> None:
        async with asyncio.TaskGroup() as tasks:
            for at in range(WORKERS):
                hostile = Hostile(seed * 1_000 + at, filling=filling)
                tasks.create_task(self._work(requests // WORKERS, hostile))

    async def _work(self, requests: int, hostile: Hostile) -> None:
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for _ in range(requests):
            if connection is None:
                connection = await asyncio.open_connection("127.0.0.1", self.port)
            reader, writer = connection
            request, ends = hostile.request()
            self.sent += 1
            kept = False
            try:
                writer.write(request)
                if ends:
                    await writer.drain()
                    await asyncio.sleep(0)
                else:
                    async with asyncio.timeout(ANSWER_S):
                        status, kept = await self._answer(reader, request.startswith(b"HEAD"))
                    self.statuses[status] += 1
                    if status == 500:
                        self.odd.append(request)
            except (ConnectionError, asyncio.IncompleteReadError):
                self.statuses[0] += 1
            if not kept:
                writer.transport.abort()
                connection = None
        if connection is not None:
            connection[1].transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, bare: bool) -> tuple[int, bool]:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        found = LENGTH.search(head)
        if b"transfer-encoding: chunked" in head:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                await reader.readexactly(size + 2)
            await reader.readexactly(2)
        elif found is not None and not bare:
            await reader.readexactly(int(found[1]))
        return int(head.split(b" ", 2)[1]), b"connection: close" not in head


@dataclass
class Running:
    """A router as a process."""

    process: asyncio.subprocess.Process
    port: int
    pages: str

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    async def series(self) -> dict[str, float]:
        async with httpx.AsyncClient(timeout=ANSWER_S) as client:
            text = (await client.get(f"{self.pages}/metrics")).text
        lines = (line for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def at_rest(self) -> dict[str, float]:
        """The series once nothing is in flight."""
        async with asyncio.timeout(ANSWER_S):
            while True:
                series = await self.series()
                if not series['mural_router_http_in_flight{what="requests"}']:
                    return series
                await asyncio.sleep(0.1)


@pytest.fixture
async def router(tmp_path: Path) -> AsyncIterator[Running]:
    async with AsyncExitStack() as held:
        ports = []
        for serve in (replica, replica, replica, control):
            server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
            held.callback(server.close)
            ports.append(server.sockets[0].getsockname()[1])
        (tmp_path / "tenants.yaml").write_text(TENANTS)
        (tmp_path / "store").mkdir()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "mural_router.commands", "--host", "127.0.0.1"),
            *("--port", "0", "--admin-port", "0"),
            *("--replica", f"http://127.0.0.1:{ports[0]},control={ports[3]},name=one"),
            *("--replica", f"http://127.0.0.1:{ports[1]},control={ports[3]},name=two"),
            *("--replica", f"http://127.0.0.1:{ports[2]},engine=vllm,name=three"),
            *("--tenants-file", str(tmp_path / "tenants.yaml"), "--api-key", ADMIN),
            *("--store", str(tmp_path / "store"), "--access-log", str(tmp_path / "access.log")),
            *("--queue-wait-s", "1"),
            stderr=asyncio.subprocess.PIPE,
            env=os.environ | {"MURAL_ROUTER_TOKEN": "the-token-of-this-router"},
        )
        held.push_async_callback(_end, process)
        assert process.stderr is not None
        found: dict[re.Pattern[str], str] = {}
        async with asyncio.timeout(START_S):
            while len(found) < 2:
                line = (await process.stderr.readline()).decode()
                assert line, "the router ended"
                for pattern in (ROUTING, PAGES):
                    if match := pattern.search(line):
                        found[pattern] = match[1]
        reading = asyncio.create_task(_read(process.stderr, tmp_path / "router.log"))
        held.callback(reading.cancel)
        yield Running(process, int(found[ROUTING]), found[PAGES])


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    async with asyncio.timeout(ANSWER_S):
        await process.wait()
    # Its connections' ends come with the next turns.
    await asyncio.sleep(0.1)


async def _read(stream: asyncio.StreamReader, path: Path) -> None:
    with path.open("wb") as file:
        while data := await stream.read(1 << 16):
            file.write(data)


@pytest.mark.slow
@pytest.mark.timeout(1_200)
async def test_hostile_requests_leave_no_memory_no_series_and_no_500_behind(
    router: Running, tmp_path: Path
) -> None:
    load = Clients(router.port)
    await load.send(REQUESTS // 3, seed=1, filling=True)
    warm, warm_series, warm_files = (
        router.resident_bytes(),
        await router.at_rest(),
        router.open_files(),
    )
    for seed in (2, 3):
        await load.send(REQUESTS // 3, seed=seed)
        print(seed, (router.resident_bytes() - warm) >> 10, "KiB more;", dict(load.statuses))
    series = await router.at_rest()
    grown = router.resident_bytes() - warm
    assert load.sent >= REQUESTS - 3 * WORKERS
    assert not load.odd, load.odd[:3]
    assert load.statuses[200] > REQUESTS / 4, "many are good enough to reach a replica"
    assert {401, 403, 404, 400} <= load.statuses.keys()
    assert not series.get('mural_router_requests_total{status="500"}')
    assert grown <= GROWN_BYTES, f"{grown} bytes after {2 * REQUESTS // 3} requests"
    assert len(series) <= MAX_SERIES
    assert len(series) - len(warm_series) <= 20, series.keys() - warm_series.keys()
    assert router.open_files() - warm_files <= 50
    assert router.process.returncode is None
    log = await asyncio.to_thread((tmp_path / "router.log").read_text)
    assert "Traceback" not in log
