"""Fleet views over real servers of the control API, whose engines are scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from ssl import SSLContext
from typing import Any

import msgspec
import pytest

from mural_router.fleet.discovery import Discovery
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.view import FleetSettings, FleetView
from mural_router.placement import Fleet, Replica
from mural_server.protocol import (
    Base,
    Delta,
    Heartbeat,
    Limits,
    Load,
    PrefixStatistics,
    Snapshot,
    StateEvent,
)
from tests.mural_server.api import scripted_server

engine = scripted_server.engine
start_server = scripted_server.start_server
adapter_dir = scripted_server.adapter_dir

WAIT_S = 20


class Listed(Discovery):
    """Gives the sets that a test puts into it."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.sets: asyncio.Queue[tuple[Endpoint, ...]] = asyncio.Queue()
        self.sets.put_nowait(endpoints)

    async def watch(self) -> AsyncGenerator[tuple[Endpoint, ...], None]:
        while True:
            yield await self.sets.get()


class Watched:
    """A running view, and its changes to wait for."""

    def __init__(self, view: FleetView) -> None:
        self.view = view
        self.published = 0
        self._changed = asyncio.Event()
        view.subscribe(self._take)

    def _take(self, fleet: Fleet) -> None:
        assert fleet is self.view.fleet
        self.published += 1
        self._changed.set()

    async def until(self, holds: Callable[[Fleet], object]) -> Fleet:
        """The first fleet for which something holds."""
        async with asyncio.timeout(WAIT_S):
            while not holds(self.view.fleet):
                await self._changed.wait()
                self._changed.clear()
        return self.view.fleet

    async def replica(self, name: str, holds: Callable[[Replica], object]) -> Replica:
        """One replica of the first fleet in which something holds for it."""
        fleet = await self.until(
            lambda fleet: any(one.name == name and holds(one) for one in fleet.replicas)
        )
        return next(one for one in fleet.replicas if one.name == name)

    async def ready(self, name: str) -> Replica:
        return await self.replica(name, lambda one: one.ready and not one.stale)


class StateServer:
    """A control API by hand: says what a test wants, as raw as it wants.

    Each connection gets the snapshot of the next of ``boots``, then ``extra``, then what
    `change` and `send` give.
    """

    def __init__(self, boots: tuple[str, ...] = ("boot",), extra: bytes = b"") -> None:
        self.boots = list(boots)
        self.extra = extra
        self.connections = 0
        self.seq = 0
        self.snapshot = snapshot_of(self.boots[0])
        self.endpoint: Endpoint
        self.close: Callable[[], None]
        self._writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await reader.readuntil(b"\r\n\r\n")
            boot = self.boots.pop(0) if len(self.boots) > 1 else self.boots[0]
            self.snapshot = msgspec.structs.replace(self.snapshot, boot_id=boot, seq=self.seq)
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            self._writers.append(writer)
            self.send(self.snapshot)
            writer.write(self.extra)
            await writer.drain()
            await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # The test has ended.
        finally:
            writer.close()

    def send(self, event: StateEvent) -> None:
        self._writers = [writer for writer in self._writers if not writer.is_closing()]
        for writer in self._writers:
            writer.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

    def beat(self) -> None:
        self.send(Heartbeat(boot_id=self.snapshot.boot_id, seq=self.seq))

    def change(self, running: int) -> None:
        """Told to those who are connected, and in the snapshot of those who come later."""
        self.seq += 1
        load = Load(running=running)
        self.snapshot = msgspec.structs.replace(self.snapshot, load=load)
        self.send(Delta(boot_id=self.snapshot.boot_id, seq=self.seq, load=load))

    def drop(self) -> None:
        """Cut every connection."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


def snapshot_of(boot_id: str, **more: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "boot_id": boot_id,
        "seq": 0,
        "base": Base(model_names=("other",), spec_hash="0" * 64),
        "limits": Limits(
            slots=4,
            max_cpu_loras=8,
            host_bytes=0,
            max_lora_rank=8,
            max_num_seqs=4,
            max_model_len=256,
        ),
        "load": Load(),
        "prefix": PrefixStatistics(),
        "accepting": True,
        "ready": True,
    }
    return Snapshot(**(fields | more))


@pytest.fixture
async def state_server() -> AsyncIterator[Callable[..., object]]:
    """``await state_server(boots=…, extra=…)``: ends with the test."""
    async with AsyncExitStack() as held:

        async def start(ssl: SSLContext | None = None, **more: Any) -> StateServer:
            server = StateServer(**more)
            listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=ssl)
            server.close = listening.close
            held.callback(listening.close)
            held.callback(server.drop)
            port = listening.sockets[0].getsockname()[1]
            server.endpoint = Endpoint(name="a", host="127.0.0.1", port=port, control_port=port)
            return server

        yield start


@pytest.fixture
def make_snapshot() -> Callable[..., Snapshot]:
    return snapshot_of


@asynccontextmanager
async def watching(discovery: Discovery, settings: FleetSettings) -> AsyncIterator[Watched]:
    watched = Watched(FleetView(discovery, settings))
    running = asyncio.create_task(watched.view.run())
    try:
        yield watched
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def watch() -> AsyncIterator[Callable[..., object]]:
    """``await watch(discovery or endpoint, …, **settings)``: a view that ends with the test."""
    async with AsyncExitStack() as held:

        async def start(*found: Discovery | Endpoint, **settings: Any) -> Watched:
            given = [each for each in found if isinstance(each, Discovery)]
            endpoints = [each for each in found if isinstance(each, Endpoint)]
            discovery = given[0] if given else Listed(*endpoints)
            return await held.enter_async_context(watching(discovery, FleetSettings(**settings)))

        yield start


@pytest.fixture
def listed() -> type[Listed]:
    return Listed


@pytest.fixture
def endpoint_of() -> Callable[..., Endpoint]:
    """The endpoint of a server of the API's tests."""

    def make(server: scripted_server.Server, name: str = "a", **more: Any) -> Endpoint:
        return Endpoint(
            name=name,
            host="127.0.0.1",
            port=server.port,
            control_port=server.control_port,
            **more,
        )

    return make
