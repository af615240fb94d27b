"""A stand-in for replicas, as cheap as Python makes it: what a measured router is put in front of.

It speaks what a router asks of a vLLM pod (``/health``, ``/metrics``, ``/v1/models``) and answers
inference with fixed bytes. The prompt's first word says how: ``burst`` gives 32 events at once,
``paced:SECONDS:EVENTS`` a stream, ``apart`` one JSON after its head has gone (as servers on asyncio
send it), anything else one JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
from typing import Final, cast

import uvloop

from mural_router.http.chunks import LAST_CHUNK, chunk

__all__ = ["main"]

BASE: Final = "base-model"

_LENGTH = re.compile(rb"content-length: *([0-9]+)", re.IGNORECASE)
_PACED = re.compile(rb'"paced:([0-9.]+):([0-9]+)')


def _answer(body: bytes, content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


_USAGE: Final = b'"usage":{"prompt_tokens":100,"total_tokens":132,"completion_tokens":32}'
_JSON: Final = _answer(
    b'{"id":"cmpl-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,'
    b'"text":"' + b"word " * 16 + b'","finish_reason":"length"}],' + _USAGE + b"}"
)
_JSON_HEAD: Final = _JSON[: _JSON.index(b"\r\n\r\n") + 4]
_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_EVENT: Final = chunk(
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1789000000,'
    b'"model":"acme/support:v1","choices":[{"index":0,"text":" word","logprobs":null,'
    b'"finish_reason":null}]}\n\n'
)
_LAST_EVENTS: Final = chunk(b'data: {"id":"cmpl-1","choices":[],' + _USAGE + b"}\n\n") + chunk(
    b"data: [DONE]\n\n"
)
_BURST: Final = _HEAD + _EVENT * 32
_METRICS: Final = _answer(
    b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n",
    "text/plain; version=0.0.4",
)
_MODELS: Final = _answer(
    json.dumps({"object": "list", "data": [{"id": BASE, "object": "model", "root": BASE}]}).encode()
)
_OK: Final = _answer(b"{}")


class _Counts:
    connections = 0
    requests = 0
    open = 0


class _Replica(asyncio.Protocol):
    """Answers requests that come one at a time, whole or in pieces."""

    def __init__(self, counts: _Counts) -> None:
        self._counts = counts
        self._data = b""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._counts.connections += 1
        self._counts.open += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._counts.open -= 1
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        data = self._data + data if self._data else data
        end = data.find(b"\r\n\r\n")
        length = 0
        if end >= 0 and data.startswith(b"POST"):
            match = _LENGTH.search(data, 0, end)
            length = int(match[1]) if match else 0
        if end < 0 or len(data) < end + 4 + length:
            self._data = data
            return
        self._data = b""
        if data.startswith(b"POST"):
            self._counts.requests += 1
            self._infer(data[end:])
        else:
            self._transport.write(self._read(data))

    def _read(self, data: bytes) -> bytes:
        if data.startswith(b"GET /metrics"):
            return _METRICS
        if data.startswith(b"GET /v1/models"):
            return _MODELS
        if data.startswith(b"GET /counts"):
            counts = self._counts
            return _answer(
                json.dumps(
                    {"connections": counts.connections, "requests": counts.requests}
                ).encode()
            )
        return _OK

    def _infer(self, body: bytes) -> None:
        last = _LAST_EVENTS if b'"include_usage":true' in body else chunk(b"data: [DONE]\n\n")
        if b'"burst' in body:
            self._transport.write(_BURST + last + LAST_CHUNK)
            return
        loop = asyncio.get_running_loop()
        if b'"apart' in body:
            self._transport.write(_JSON_HEAD)
            # What is written in one turn of the loop leaves together.
            loop.call_soon(self._transport.write, _JSON[len(_JSON_HEAD) :])
            return
        paced = _PACED.search(body)
        if paced is None:
            self._transport.write(_JSON)
            return
        self._pace(loop, loop.time(), float(paced[1]), int(paced[2]), _HEAD, last)

    def _pace(
        self,
        loop: asyncio.AbstractEventLoop,
        at: float,
        pace_s: float,
        left: int,
        head: bytes,
        last: bytes,
    ) -> None:
        if not left:
            self._transport.write(last + LAST_CHUNK)
            return
        self._transport.write(head + _EVENT)
        at += pace_s
        self._timer = loop.call_at(at, self._pace, loop, at, pace_s, left - 1, b"", last)


async def _serve(replicas: int) -> None:
    loop = asyncio.get_running_loop()
    counts = _Counts()
    servers = [
        await loop.create_server(lambda: _Replica(counts), "127.0.0.1", 0, backlog=2048)
        for _ in range(replicas)
    ]
    # A collection would be a pause in everybody's figures; connections leave nothing to collect.
    gc.freeze()
    gc.disable()
    print(json.dumps([server.sockets[0].getsockname()[1] for server in servers]), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed; the ports are printed as a JSON list."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=4)
    uvloop.run(_serve(parser.parse_args().replicas))


if __name__ == "__main__":
    main()
