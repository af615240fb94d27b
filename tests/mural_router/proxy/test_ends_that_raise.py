"""A transport may raise at an answer's end: the request is over all the same, and holds nothing."""

from __future__ import annotations

import asyncio
import errno
from typing import Any

import pytest

from mural_resolvers.tenants import TenantLimits
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.client import ClientConnection
from mural_router.http.scan import plain_request
from tests.mural_router.proxy.express_stage import Here, Setting, request, whole
from tests.mural_router.proxy.scripted_answers import EVENTS
from tests.mural_router.proxy.scripted_replica import Received, Script, lose, says

BEGINNING = EVENTS + chunk(b'data: {"choices":[{}]}\n\n')


async def breaks(received: Received) -> None:
    await received.send(BEGINNING)
    await lose(received)


PLAYS: dict[str, list[Script]] = {
    "whole": [says(whole())],
    "stream": [says(BEGINNING, LAST_CHUNK)],
    "lost": [breaks],
    "refused": [says(whole(b"{}", "401 Unauthorized"))] * 2,
}


@pytest.mark.parametrize("express", [True, False])
@pytest.mark.parametrize("how", PLAYS)
async def test_a_request_whose_end_raises_holds_nothing(
    authorities: str, monkeypatch: pytest.MonkeyPatch, how: str, express: bool
) -> None:
    if express and plain_request is None:
        pytest.skip("nothing native is built")
    setting = Setting(limits=TenantLimits(concurrency=1))
    here = Here(setting, authorities, express=express)
    await here.begin()
    try:
        for replica, script in zip("ab", PLAYS[how] * 2, strict=False):
            here.plays(script, replica=replica)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        with monkeypatch.context() as patched:
            answered, raised = ClientConnection.answered, asyncio.Event()

            def raises(connection: ClientConnection) -> None:
                answered(connection)
                raised.set()
                raise OSError(errno.ENOTCONN, "just then")

            patched.setattr(ClientConnection, "answered", raises)
            client = await here.client()
            client.send(request(stream=how in ("stream", "lost")))
            await asyncio.wait_for(raised.wait(), 20)
            await here.until(lambda: here.dispatch.ledger.in_flight("a") == 0)
        assert here.dispatch.ledger.in_flight("b") == 0
        for each in here.replicas.values():
            each.next.clear()
        assert (await here.ask()).startswith(b"HTTP/1.1 200")
    finally:
        await here.close()


class Gone(asyncio.Transport):
    """To a client that has just gone, as asyncio's own loop shows it."""

    def __init__(self, real: asyncio.Transport) -> None:
        super().__init__()
        self.real = real

    def __getattribute__(self, name: str) -> Any:
        if name in ("real", "write_eof"):
            return super().__getattribute__(name)
        return getattr(super().__getattribute__("real"), name)

    def write_eof(self) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")


async def test_a_client_that_goes_at_the_end_is_no_fault(authorities: str) -> None:
    here = Here(Setting(), authorities, express=False)
    await here.begin()
    try:
        here.send_clients_away()
        await here.until(lambda: here.proxy.state().connections == 0)
        said: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
        client = await here.client()
        await here.until(lambda: here.server._connections)
        (connection,) = here.server._connections
        connection.transport = Gone(connection.transport)
        client.send(request("acme:v1", "connection: close"))
        await here.until(lambda: here.proxy.state().connections == 0)
        assert here.dispatch.ledger.in_flight("a") == 0
        assert not said
    finally:
        await here.close()
