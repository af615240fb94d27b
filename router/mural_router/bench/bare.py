"""The proxy with no decision behind it: what carrying bytes costs, routing apart."""

from __future__ import annotations

import argparse
import asyncio

import uvloop

from mural_router.fleet.endpoint import Endpoint
from mural_router.http.settings import HttpSettings
from mural_router.proxy import start
from mural_router.routing import Ask, Outcome, Routed, Routing

__all__ = ["main"]


class _InTurn(Routed):
    request_headers = ()
    answer_headers = ()
    hide_usage = False
    stream = False

    def __init__(self, endpoint: Endpoint, body: bytes) -> None:
        self.endpoint = endpoint
        self.body = body

    def retry(self, why: str) -> bool:
        return False

    def may_retry(self, status: int, mark: str | None) -> bool:
        return False

    def answered(self, status: int, served: str | None = None) -> None:
        """Nobody counts."""

    def done(self, outcome: Outcome) -> None:
        """Nobody counts."""


class _EachInTurn(Routing):
    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints
        self._turn = 0

    async def route(self, ask: Ask) -> Routed:
        self._turn += 1
        return _InTurn(self._endpoints[self._turn % len(self._endpoints)], ask.body)

    async def forward(self, ask: Ask) -> Routed:
        return await self.route(ask)

    async def models(self, ask: Ask) -> bytes:
        return b"{}"

    async def model(self, ask: Ask, name: str) -> bytes:
        return b"{}"


async def _serve(port: int, to: list[int]) -> None:
    routing = _EachInTurn([Endpoint(f"r{each}", "127.0.0.1", each) for each in to])
    await start(HttpSettings(port=port), routing, version="0")
    await asyncio.Event().wait()


def main() -> None:
    """Route until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--to", type=int, nargs="+", required=True)
    arguments = parser.parse_args()
    uvloop.run(_serve(arguments.port, arguments.to))


if __name__ == "__main__":
    main()
