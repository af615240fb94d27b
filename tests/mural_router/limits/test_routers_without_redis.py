"""Two `mural route` over one Redis that is killed under load: what clients get and what counts."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mural_resolvers.tenants import mint_key
from mural_router.http.scan import plain_request

# Processes take seconds to start, and what they are about is the same for both servers.
pytestmark = pytest.mark.parametrize(
    "server",
    ["valkey-server", pytest.param("redis-server", marks=pytest.mark.full)],
    indirect=True,
)

LIMIT = 300
SMALL_LIMIT = 40
SEQUENCES = 4
TENANTS = {
    "acme": {"requests_per_minute": LIMIT, "tokens_per_minute": 10_000_000},
    "globex": {"requests_per_minute": SMALL_LIMIT},
    "initech": {"concurrency": SEQUENCES},
    "initrode": {"requests_per_minute": 1_000_000},
}
KEYS = {tenant: mint_key() for tenant in TENANTS}
BOUND_S = 30.0
ROUTING = r"routing on http://127\.0\.0\.1:(\d+)"
PAGES = r"admin pages on http://127\.0\.0\.1:(\d+)"
AWAY = r"the store of limits is out of reach \(\w+\): tenants have 1/2 of their limits here"
BACK = r"limits are counted together with \d other routers"
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
RETRY_AFTER = re.compile(rb"\r\nretry-after: *([1-9]\d*)\r", re.IGNORECASE)

Until = Callable[[Callable[[], object]], Awaitable[None]]


class Client:
    """One kept connection to a router."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def get(self, path: str) -> bytes:
        status, _, body = await self._exchange(f"GET {path} HTTP/1.1\r\nhost: router\r\n\r\n")
        assert status == 200
        return body

    async def ask(self, tenant: str, *, plain: bool, prompt: str = "short") -> int:
        """The answer's status. Plain requests go the express way; those with a salt do not."""
        request = {
            "model": f"{tenant}:v1",
            "prompt": prompt,
            "max_tokens": 32,
            "stream": prompt != "short",
        }
        body = json.dumps(request if plain else request | {"cache_salt": "own"})
        status, head, _ = await self._exchange(
            "POST /v1/completions HTTP/1.1\r\nhost: router\r\naccept: */*\r\n"
            f"authorization: Bearer {KEYS[tenant].key}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n{body}"
        )
        # Whoever is refused is told when to come back.
        assert status != 429 or RETRY_AFTER.search(head), head
        return status

    async def _exchange(self, request: str) -> tuple[int, bytes, bytes]:
        async with asyncio.timeout(BOUND_S):
            if self._streams is None:
                self._streams = await asyncio.open_connection("127.0.0.1", self._port)
            reader, writer = self._streams
            writer.write(request.encode())
            head = await reader.readuntil(b"\r\n\r\n")
            length = LENGTH.search(head)
            # The answer to a stream is its head here: it goes on for as long as the client stays.
            body = await reader.readexactly(int(length[1])) if length else b""
        return int(head.split(b" ", 2)[1]), head, body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


@dataclass
class Router:
    """A `mural route` process: its port, its admin pages and its log."""

    process: subprocess.Popen[bytes]
    log_file: Path
    clients: list[Client] = field(default_factory=list)

    @staticmethod
    def start(command: list[str], log_file: Path, redis_url: str) -> Router:
        environment = os.environ | {"MURAL_REDIS_URL": redis_url}
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stderr=log, env=environment)
        return Router(process, log_file)

    def said(self, pattern: str) -> list[str]:
        return re.findall(pattern, self.log_file.read_text())

    def client(self) -> Client:
        client = Client(int(self.said(ROUTING)[0]))
        self.clients.append(client)
        return client

    async def page(self, path: str) -> str:
        pages = Client(int(self.said(PAGES)[0]))
        try:
            return (await pages.get(path)).decode()
        finally:
            pages.close()

    async def metric(self, sample: str) -> float:
        """0 where there is none."""
        metrics = await self.page("/metrics")
        found = re.search(rf"^{re.escape(sample)} (\S+)$", metrics, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    async def away_s(self) -> float:
        return await self.metric('mural_router_limits{what="away_seconds"}')

    async def shares(self) -> bool:
        """Whether it counts together with the other."""
        limits = json.loads(await self.page("/debug/limits"))["limits"]
        return bool(limits["routers"] == 2 and limits["away_s"] is None)

    def leave(self) -> None:
        """All that ask here go away, whatever they wait for."""
        for client in self.clients:
            client.close()
        self.clients.clear()

    def end(self) -> None:
        self.leave()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def replica() -> Iterator[int]:
    """The port of a stand-in for a vLLM pod."""
    command = [sys.executable, "-m", "mural_router.bench.replica", "--replicas", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())[0]
        process.kill()


@pytest.fixture
async def routers(
    server: Any, replica: int, tmp_path: Path, until: Until
) -> AsyncIterator[tuple[Router, Router]]:
    """Two that know of each other; the server runs by then."""
    server.start(durable=True)
    file = tmp_path / "tenants.yaml"
    tenants = [
        {"id": name, "keys": [{"id": key.key_id, "sha256": key.sha256}], "limits": TENANTS[name]}
        for name, key in KEYS.items()
    ]
    file.write_text(json.dumps({"tenants": tenants}))
    command = [sys.executable, "-m", "mural_router.commands", "--host", "127.0.0.1"]
    command += ["--port", "0", "--admin-port", "0", "--no-access-log"]
    command += ["--tenants-file", str(file), "--replica", f"http://127.0.0.1:{replica},engine=vllm"]
    with ExitStack() as held:
        found = []
        for name in ("one", "two"):
            found.append(Router.start(command, tmp_path / f"{name}.log", server.url))
            held.callback(found[-1].end)
        await until(lambda: all(router.said(ROUTING) for router in found))
        for router in found:
            # Each learns how many they are with its next word to the store.
            await eventually(router.shares)
        yield found[0], found[1]


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            if await holds():
                return
            await asyncio.sleep(0.02)


class Load:
    """Requests of a tenant through routers, plain and not, for as long as it is entered."""

    def __init__(self, tenant: str, *routers: Router) -> None:
        self._tenant, self._routers = tenant, routers
        self.answers: list[Counter[int]] = [Counter() for _ in routers]
        """Statuses, by router."""
        self._tasks: list[asyncio.Task[None]] = []
        self._ending = False

    @property
    def admitted(self) -> int:
        return sum(answers[200] for answers in self.answers)

    async def __aenter__(self) -> Load:
        self._tasks = [
            asyncio.create_task(self._go_on(router.client(), answers, plain=plain))
            for router, answers in zip(self._routers, self.answers, strict=True)
            for plain in (True, True, False, False)
        ]
        return self

    async def _go_on(self, client: Client, answers: Counter[int], *, plain: bool) -> None:
        while not self._ending:
            status = await client.ask(self._tenant, plain=plain)
            answers[status] += 1
            # Not as fast as it goes: what is killed is to be killed amid it.
            await asyncio.sleep(0.02 if status == 429 else 0.005)

    async def are_refused(self) -> None:
        """Wait until each router has refused some more, and so has given what it would give."""
        seen = [answers[429] for answers in self.answers]
        async with asyncio.timeout(BOUND_S):
            while any(
                answers[429] < before + 20
                for answers, before in zip(self.answers, seen, strict=True)
            ):
                await self._running()

    async def has(self, admitted: int) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.admitted < admitted:
                await self._running()

    async def _running(self) -> None:
        done, _ = await asyncio.wait(self._tasks, timeout=0.01)
        for task in done:
            task.result()

    async def __aexit__(self, *_: object) -> None:
        # What was asked for is waited for: it counts.
        self._ending = True
        await asyncio.gather(*self._tasks)


def counted(server: Any, tenant: str) -> int:
    """Requests that the store counts of a tenant, leases included."""
    raw = server.client.hget(f"{{mural:limits}}:t:{tenant}", "m")
    return 0 if raw is None else int(msgspec.msgpack.decode(raw)[1])


async def test_redis_is_killed_under_load_and_comes_back_empty(
    server: Any, routers: tuple[Router, Router], until: Until
) -> None:
    one, two = routers
    # Globex has used all of its limit, through one router; of initech's sequences all are open.
    globex = [await one.client().ask("globex", plain=n % 2 == 0) for n in range(SMALL_LIMIT + 2)]
    assert globex == [200] * SMALL_LIMIT + [429] * 2
    assert [await stream(one) for _ in range(SEQUENCES + 1)] == [200] * SEQUENCES + [429]
    assert await stream(two) == 429

    async with Load("acme", one, two) as load:
        await load.has(admitted=LIMIT // 6)
        server.kill()
        before = [answers[200] for answers in load.answers]
        await load.are_refused()
        # Each goes on with its share, and says so.
        assert all(
            answers[200] > earlier for answers, earlier in zip(load.answers, before, strict=True)
        )
        for router in routers:
            assert await router.away_s() > 0
            assert len(router.said(AWAY)) == 1
        async with Load("globex", one, two) as over:
            await over.are_refused()
        assert [answers[200] for answers in over.answers] == [0, SMALL_LIMIT // 2]
        alone = [await stream(router) for router in (one, two, two, two)]
        assert alone == [429, 200, 200, 429]

        server.start()
        await until(lambda: all(len(router.said(BACK)) == 2 for router in routers))
        for router in routers:
            assert await router.shares()
            assert await router.away_s() == 0
        await load.are_refused()
        async with Load("globex", one, two) as over:
            await over.are_refused()
        assert over.admitted == 0

    # No more than (2 - 1/n) of a limit, and Redis knows again of each of them, once.
    assert [set(answers) for answers in load.answers] == [{200, 429}] * 2
    assert LIMIT <= load.admitted <= LIMIT * 3 // 2
    await until(lambda: counted(server, "acme") == load.admitted)
    await until(lambda: counted(server, "globex") == SMALL_LIMIT * 3 // 2)
    assert [await stream(router) for router in routers] == [429, 429]
    for router, answers in zip(routers, load.answers, strict=True):
        # Both ways of the proxy had a part in it, and the express way refused, too.
        carried, refused = [
            await router.metric(f'mural_router_express_total{{outcome="{outcome}"}}')
            for outcome in ("whole", "refused")
        ]
        assert (carried > 0) == (refused > 0) == (plain_request is not None)
        assert carried < answers[200] + SMALL_LIMIT
        assert refused < answers[429]
        router.leave()
    await eventually(lambda: opens(two, SEQUENCES))


async def stream(router: Router) -> int:
    """The status of a stream of initech's, which goes on until its client leaves."""
    client = router.client()
    return await client.ask("initech", plain=False, prompt="paced:0.05:100000:")


async def opens(router: Router, count: int) -> bool:
    statuses = [await stream(router) for _ in range(count)]
    router.leave()
    return statuses == [200] * count


def said_more_often(routers: tuple[Router, Router], times: int) -> bool:
    return all(len(router.said(BACK)) > times for router in routers)


@pytest.mark.slow
async def test_redis_is_killed_again_and_again_and_has_forgotten_nothing(
    server: Any, routers: tuple[Router, Router], until: Until
) -> None:
    """Nothing is lost then, and nothing counted twice."""
    async with Load("initrode", *routers) as load:
        for kills in range(1, 4):
            await load.has(load.admitted + 100)
            server.kill()
            await load.has(load.admitted + 100)
            server.start(durable=True)
            await until(partial(said_more_often, routers, kills))

    assert [set(answers) for answers in load.answers] == [{200}] * 2
    await until(lambda: counted(server, "initrode") == load.admitted)
