"""Connections to replicas that nobody waits for any more by the time that they are made."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable

import pytest
import uvloop

from mural_router.fleet.endpoint import Endpoint
from mural_router.http.settings import HttpSettings
from mural_router.http.upstream import ReplicaConnection, ReplicaPool
from mural_router.http.watch import Watch


class Pool(ReplicaPool):
    """Something happens in the very turn in which a connection is made."""

    def __init__(self, watch: Watch, just_then: Callable[[], object]) -> None:
        super().__init__(HttpSettings(), watch, ssl.create_default_context)
        self._just_then = just_then
        self.made: list[ReplicaConnection] = []

    def opened(self, connection: ReplicaConnection) -> None:
        super().opened(connection)
        self.made.append(connection)
        self._just_then()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_nothing_is_kept_of_a_connection_that_is_made_too_late(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """Its client left, say: uvloop closes such a one and does not tell its protocol."""

    async def play() -> None:
        loop = asyncio.get_running_loop()
        watch, ended = Watch(loop), asyncio.Event()

        async def accepts(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            assert await reader.read() == b""
            writer.close()
            ended.set()

        server = await asyncio.start_server(accepts, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        pool = Pool(watch, lambda: connecting.cancel())
        connecting = loop.create_task(pool.connect(Endpoint("a", "127.0.0.1", port)))
        with pytest.raises(asyncio.CancelledError):
            await connecting
        await asyncio.wait_for(ended.wait(), 20)
        for _ in range(3):
            await asyncio.sleep(0)
        assert (len(pool.made), pool._open, watch._watched) == (1, set(), set())
        server.close()
        watch.close()

    loop = new_loop()
    try:
        loop.run_until_complete(play())
    finally:
        loop.close()
