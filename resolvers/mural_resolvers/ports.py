"""Ports to listen on: whether one can be had, and the one sentence where it cannot."""

from __future__ import annotations

import os
import socket

from mural_resolvers.errors import InvalidInput

__all__ = ["check_port", "listen", "unavailable"]

BACKLOG = 2048


def listen(host: str, port: int, change: str) -> socket.socket:
    """A listening socket; raise ``InvalidInput``, naming the setting to ``change``."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise unavailable(host, port, change, error) from None


def check_port(host: str, port: int, change: str) -> None:
    """Listen for a moment on every address of ``host``, as an event loop would; raise as `listen`.

    For ports that are served only once all else has started: whoever has one already is told of
    before that.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise unavailable(host, port, change, error) from None


def unavailable(host: str, port: int, change: str, error: OSError) -> InvalidInput:
    """The refusal of an address that ``error`` speaks of."""
    looked_up = isinstance(error, socket.gaierror)
    # `create_server` and event loops put the address into their texts, too; gRPC has no number.
    reason = os.strerror(error.errno) if error.errno and not looked_up else error.strerror
    shown = f"[{host}]" if ":" in host else host
    return InvalidInput(
        f"{shown}:{port} cannot be listened on ({reason or error}): change {change} or its host."
    )
