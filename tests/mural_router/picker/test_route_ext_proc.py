"""`mural route --ext-proc` as a process: it picks for a gateway what it would choose itself."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

BOUND_S = 60.0
PAGES = {
    b"/health": b"",
    b"/metrics": b"vllm:num_requests_running 0.0\nvllm:num_requests_waiting 0.0\n",
    b"/v1/models": b'{"object":"list","data":[{"id":"base","parent":null}]}',
}


async def _pod(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As much of a vLLM pod as a router looks at."""
    path = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
    page = PAGES[path]
    writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(page))
    writer.write(page)
    await writer.drain()
    writer.close()


@dataclass
class Route:
    process: asyncio.subprocess.Process
    picker: str
    """``host:port``."""
    pod: str


@pytest.fixture
async def route() -> AsyncIterator[Route]:
    pod = await asyncio.start_server(_pod, "127.0.0.1", 0)
    port = pod.sockets[0].getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "mural_router.commands", "--port", "0", "--no-admin"),
        *("--replica", f"http://127.0.0.1:{port},engine=vllm", "--ext-proc", "0"),
        *("--no-access-log",),
        stderr=asyncio.subprocess.PIPE,
        env=os.environ,
    )
    assert process.stderr is not None
    picker = None
    async with asyncio.timeout(BOUND_S):
        while picker is None:
            line = (await process.stderr.readline()).decode()
            assert line, "the router ended"
            found = re.search(r"picking endpoints for gateways on (\S+)", line)
            picker = found and found[1]
    yield Route(process, picker, f"127.0.0.1:{port}")
    if process.returncode is None:
        process.kill()
        await process.wait()
    pod.close()


async def test_a_gateway_is_told_the_replica_and_the_router_ends_when_told(route: Route) -> None:
    async with grpc.aio.insecure_channel(route.picker) as channel:
        ready = await HealthStub(channel).Check(
            HealthCheckRequest(service="readiness"), timeout=BOUND_S
        )
        assert ready.status == HealthCheckResponse.SERVING
        call = ExternalProcessorStub(channel).Process(timeout=BOUND_S)
        fields = {":method": "POST", ":path": "/v1/completions"}
        duplex = ProcessingMode.FULL_DUPLEX_STREAMED
        await call.write(
            ProcessingRequest(
                request_headers=HttpHeaders(
                    headers=HeaderMap(
                        headers=[
                            HeaderValue(key=k, raw_value=v.encode()) for k, v in fields.items()
                        ]
                    )
                ),
                protocol_config=ProtocolConfiguration(
                    request_body_mode=duplex, response_body_mode=duplex
                ),
            )
        )
        body = b'{"model":"base","prompt":"hello"}'
        await call.write(ProcessingRequest(request_body=HttpBody(body=body, end_of_stream=True)))
        picked = await call.read()
        lb = picked.dynamic_metadata["envoy.lb"]
        assert lb["x-gateway-destination-endpoint"] == route.pod
        call.cancel()
    route.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(BOUND_S):
        assert await route.process.wait() == 0
