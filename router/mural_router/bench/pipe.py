"""The floor: bytes from one port to another on uvloop, with no HTTP between."""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import uvloop

__all__ = ["main"]


class _End(asyncio.Protocol):
    """One end of a pipe; what comes before the other one is there waits."""

    def __init__(self, port: int | None, other: _End | None = None) -> None:
        self._port = port
        self._other = other
        self._early: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        if self._port is not None:
            self._opening = asyncio.get_running_loop().create_task(self._open(self._port))

    async def _open(self, port: int) -> None:
        loop = asyncio.get_running_loop()
        _, end = await loop.create_connection(lambda: _End(None, self), "127.0.0.1", port)
        self._other = end
        for data in self._early:
            end.transport.write(data)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early.append(data)
        else:
            self._other.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._other is not None:
            self._other.transport.close()


async def _serve(port: int, to: list[int]) -> None:
    turn = 0

    def end() -> _End:
        nonlocal turn
        turn += 1
        return _End(to[turn % len(to)])

    loop = asyncio.get_running_loop()
    await loop.create_server(end, "127.0.0.1", port, backlog=2048)
    await asyncio.Event().wait()


def main() -> None:
    """Pipe until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    uvloop.run(_serve(arguments.port, arguments.to))


if __name__ == "__main__":
    main()
