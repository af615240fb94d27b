"""A port that answers no attempt to connect: neither with a connection nor with a refusal."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest


@contextmanager
def full_backlog(port: int = 0) -> Iterator[int]:
    """Listen there, accept nobody, and fill the backlog; 0: any free port. Gives the port."""
    with ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        for _ in range(64):
            waiting = held.enter_context(socket.socket())
            waiting.settimeout(0.05)
            try:
                waiting.connect(listener.getsockname())
            except TimeoutError:
                break
        else:
            pytest.skip("this system's backlogs are never full")
        yield listener.getsockname()[1]
