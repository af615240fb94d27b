"""How soon a router sees that a replica drains, dies or comes back, by each way of finding it.

Replicas are stand-ins in this process that speak the state stream, or vLLM's pages; the view, the
followers and the discoveries are the router's own, with its own intervals. Times are from the
moment the replica (or the DNS record, or the EndpointSlice) changes to the fleet that requests are
placed by:

    .venv/bin/python benchmarks/discovery.py [--rounds 20] [--kubeconfig FILE --namespace NAME]

With a kubeconfig an EndpointSlice of its own is written there, and deleted at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rrset
import msgspec
import uvloop

from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.config import cluster_config
from mural_resolvers.kubernetes.paths import ENDPOINT_SLICES
from mural_router.fleet.discovery import Discovery
from mural_router.fleet.dns import DnsDiscovery, DnsPlace
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.kubernetes import KubernetesDiscovery, KubernetesPlace
from mural_router.fleet.static import StaticDiscovery
from mural_router.fleet.view import FleetSettings, FleetView
from mural_router.placement import Fleet
from mural_server.protocol import Base, Delta, Limits, Load, PrefixStatistics, Snapshot

BOUND_S = 60.0
ROW = "{:<34} {:<44} {:>9} {:>9}"
SERVICE = "mural-discovery-benchmark"
TTL_S = 1
STEADY_S = 6.0
"""For so long a server lives, or is away, before that changes: a follower tries one that keeps
breaking off less and less often."""
MOST_WITH_PAUSE = 10

Change = Callable[[], Awaitable[None]]
Holds = Callable[[Fleet], bool]


class Replica:
    """A stand-in that can be killed: no connection of it stays, and nobody listens."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen, where it listened before."""
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """As if its process had been killed."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            await self.answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # Killed, or not followed any more.
        finally:
            self._writers.discard(writer)
            writer.close()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection."""
        raise NotImplementedError


class Server(Replica):
    """Speaks the control API's state stream."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__(host)
        self._seq = 0
        self._accepting = True

    async def accept(self, accepting: bool) -> None:
        """Begin or end a drain, and say so."""
        self._seq, self._accepting = self._seq + 1, accepting
        delta = Delta(boot_id="one", seq=self._seq, accepting=accepting)
        for writer in self._writers:
            writer.write(b"data: " + msgspec.json.encode(delta) + b"\n\n")

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        limits = Limits(
            slots=4, max_cpu_loras=8, host_bytes=0, max_lora_rank=8, max_num_seqs=4, max_model_len=9
        )
        snapshot = Snapshot(
            boot_id="one",
            seq=self._seq,
            base=Base(model_names=("tiny",), spec_hash="0" * 64),
            limits=limits,
            load=Load(),
            prefix=PrefixStatistics(),
            accepting=self._accepting,
            ready=True,
        )
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
        writer.write(head + b"data: " + msgspec.json.encode(snapshot) + b"\n\n")
        await writer.drain()
        await reader.read()


class Pod(Replica):
    """Has as much of vLLM's pages as a router looks at."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1")
        self.healthy = True

    async def become(self, healthy: bool) -> None:
        """From the next look on."""
        self.healthy = healthy

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
        pages = {
            b"/health": b"",
            b"/metrics": b"vllm:num_requests_running 0.0\n",
            b"/v1/models": b'{"object":"list","data":[{"id":"tiny","parent":null}]}',
        }
        status = b"503" if path == b"/health" and not self.healthy else b"200"
        page = pages[path]
        head = b"HTTP/1.1 %b X\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        writer.write(head % (status, len(page)) + page)
        await writer.drain()


class Zone(asyncio.DatagramProtocol):
    """A DNS server of one name."""

    def __init__(self) -> None:
        self.addresses: tuple[str, ...] = ()

    async def become(self, *addresses: str) -> None:
        """From the next question on."""
        self.addresses = addresses

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none by their class.
        self.transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        name = query.question[0].name
        answer.answer.append(dns.rrset.from_text(name, TTL_S, "IN", "A", *self.addresses))
        self.transport.sendto(answer.to_wire(), address)


class Watched:
    """A running view."""

    def __init__(self, view: FleetView) -> None:
        self.view = view
        self._news = asyncio.Event()
        view.subscribe(lambda _: self._news.set())

    async def after(self, change: Change, holds: Holds) -> float:
        """Seconds from a change to the first fleet in which something holds."""
        began = time.perf_counter()
        await change()
        await self.until(holds)
        return time.perf_counter() - began

    async def until(self, holds: Holds) -> None:
        """Wait for such a fleet."""
        async with asyncio.timeout(BOUND_S):
            while not holds(self.view.fleet):
                self._news.clear()
                await self._news.wait()


@asynccontextmanager
async def watching(discovery: Discovery) -> AsyncIterator[Watched]:
    """A view over what a discovery finds, from its first ready replica on."""
    watched = Watched(FleetView(discovery, FleetSettings()))
    running = asyncio.create_task(watched.view.run())
    try:
        await watched.until(lambda fleet: bool(fleet.accepting))
        yield watched
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def some(count: int) -> Holds:
    """As many replicas take requests."""
    return lambda fleet: len(fleet.accepting) == count


async def print_rounds(
    watched: Watched,
    way: str,
    rounds: int,
    *changes: tuple[str, Change, Holds],
    pause_s: float = 0.0,
) -> None:
    """Make the changes in turns, a pause before each, and print how long each took to be seen."""
    seen: dict[str, list[float]] = {what: [] for what, _, _ in changes}
    for _ in range(rounds):
        for what, change, holds in changes:
            await asyncio.sleep(pause_s)
            seen[what].append(await watched.after(change, holds))
    for what, times in seen.items():
        print(ROW.format(way, what, f"{statistics.median(times):.3f}", f"{max(times):.3f}"))


async def a_list(rounds: int) -> None:
    """Servers by their stream, pods by their pages."""
    server = Server()
    await server.start()
    endpoint = Endpoint("a", server.host, server.port, control_port=server.port)
    async with watching(StaticDiscovery([endpoint])) as watched:
        await print_rounds(
            *(watched, "list, Mural server", rounds),
            ("it drains", lambda: server.accept(False), some(0)),
            ("it takes requests again", lambda: server.accept(True), some(1)),
        )
        await print_rounds(
            *(watched, "list, Mural server", min(rounds, MOST_WITH_PAUSE)),
            ("it is killed", server.kill, some(0)),
            ("it is back", server.start, some(1)),
            pause_s=STEADY_S,
        )
    await server.kill()
    pod = Pod()
    await pod.start()
    endpoint = Endpoint("a", pod.host, pod.port, engine="vllm")
    async with watching(StaticDiscovery([endpoint])) as watched:
        await print_rounds(
            *(watched, "list, vLLM pod", rounds),
            ("it is not healthy", lambda: pod.become(False), some(0)),
            ("it is healthy again", lambda: pod.become(True), some(1)),
        )
        await print_rounds(
            *(watched, "list, vLLM pod", min(rounds, MOST_WITH_PAUSE)),
            ("it is killed", pod.kill, some(0)),
            ("it is back", pod.start, some(1)),
            pause_s=STEADY_S,
        )
    await pod.kill()


async def a_name(rounds: int) -> None:
    """Two addresses of this machine, one of which comes and goes in the records."""
    servers = [Server("127.0.0.1"), Server("127.0.0.2")]
    await servers[0].start()
    servers[1].port = servers[0].port
    await servers[1].start()
    transport, zone = await asyncio.get_running_loop().create_datagram_endpoint(
        Zone, local_addr=("127.0.0.1", 0)
    )
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers, resolver.port = ["127.0.0.1"], transport.get_extra_info("sockname")[1]
    await zone.become("127.0.0.1")
    place = DnsPlace("mural.test", servers[0].port, control_port=servers[0].port)
    async with watching(DnsDiscovery(place, resolver)) as watched:
        await print_rounds(
            *(watched, f"DNS, records of {TTL_S} s", rounds),
            ("an address is added", lambda: zone.become("127.0.0.1", "127.0.0.2"), some(2)),
            ("it is taken away", lambda: zone.become("127.0.0.1"), some(1)),
        )
    transport.close()
    for server in servers:
        await server.kill()


async def a_service(rounds: int, kubeconfig: str, namespace: str) -> None:
    """One EndpointSlice of a real API server, whose conditions change."""
    os.environ["KUBECONFIG"] = kubeconfig
    config = cluster_config()
    assert config is not None
    server = Server(_own_address())
    await server.start()
    async with KubeClient(config) as client:
        path = ENDPOINT_SLICES.named(namespace, SERVICE)

        async def become(ready: bool, terminating: bool = False) -> None:
            conditions = {"ready": ready, "terminating": terminating}
            endpoints = [{"addresses": [server.host], "conditions": conditions}]
            await client.patch(path, {"endpoints": endpoints})

        await client.create(
            ENDPOINT_SLICES.of(namespace),
            {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"name": SERVICE, "labels": {"kubernetes.io/service-name": SERVICE}},
                "addressType": "IPv4",
                "ports": [{"name": name, "port": server.port} for name in ("http", "control")],
                "endpoints": [{"addresses": [server.host], "conditions": {"ready": True}}],
            },
        )
        try:
            place = KubernetesPlace(SERVICE, namespace)
            async with watching(KubernetesDiscovery(place, lambda: client)) as watched:
                await print_rounds(
                    *(watched, "EndpointSlices", rounds),
                    ("its pod is not ready", lambda: become(False), some(0)),
                    ("its pod is ready", lambda: become(True), some(1)),
                    ("its pod begins to end", lambda: become(True, True), some(0)),
                    ("another takes its place", lambda: become(True), some(1)),
                )
        finally:
            await client.delete(path)
    await server.kill()


def _own_address() -> str:
    """Of this machine: an EndpointSlice takes no loopback address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Of a datagram socket nothing is sent by that.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kubeconfig", help="of a cluster in which EndpointSlices may be written")
    parser.add_argument("--namespace", default="default")
    arguments = parser.parse_args()
    print(ROW.format("found by", "what changes", "median s", "most s"))
    await a_list(arguments.rounds)
    await a_name(arguments.rounds)
    if arguments.kubeconfig is not None:
        await a_service(arguments.rounds, arguments.kubeconfig, arguments.namespace)


if __name__ == "__main__":
    uvloop.run(main())
