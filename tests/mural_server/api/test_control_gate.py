"""The control API's token, and another that takes its place while the server runs."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers

import mural_resolvers.file_watch
from mural_resolvers.errors import Forbidden, Unauthorized
from mural_server.api.control_gate import ControlGate
from mural_server.api.renewed_token import OVERLAP_S, RenewedToken
from mural_server.protocol import ControlClient, ControlError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def let_in(gate: ControlGate, *values: str, **headers: str) -> bool:
    sent = [(b"authorization", value.encode()) for value in values]
    sent += [(name.encode(), value.encode()) for name, value in headers.items()]
    try:
        gate.check(Headers(raw=sent))
    except (Forbidden, Unauthorized):
        return False
    return True


def test_the_token_is_asked_for_in_one_header():
    gate = ControlGate(RenewedToken("the-token"))
    assert let_in(gate, "Bearer the-token")
    assert let_in(gate, "bearer  the-token")
    assert not let_in(gate)
    assert not let_in(gate, "Bearer other")
    assert not let_in(gate, "Basic the-token")
    assert not let_in(gate, "Bearer the-token", "Bearer the-token")
    assert not let_in(gate, "Bearer the-token", origin="https://example.org")


def test_without_a_token_all_but_browsers_are_let_in():
    gate = ControlGate(None)
    assert let_in(gate)
    assert not let_in(gate, origin="https://example.org")


def test_a_renewed_token_holds_at_once_and_the_last_one_a_while_more():
    clock = Clock()
    token = RenewedToken("first", clock)
    gate = ControlGate(token)
    token.renew("second")
    assert let_in(gate, "Bearer first")
    assert let_in(gate, "Bearer second")
    token.renew("second")
    clock.now += OVERLAP_S
    assert not let_in(gate, "Bearer first")
    assert let_in(gate, "Bearer second")


def test_of_two_renewals_the_first_token_is_gone():
    token = RenewedToken("first", Clock())
    gate = ControlGate(token)
    token.renew("second")
    token.renew("third")
    assert not let_in(gate, "Bearer first")
    assert let_in(gate, "Bearer second")


async def believed(client: ControlClient) -> bool:
    try:
        await client.declare(())
    except ControlError as error:
        return error.status != 401
    return True


async def test_a_running_server_takes_a_token_whose_file_has_changed(
    start_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(mural_resolvers.file_watch, "POLL_S", 0.01)
    file = tmp_path / "token"
    file.write_text("first-token")
    server = await start_server(control_token="first-token", control_token_file=str(file))
    renewed = ControlClient("127.0.0.1", server.control_port, token="second-token")
    assert not await believed(renewed)
    file.write_text("second-token\n")
    async with asyncio.timeout(20):
        while not await believed(renewed):
            pass
    old = ControlClient("127.0.0.1", server.control_port, token="first-token")
    assert await believed(old)
