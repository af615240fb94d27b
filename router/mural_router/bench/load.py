"""Load on one router, from one process on one core: closed, at a rate, or as many slow streams.

Prints one JSON object. Times are microseconds; a gap is the time between two pieces of a stream as
they arrive here, so this process's own lateness is in it: measure it without a router as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Final, cast

import uvloop

__all__ = ["KINDS", "main", "percentiles"]

_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_STATUS_200: Final = b"HTTP/1.1 200"
_END: Final = b"0\r\n\r\n"

KINDS: Final = ("short", "apart", "ingress", "listed", "burst", "rate", "streams")
"""Short requests as fast as they go: plain, with an answer whose head comes alone, with the fields
that an ingress adds, and with their prompt in a list; 32 chunks at once; short requests at a rate;
streams at a pace."""


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """The 50th, 95th and 99th, as whole microseconds; values are seconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"p{share}": round(ordered[min(len(ordered) - 1, len(ordered) * share // 100)] * 1e6)
        for share in (50, 95, 99)
    }


class _Client(asyncio.Protocol):
    """One connection; `ask` sends a request, `answered` is called when its answer is whole."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.asked = 0.0
        self._data = b""
        self._begun = False
        self._chunked = False
        self._left = 0
        self._last_piece = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes, since: float) -> None:
        self.asked = since
        self._last_piece = 0.0
        self._transport.write(request)

    def connection_lost(self, exc: Exception | None) -> None:
        self.run.lost += 1

    def data_received(self, data: bytes) -> None:
        run = self.run
        if run.gaps is not None:
            now = time.perf_counter()
            if not self._last_piece:
                run.streams()
            elif run.counting:
                run.gaps.append(now - self._last_piece)
            self._last_piece = now
        if not self._begun:
            self._begin(data)
        elif self._chunked:
            # The end is all that is looked for, and is sent in one piece.
            self._left = 0 if data.endswith(_END) else 1
        else:
            self._left -= len(data)
        if self._begun and not self._left:
            self._begun = False
            run.answered(self)

    def _begin(self, data: bytes) -> None:
        data = self._data + data
        end = data.find(b"\r\n\r\n")
        if end < 0:
            self._data = data
            return
        self._data = b""
        self._begun = True
        if not data.startswith(_STATUS_200):
            self.run.failed(data)
        match = _LENGTH.search(data, 0, end + 2)
        self._chunked = match is None
        if match is None:
            self._left = 0 if data.endswith(_END) else 1
        else:
            self._left = int(match[1]) - (len(data) - end - 4)


class _Run:
    """What one kind of load counts."""

    gaps: list[float] | None = None
    counting = False

    def __init__(self, port: int, requests: list[bytes]) -> None:
        self.port = port
        self.requests = requests
        self.loop = asyncio.get_running_loop()
        self.done = 0
        self.lost = 0
        self.errors = 0
        self.first_error = ""
        self.latencies: list[float] = []
        self.turn = 0

    def failed(self, data: bytes) -> None:
        self.errors += 1
        self.first_error = self.first_error or data[:300].decode("latin-1")

    def next(self) -> bytes:
        self.turn += 1
        return self.requests[self.turn % len(self.requests)]

    async def connect(self, number: int) -> list[_Client]:
        clients = []
        for _ in range(number):
            _, client = await self.loop.create_connection(
                lambda: _Client(self), "127.0.0.1", self.port
            )
            clients.append(client)
        return clients

    @abstractmethod
    def answered(self, client: _Client) -> None:
        """An answer is whole."""

    def streams(self) -> None:
        """An answer's first piece has come."""

    def report(self) -> dict[str, object]:
        return {
            "requests": self.done,
            "errors": self.errors,
            "first_error": self.first_error,
            "lost": self.lost,
            "latency": percentiles(self.latencies),
            **({"gap": percentiles(self.gaps)} if self.gaps is not None else {}),
        }


class _Closed(_Run):
    """Every connection asks again as soon as it is answered."""

    stopping = False

    def __init__(self, port: int, requests: list[bytes]) -> None:
        super().__init__(port, requests)
        self._first = asyncio.Event()

    def answered(self, client: _Client) -> None:
        self.done += 1
        if self.done == 1:
            self._first.set()
        if not self.stopping:
            client.ask(self.next(), 0.0)

    async def run(self, connections: int, seconds: float) -> None:
        for client in await self.connect(connections):
            client.ask(self.next(), 0.0)
        await asyncio.sleep(seconds)
        # A figure of nothing is none, however busy the machine is.
        async with asyncio.timeout(10):
            await self._first.wait()
        self.stopping = True


class _AtRate(_Run):
    """Requests at fixed times, each on a free connection; late ones count from their time."""

    def __init__(self, port: int, requests: list[bytes]) -> None:
        super().__init__(port, requests)
        self._wanted = 0
        self._all = asyncio.Event()

    def answered(self, client: _Client) -> None:
        self.done += 1
        if self.done == self._wanted:
            self._all.set()
        self.latencies.append(time.perf_counter() - client.asked)
        self._free.append(client)

    async def run(self, rate: float, seconds: float) -> None:
        self._free = await self.connect(64)
        self._wanted = int(rate * seconds)
        begun = time.perf_counter() + 0.1
        for i in range(self._wanted):
            due = begun + i / rate
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if not self._free:
                self._free += await self.connect(1)
            self._free.pop().ask(self.next(), due)
        async with asyncio.timeout(10):
            await self._all.wait()


class _Streams(_Run):
    """Many streams at one time; gaps are counted while all of them are open.

    They are begun evenly over some time, since what a burst of new requests costs is another
    figure, and none ends before the last has run for a while.
    """

    def __init__(self, port: int, requests: list[bytes]) -> None:
        super().__init__(port, requests)
        self.gaps = []
        self._wanted = 0
        self._streaming = 0
        self._all = asyncio.Event()

    def streams(self) -> None:
        self._streaming += 1
        self.counting = self._streaming == self._wanted and not self.done

    def answered(self, client: _Client) -> None:
        self.counting = False
        self.done += 1
        if self.done == self._wanted:
            self._all.set()

    async def run(self, streams: int, opening_s: float, seconds: float) -> None:
        self._wanted = streams
        clients = await self.connect(streams)
        begun = time.perf_counter()
        for i, client in enumerate(clients):
            due = begun + opening_s * i / streams
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            client.ask(self.next(), 0.0)
        async with asyncio.timeout(seconds * 3 + 10):
            await self._all.wait()
        if not self.gaps:
            raise SystemExit("Never were all of the streams open: have them take longer.")


def _request(kind: str, prompt: str, number: int, key: str) -> bytes:
    text = prompt.ljust(370, "x")
    members = {
        "model": f"acme/a{number:02}:v1",
        # A list of one is a form that is counted before it is sent on.
        "prompt": [text] if kind == "listed" else text,
        "max_tokens": 32,
        "stream": kind in ("burst", "streams"),
    }
    body = json.dumps(members, separators=(",", ":")).encode()
    added = ""
    if kind == "ingress":
        added = (
            f"x-request-id: 8f14e45f-ceea-467f-a0e6-{number:012}\r\n"
            f"traceparent: 00-0af7651916cd43dd8448eb21{number:08}-b7ad6b7169203331-01\r\n"
            "x-forwarded-for: 10.0.0.1\r\nx-forwarded-proto: https\r\n"
        )
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nuser-agent: load\r\naccept: */*\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\n{added}"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _run(arguments: argparse.Namespace) -> dict[str, object]:
    paced = f"paced:{arguments.pace_s}:{int(arguments.seconds / arguments.pace_s)}:"
    prompts = {"burst": "burst ", "apart": "apart ", "streams": paced}
    prompt = prompts.get(arguments.kind, "short ")
    requests = [_request(arguments.kind, prompt, i, arguments.key) for i in range(64)]
    if arguments.kind == "streams":
        streams = _Streams(arguments.port, requests)
        await streams.run(arguments.connections, arguments.opening_s, arguments.seconds)
        return streams.report()
    if arguments.kind == "rate":
        rate = _AtRate(arguments.port, requests)
        await rate.run(arguments.rate, arguments.seconds)
        return rate.report()
    closed = _Closed(arguments.port, requests)
    await closed.run(arguments.connections, arguments.seconds)
    return closed.report()


def main() -> None:
    """Run one load and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--pace-s", type=float, default=0.05)
    parser.add_argument("--opening-s", type=float, default=2.0)
    print(json.dumps(uvloop.run(_run(parser.parse_args()))))


if __name__ == "__main__":
    main()
