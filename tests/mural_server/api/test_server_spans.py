"""The server's spans, under the router's."""

from __future__ import annotations

import httpx
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from mural_resolvers.tracing import open_tracing
from mural_server.api.tracing import TracingMiddleware

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def test_a_request_that_generates_has_a_span_and_others_have_none():
    exporter = InMemorySpanExporter()
    tracing = open_tracing("http://unused", "mural-server", exporter=lambda: exporter)
    routes = [
        Route(path, lambda request: PlainTextResponse("x", 429), methods=["GET", "POST"])
        for path in ("/v1/completions", "/health")
    ]
    app = TracingMiddleware(Starlette(routes=routes), tracing)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        await client.get("/health")
        await client.post("/v1/completions", headers={"traceparent": PARENT})
    tracing.close()
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 429
    assert [event.name for event in span.events] == ["first byte"]
