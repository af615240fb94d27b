"""The client against servers that misbehave, and in an environment without torch."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from mural_server.protocol import ControlClient, ControlError

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[ControlClient]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        yield ControlClient(
            "127.0.0.1",
            port,
            timeout_s=5,
            load_timeout_s=5,
            idle_timeout_s=0.2,
            max_event_bytes=200_000,
        )
    finally:
        server.close()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 two hundred\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nnope",
        b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnope",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n",
        b"HTTP/1.1 500 Oops\r\ncontent-length: 3\r\n\r\n???",
    ],
)
async def test_every_bad_answer_is_a_control_error(data):
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    async with answering(answer) as client:
        with pytest.raises(ControlError):
            await client.drain()


async def test_a_line_without_an_end_is_a_control_error():
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\na: " + b"x" * 200_000)
        await writer.drain()

    async with answering(answer) as client:
        with pytest.raises(ControlError):
            await client.drain()


async def test_nobody_there_is_a_control_error():
    with pytest.raises(ControlError) as caught:
        await ControlClient("127.0.0.1", 1).healthy()
    assert caught.value.status == 0
    assert caught.value.refused


async def test_a_silent_stream_ends():
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: {}")
        await writer.drain()
        await asyncio.sleep(10)

    async with answering(answer) as client:
        with pytest.raises(ControlError):
            await anext(client.events())


@pytest.mark.parametrize(
    "event",
    [b"x" * 300_000, b'{"event":"snapshot","more":' + b"[" * 50_000, b'{"event":"\xff"}', b"5"],
)
async def test_an_event_that_is_none_is_a_control_error(event):
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\ndata: " + event + b"\n\n")
        await writer.drain()

    async with answering(answer) as client:
        with pytest.raises(ControlError):
            await anext(client.events())


async def test_an_event_in_pieces_is_put_together():
    async def answer(writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        event = b'data: {"event":"heartbeat","boot_id":"b","seq":3}\n\n'
        writer.write(head)
        for byte in event:
            writer.write(b"1\r\n" + bytes([byte]) + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")

    async with answering(answer) as client:
        events = client.events()
        assert (await anext(events)).seq == 3
        with pytest.raises(ControlError, match="ended"):
            await anext(events)


def test_the_protocol_needs_neither_torch_nor_a_web_framework():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'fastapi', 'starlette', 'pydantic', 'uvicorn'):\n"
        "    sys.modules[name] = None\n"
        "import mural_server.protocol\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


async def test_a_refusal_that_quotes_the_token_is_told_without_it():
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert "Bearer the-token" in head
        body = json.dumps({"error": {"message": f"nobody known sent {head}"}}).encode()
        writer.write(b"HTTP/1.1 401 No\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ControlError, match="Bearer …") as caught:
            await ControlClient("127.0.0.1", port, token="the-token").drain()

    assert caught.value.status == 401
    assert "the-token" not in caught.value.message
