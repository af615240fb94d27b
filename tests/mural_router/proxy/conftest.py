"""A proxy over a routing that does as it is told, and replicas that play a script."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
import trustme
import uvloop

from mural_resolvers.errors import MuralError
from mural_router.fleet.endpoint import Endpoint
from mural_router.http.settings import HttpSettings
from mural_router.proxy import Proxy, start
from mural_router.routing import Ask, Outcome, Routed, Routing
from tests.mural_router.proxy.full_backlog import full_backlog
from tests.mural_router.proxy.scripted_replica import BOUND_S, Script, ScriptedReplica


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The loop that the router runs on: its transports differ from asyncio's own."""
    return {"uvloop": uvloop.new_event_loop}


class ScriptedRouted(Routed):
    """Goes through a list of endpoints, as often as `retry` is asked."""

    def __init__(self, routing: ScriptedRouting, body: bytes, stream: bool) -> None:
        self._routing = routing
        self._left = list(routing.endpoints)
        self.endpoint = self._left.pop(0)
        self.body = body
        self.stream = stream
        self.hide_usage = routing.hide_usage
        self.request_headers = (("x-mural-tenant", "acme"), ("authorization", "Bearer router"))
        self.answer_headers = (("x-mural-replica", self.endpoint.name), ("x-request-id", "r-1"))

    def retry(self, why: str) -> bool:
        self._routing.retries.append(why)
        if not self._left:
            return False
        self.endpoint = self._left.pop(0)
        self.answer_headers = (("x-mural-replica", self.endpoint.name), ("x-request-id", "r-1"))
        return True

    def may_retry(self, status: int, mark: str | None) -> bool:
        return status == 401 or (status in (502, 503) and mark == "elsewhere")

    def answered(self, status: int, served: str | None = None) -> None:
        self._routing.statuses.append(status)

    def done(self, outcome: Outcome) -> None:
        self._routing.outcomes.append(outcome)
        self._routing.ended.set()


@dataclass
class ScriptedRouting(Routing):
    """Routes to ``endpoints`` in order; what it was asked and told is kept."""

    endpoints: list[Endpoint] = field(default_factory=list)
    hide_usage: bool = False
    error: MuralError | None = None
    gate: asyncio.Event | None = None
    """Where it is there, routing waits for it."""
    asks: list[Ask] = field(default_factory=list)
    retries: list[str] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    cancelled: int = 0
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def route(self, ask: Ask) -> Routed:
        self.asks.append(ask)
        self.was_asked.set()
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                self.ended.set()
                raise
        if self.error is not None:
            raise self.error
        return ScriptedRouted(self, ask.body, b'"stream":true' in ask.body)

    async def forward(self, ask: Ask) -> Routed:
        return await self.route(ask)

    def on_silence(self, fell_silent: Callable[[Endpoint], None]) -> None:
        self.fell_silent = fell_silent

    async def models(self, ask: Ask) -> bytes:
        self.asks.append(ask)
        if self.error is not None:
            raise self.error
        return b'{"object":"list","data":[]}'

    async def model(self, ask: Ask, name: str) -> bytes:
        self.asks.append(ask)
        return msgspec.json.encode({"id": name})

    async def asked(self) -> None:
        """Until routing was asked something."""
        async with asyncio.timeout(BOUND_S):
            await self.was_asked.wait()

    async def outcome(self) -> Outcome:
        """The next request's end."""
        async with asyncio.timeout(BOUND_S):
            await self.ended.wait()
        self.ended.clear()
        return self.outcomes[-1]


class Client:
    """A connection to the proxy, with bytes in and bytes out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def post(self, body: bytes, path: str = "/v1/completions", *fields: str) -> None:
        lines = "".join(f"{line}\r\n" for line in fields)
        head = f"POST {path} HTTP/1.1\r\nhost: a\r\n{lines}content-length: {len(body)}\r\n\r\n"
        self.send(head.encode() + body)

    async def until(self, end: bytes) -> bytes:
        async with asyncio.timeout(BOUND_S):
            return await self.reader.readuntil(end)

    async def rest(self) -> bytes:
        """Until the proxy closes the connection."""
        async with asyncio.timeout(BOUND_S):
            return await self.reader.read()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One whole answer."""
        head = (await self.until(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.split("\r\n")[:-2]
        fields = {name: value for name, _, value in (line.partition(": ") for line in lines)}
        assert len(fields) == len(lines), head
        if fields.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(await self.until(b"\r\n"), 16):
                body += (await self.reader.readexactly(size + 2))[:-2]
            assert await self.until(b"\r\n") == b"\r\n"
        else:
            async with asyncio.timeout(BOUND_S):
                body = await self.reader.readexactly(int(fields["content-length"]))
        return int(first.split(" ")[1]), fields, body

    def close(self) -> None:
        self.writer.close()


@dataclass
class Stand:
    """Everything of one test."""

    routing: ScriptedRouting
    proxy: Proxy
    replicas: list[ScriptedReplica]

    async def until(self, so: Callable[[], object]) -> None:
        async with asyncio.timeout(BOUND_S):
            while not so():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)

    async def client(self) -> Client:
        return Client(*await asyncio.open_connection("127.0.0.1", self.proxy.port))


MakeStand = Callable[..., Awaitable[Stand]]


@pytest.fixture
async def stand() -> AsyncIterator[MakeStand]:
    """Make a stand of replicas with these scripts."""
    made: list[Stand] = []

    async def make(*scripts: Script, settings: HttpSettings | None = None) -> Stand:
        replicas = [ScriptedReplica(script) for script in scripts]
        routing = ScriptedRouting(
            [await replica.listen(f"r{place}") for place, replica in enumerate(replicas)]
        )
        proxy = await start(settings or HttpSettings(port=0), routing, version="1.2.3")
        made.append(Stand(routing, proxy, replicas))
        return made[-1]

    yield make
    for each in made:
        await each.proxy.close()
        for replica in each.replicas:
            replica.close()


@pytest.fixture
def full_port() -> Iterator[int]:
    """Where nobody is let in, and nobody refused."""
    with full_backlog() as port:
        yield port


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One, in place of the system's hundreds: reading those takes longer than a scenario.

    Beside it lies a key with its certificate for 127.0.0.1, ``server.pem``.
    """
    path = tmp_path_factory.mktemp("tls") / "ca.pem"
    authority = trustme.CA()
    authority.cert_pem.write_to_path(path)
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(path.with_name("server.pem"))
    return str(path)
