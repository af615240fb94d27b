"""An adapter that becomes hot is given a second home: by what replicas report, and by every
router that hears it the same one."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from mural_resolvers.names import parse_name
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.static import StaticDiscovery
from mural_router.fleet.view import FleetSettings, FleetView
from mural_router.placement import PlacementRequest, order
from mural_router.routing.ask import Ask
from mural_server.protocol import (
    AdapterStatus,
    Base,
    Delta,
    Limits,
    Load,
    PrefixStatistics,
    Snapshot,
    StateEvent,
)
from tests.mural_router.routing.made_up_fleet import Made, done

BOUND_S = 20.0
ADAPTER = "acme:v3"
EXACT = parse_name(ADAPTER).exact
NAMES = ("a", "b", "c", "d")
TOKENS_PER_S = 10.0
"""Of each sequence that runs."""
SESSIONS = [f"session-{at}" for at in range(24)]


class Server:
    """The state stream of a server that computes eight sequences at a time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = Snapshot(
            boot_id=name,
            seq=0,
            base=Base(model_names=("tiny",), spec_hash="0" * 64),
            limits=Limits(
                slots=4,
                max_cpu_loras=8,
                host_bytes=0,
                max_lora_rank=8,
                max_num_seqs=8,
                max_model_len=256,
            ),
            load=Load(),
            prefix=PrefixStatistics(),
            accepting=True,
            ready=True,
        )
        self._followers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + event(self.state))
        self._followers.append(writer)

    def close(self) -> None:
        for follower in self._followers:
            follower.close()

    def works(self, sequences: int, *, adapter: int | None = None) -> None:
        """Tell how many sequences there are, and how many of them, if it holds it, are of the
        adapter. Beyond eight they wait."""
        running = min(sequences, 8)
        load = Load(
            running=running, waiting=sequences - running, tokens_per_s=TOKENS_PER_S * running
        )
        held: tuple[AdapterStatus, ...] = ()
        if adapter is not None:
            tokens_per_s = TOKENS_PER_S * min(adapter, running)
            held = (
                AdapterStatus(
                    name=ADAPTER, digest="d" * 64, level="slot", rank=4, load=tokens_per_s
                ),
            )
        self.state = msgspec.structs.replace(
            self.state,
            seq=self.state.seq + 1,
            load=load,
            adapters={**self.state.adapters, **{each.name: each for each in held}},
        )
        delta = Delta(boot_id=self.name, seq=self.state.seq, load=load, changed=held)
        for follower in self._followers:
            follower.write(event(delta))


def event(what: StateEvent) -> bytes:
    return b"data: " + msgspec.json.encode(what) + b"\n\n"


class Heard:
    """A router: its own view of the servers, and what it decides by that."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self.view = FleetView(StaticDiscovery(endpoints), FleetSettings())
        self.made = Made(self.view)

    async def all_of(self, servers: list[Server]) -> None:
        """Until it has heard everything that the servers said."""

        def heard() -> bool:
            replicas = {each.name: each for each in self.view.fleet.replicas if each.ready}
            for server in servers:
                replica = replicas.get(server.name)
                if replica is None or replica.running != server.state.load.running:
                    return False
                held = replica.adapters.get(EXACT)
                told = server.state.adapters.get(ADAPTER)
                if (held and held.load) != (told and told.load):
                    return False
            return True

        async with asyncio.timeout(BOUND_S):
            while not heard():  # noqa: ASYNC110 - the test's own pace
                await asyncio.sleep(0.005)

    @property
    def k(self) -> int:
        return self.made.dispatch.explain(PlacementRequest(EXACT)).k

    async def sends(self) -> dict[str, str]:
        """Where it sends one request of each session, one after another."""
        sent = {}
        for session in SESSIONS:
            body = json.dumps({"model": ADAPTER, "prompt": "hello"}).encode()
            headers = {"x-session-id": session}
            ask = Ask("/v1/completions", ("Bearer acme",), body, headers=headers)
            routed = await self.made.routing.route(ask)
            sent[session] = routed.endpoint.name
            done(routed)
        return sent


@asynccontextmanager
async def routers_of(servers: list[Server]) -> AsyncIterator[tuple[Heard, Heard]]:
    """Two that know nothing of each other."""
    listening: list[asyncio.Server] = []
    endpoints: list[Endpoint] = []
    for server in servers:
        listening.append(await asyncio.start_server(server.serve, "127.0.0.1", 0))
        port = listening[-1].sockets[0].getsockname()[1]
        endpoints.append(Endpoint(server.name, "127.0.0.1", port, control_port=port))
    one, two = Heard(endpoints), Heard(list(reversed(endpoints)))
    following = [asyncio.create_task(each.view.run()) for each in (one, two)]
    yield one, two
    for task in following:
        task.cancel()
    await asyncio.gather(*following, return_exceptions=True)
    for listener in listening:
        listener.close()
    for server in servers:
        server.close()


async def test_an_adapter_whose_load_rises_gets_one_more_home_the_same_with_every_router():
    servers = [Server(name) for name in NAMES]
    async with routers_of(servers) as routers:
        for router in routers:
            await router.all_of(servers)
        by_name = {server.name: server for server in servers}
        first, second, *others = [
            by_name[replica.name] for replica in order(EXACT, routers[0].view.fleet)
        ]

        async def told() -> Counter[str]:
            """Where requests go by what the servers have said, alike with both routers."""
            for each in routers:
                await each.all_of(servers)
            assert routers[0].k == routers[1].k
            sent = [await each.sends() for each in routers]
            assert sent[0] == sent[1], "session by session"
            return Counter(sent[0].values())

        first.works(2, adapter=2)
        for each in (second, *others):
            each.works(3)
        assert (await told(), routers[0].k) == ({first.name: len(SESSIONS)}, 1)

        # More than it can do at a time: there is a second home, which has yet to load it.
        first.works(10, adapter=10)
        sent = await told()
        assert (sent, routers[0].k) == ({second.name: len(SESSIONS)}, 2)

        # It is held by both, and its work is shared, by sessions.
        for each in (first, second):
            each.works(5, adapter=5)
        for each in others:
            each.works(4)
        sent = await told()
        assert routers[0].k == 2
        assert set(sent) == {first.name, second.name}
        assert min(sent.values()) > len(SESSIONS) // 6

        first.works(1, adapter=1)
        second.works(1, adapter=1)
        assert (await told(), routers[0].k) == ({first.name: len(SESSIONS)}, 1)
