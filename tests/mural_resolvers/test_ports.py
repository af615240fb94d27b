"""Ports to listen on: who cannot have one is told which address, why, and what to change."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.ports import check_port, listen, unavailable


@pytest.mark.parametrize("have", [listen, check_port])
@pytest.mark.parametrize(
    ("host", "reason"),
    [("127.0.0.1", "Address already in use"), ("192.0.2.1", "Cannot assign requested address")],
)
def test_a_port_that_cannot_be_had_is_told_in_one_sentence(
    have: Callable[[str, int, str], object], host: str, reason: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidInput) as caught:
            have(host, port, "--port")
    assert str(caught.value) == (
        f"{host}:{port} cannot be listened on ({reason}): change --port or its host."
    )


def test_a_port_that_was_only_checked_is_let_go_of_again() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    check_port("127.0.0.1", port, "--port")
    with listen("127.0.0.1", port, "--port") as bound:
        assert bound.getsockname() == ("127.0.0.1", port)


@pytest.mark.parametrize(
    ("host", "error", "told"),
    [
        ("::1", OSError(98, "in bind on ('::1', 1): address in use"), r"\[::1\]:1 .*\(Address alr"),
        ("nowhere", socket.gaierror(-2, "Name or service not known"), r"nowhere:1 .*\(Name or"),
        ("127.0.0.1", OSError("No address added"), r"127.0.0.1:1 .*\(No address added\)"),
    ],
)
def test_the_reason_is_the_systems_own(host: str, error: OSError, told: str) -> None:
    with pytest.raises(InvalidInput, match=told):
        raise unavailable(host, 1, "--port", error)
