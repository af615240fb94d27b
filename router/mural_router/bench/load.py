"""Load on one router, or a process's part of one: closed, at a rate, or as many slow streams.

Says that its connections are open, reads when to begin (a moment of the monotonic clock; nothing:
at once), prints its `Report` as JSON, and keeps the connections until its input ends. A gap is the
time between two pieces of a stream as they arrive here, so this process's own lateness is in it:
measure it without a router as well.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import sys
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Final, cast

import msgspec
import uvloop

__all__ = ["CHUNKS", "KINDS", "READY", "Report", "main", "percentiles"]

_LENGTH = re.compile(rb"\r\ncontent-length: *([0-9]+)", re.IGNORECASE)
_STATUS_200: Final = b"HTTP/1.1 200"
_END: Final = b"0\r\n\r\n"

CHUNKS: Final = 50
"""Of an answer to the load of that name, beside its end."""

READY: Final = b"ready"
KINDS: Final = ("short", "apart", "ingress", "listed", "burst", "chunks", "rate", "streams")
"""Short requests as fast as they go: plain, with an answer whose head comes alone, with the fields
that an ingress adds, and with their prompt in a list; 32 chunks at once; chunks one by one, as fast
as they go; short requests at a rate; streams at a pace."""


class Report(msgspec.Struct, frozen=True):
    """What was seen of one load."""

    requests: int
    pieces: int
    """That answers came in: reads of a socket."""
    seconds: float
    """From the beginning to the last answer."""
    errors: int
    first_error: str
    latencies_us: list[int]
    gaps_us: list[int]
    """Of a process's streams while all of them are open."""

    @staticmethod
    def together(parts: Sequence[Report]) -> Report:
        """Of all processes; samples are put together as they are, and the slowest says how long."""
        return Report(
            requests=sum(part.requests for part in parts),
            pieces=sum(part.pieces for part in parts),
            seconds=max(part.seconds for part in parts),
            errors=sum(part.errors for part in parts),
            first_error=next((part.first_error for part in parts if part.errors), ""),
            latencies_us=[each for part in parts for each in part.latencies_us],
            gaps_us=[each for part in parts for each in part.gaps_us],
        )


def percentiles(values: Iterable[int]) -> dict[str, int]:
    """The 50th, 95th and 99th."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)]
        for share in (50, 95, 99)
    }


class _Client(asyncio.Protocol):
    """One connection; `ask` sends a request, `answered` is called when its answer is whole."""

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.asked = 0.0
        self._data = b""
        self._tail = b""
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
        self.run.failed(b"a connection was lost")

    def data_received(self, data: bytes) -> None:
        run = self.run
        run.pieces += 1
        if run.paced:
            now = time.monotonic()
            if not self._last_piece:
                run.streams()
            elif run.counting:
                run.gaps.append(now - self._last_piece)
            self._last_piece = now
        if not self._begun:
            self._begin(data)
        elif self._chunked:
            self._left = self._until_end(data)
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
            self._left = self._until_end(data)
        else:
            self._left = int(match[1]) - (len(data) - end - 4)

    def _until_end(self, data: bytes) -> int:
        """0 at the last chunk, which is all that is looked for, and may be torn."""
        if len(data) < len(_END):
            data = self._tail + data
        self._tail = data[-len(_END) :]
        return 0 if data.endswith(_END) else 1


class _Run:
    """What one kind of load counts, of every `parts`th request or connection from `part` on."""

    paced = False
    counting = False

    def __init__(self, arguments: argparse.Namespace, requests: list[bytes]) -> None:
        self.arguments = arguments
        self.requests = requests
        self.loop = asyncio.get_running_loop()
        self.done = 0
        self.pieces = 0
        self.errors = 0
        self.first_error = ""
        self.latencies: list[float] = []
        self.gaps: list[float] = []
        self.turn = 0
        self.all_answered = asyncio.Event()

    def failed(self, data: bytes) -> None:
        self.errors += 1
        self.first_error = self.first_error or data[:300].decode("latin-1")

    def next(self) -> bytes:
        self.turn += 1
        return self.requests[self.turn % len(self.requests)]

    def mine(self, number: int) -> range:
        """Of so many, those that are this process's."""
        return range(self.arguments.part, number, self.arguments.parts)

    async def connect(self, number: int) -> None:
        """Open this process's part of so many connections."""
        self.clients = [await self.client() for _ in self.mine(number)]

    async def client(self) -> _Client:
        _, client = await self.loop.create_connection(
            lambda: _Client(self), "127.0.0.1", self.arguments.port
        )
        return client

    @abstractmethod
    async def run(self, begin: float) -> None:
        """From a moment on, until the last answer."""

    @abstractmethod
    def answered(self, client: _Client) -> None:
        """An answer is whole."""

    def streams(self) -> None:
        """An answer's first piece has come."""

    def report(self, seconds: float) -> Report:
        return Report(
            requests=self.done,
            pieces=self.pieces,
            seconds=seconds,
            errors=self.errors,
            first_error=self.first_error,
            latencies_us=[round(each * 1e6) for each in self.latencies],
            gaps_us=[round(each * 1e6) for each in self.gaps],
        )


class _Closed(_Run):
    """Every connection asks again as soon as it is answered, until the time is over."""

    stopping = False

    def answered(self, client: _Client) -> None:
        self.done += 1
        if not self.stopping:
            client.ask(self.next(), 0.0)
            return
        self._asking -= 1
        if not self._asking:
            self.all_answered.set()

    async def run(self, begin: float) -> None:
        self._asking = len(self.clients)
        await _until(begin)
        for client in self.clients:
            client.ask(self.next(), 0.0)
        await _until(begin + self.arguments.seconds)
        self.stopping = True
        await self.all_answered.wait()


class _AtRate(_Run):
    """Requests at fixed times, each on a free connection; late ones count from their time."""

    def answered(self, client: _Client) -> None:
        self.done += 1
        if self.done == self._wanted:
            self.all_answered.set()
        self.latencies.append(time.monotonic() - client.asked)
        self.clients.append(client)

    async def run(self, begin: float) -> None:
        rate = self.arguments.rate
        mine = self.mine(int(rate * self.arguments.seconds))
        self._wanted = len(mine)
        for i in mine:
            due = begin + i / rate
            await _until(due)
            if not self.clients:
                self.clients.append(await self.client())
            # Timers are of whole milliseconds, so it may be early, too.
            self.clients.pop().ask(self.next(), min(due, time.monotonic()))
        await self.all_answered.wait()


class _Streams(_Run):
    """Many streams at one time; gaps are counted while all of them are open.

    They are begun evenly over some time, since what a burst of new requests costs is another
    figure, and none ends before the last has run for a while.
    """

    paced = True

    def streams(self) -> None:
        self._streaming += 1
        self.counting = self._streaming == len(self.clients) and not self.done

    def answered(self, client: _Client) -> None:
        self.counting = False
        self.done += 1
        if self.done == len(self.clients):
            self.all_answered.set()

    async def run(self, begin: float) -> None:
        self._streaming = 0
        streams = self.arguments.connections
        for i, client in zip(self.mine(streams), self.clients, strict=True):
            await _until(begin + self.arguments.opening_s * i / streams)
            client.ask(self.next(), 0.0)
        await self.all_answered.wait()
        if not self.gaps:
            raise SystemExit("Never were all of the streams open: have them take longer.")


async def _until(moment: float) -> None:
    await asyncio.sleep(max(0.0, moment - time.monotonic()))


def _request(kind: str, prompt: str, number: int, key: str) -> bytes:
    text = prompt.ljust(370, "x")
    members = {
        "model": f"acme/a{number:02}:v1",
        # So some clients send a single prompt.
        "prompt": [text] if kind == "listed" else text,
        "max_tokens": 32,
        "stream": kind in ("burst", "chunks", "streams"),
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


async def _run(arguments: argparse.Namespace) -> None:
    paced = f"paced:{arguments.pace_s}:{int(arguments.seconds / arguments.pace_s)}:"
    prompts = {"burst": "burst ", "apart": "apart ", "chunks": f"paced:0:{CHUNKS}:"}
    prompts["streams"] = paced
    prompt = prompts.get(arguments.kind, "short ")
    requests = [_request(arguments.kind, prompt, i, arguments.key) for i in range(64)]
    load = {"streams": _Streams, "rate": _AtRate}.get(arguments.kind, _Closed)
    run = load(arguments, requests)
    async with asyncio.timeout(30):
        await run.connect(arguments.connections)
    # A collection would be a pause in what is measured; there is nothing to collect.
    gc.freeze()
    gc.disable()
    print(READY.decode(), flush=True)
    begin = float(sys.stdin.readline() or time.monotonic())
    try:
        async with asyncio.timeout(begin - time.monotonic() + 3 * arguments.seconds + 30):
            await run.run(begin)
    except TimeoutError:
        seen = f"{arguments.kind}: {run.done} answers and then none; {run.errors} errors"
        raise SystemExit(f"{seen}, the first: {run.first_error}") from None
    report = run.report(time.monotonic() - begin)
    print(msgspec.json.encode(report).decode(), flush=True)
    sys.stdin.read()


def main() -> None:
    """Run one load and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--connections", type=int, default=32, help="of all parts together")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rate", type=float, default=500.0, help="of all parts together")
    parser.add_argument("--pace-s", type=float, default=0.05)
    parser.add_argument("--opening-s", type=float, default=2.0)
    parser.add_argument("--part", type=int, default=0, help="which one of them this process is")
    parser.add_argument("--parts", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.connections < arguments.parts:
        parser.error(f"{arguments.connections} connections are too few for {arguments.parts} parts")
    uvloop.run(_run(arguments))


if __name__ == "__main__":
    main()
