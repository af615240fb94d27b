"""One trace through router and server, sent by the real exporter to a collector."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from mural_router.settings import Secrets
from tests.mural_router.router_in_front import BOUND_S, router_in_front
from tests.mural_server.api import scripted_server

engine = scripted_server.engine
start_server = scripted_server.start_server

CLIENT = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


class Collector:
    """Takes OTLP as JSON over HTTP."""

    def __init__(self) -> None:
        self.spans: dict[str, dict[str, Any]] = {}
        """By the service that sent them; of each one span."""
        self.paths: set[str] = set()
        self.url = ""
        self._came = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
                body = await reader.readexactly(int(fields["content-length"]))
                if fields.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert fields["content-type"] == "application/json"
                self.paths.add(lines[0])
                self._take(json.loads(body))
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: 2\r\n\r\n{}"
                )
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()

    def _take(self, sent: dict[str, Any]) -> None:
        for resource in sent["resourceSpans"]:
            named = {one["key"]: one["value"] for one in resource["resource"]["attributes"]}
            service = named["service.name"]["stringValue"]
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    assert service not in self.spans, "one request has one span in each"
                    self.spans[service] = span
        self._came.set()

    async def of(self, *services: str) -> list[dict[str, Any]]:
        """One span of each, once they are there."""
        async with asyncio.timeout(BOUND_S):
            while not self.spans.keys() >= set(services):
                await self._came.wait()
                self._came.clear()
        return [self.spans[service] for service in services]


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    # Of OpenTelemetry's own settings: how long spans are gathered before they are sent.
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    made = Collector()
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/traces"
    yield made
    server.close()


@pytest.fixture
async def client(collector: Collector, start_server: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Of a traced router in front of one traced server."""
    server = await start_server(otlp_traces_endpoint=collector.url)
    async with router_in_front(server, Secrets(), {}, otlp_traces_endpoint=collector.url) as client:
        yield client


@pytest.mark.parametrize("known", [True, False])
async def test_both_spans_arrive_and_the_server_s_is_under_the_router_s(
    client: httpx.AsyncClient, collector: Collector, known: bool
) -> None:
    trace_id, parent_id = CLIENT
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"} if known else {}
    asked = {"model": "tiny", "prompt": "Hi", "max_tokens": 4}
    answer = await client.post("/v1/completions", json=asked, headers=headers)
    assert answer.status_code == 200, answer.text
    router, server = await collector.of("mural-router", "mural-server")
    assert router["name"] == server["name"] == "POST /v1/completions"
    assert router["traceId"] == server["traceId"]
    assert server["parentSpanId"] == router["spanId"]
    assert (router["traceId"] == trace_id) == known
    assert router.get("parentSpanId", "") == (parent_id if known else "")
    assert "Hi" not in json.dumps([router, server])
    assert collector.paths == {"POST /v1/traces HTTP/1.1"}
