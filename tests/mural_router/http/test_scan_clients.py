"""What the usual clients send is plain to the native reader."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import aiohttp
import httpx
import openai
import pytest

from mural_router.http.head import END, parse_request_head
from tests.mural_router.http.scan_alike import is_accepted_alike, native_reader
from tests.mural_router.http.scan_messages import BODY, answer

pytestmark = native_reader

COMPLETION = json.dumps(
    {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "acme:v1",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "Hi"},
            }
        ],
    }
).encode()
MESSAGES = [{"role": "user", "content": 'Grüße 😀 "model": \\ \n'}]
PAYLOAD = {"model": "acme:v1", "messages": MESSAGES, "max_tokens": 16, "temperature": 0.5}


@contextmanager
def recorder() -> Iterator[tuple[str, list[bytes]]]:
    """An address that answers one request, and that request as it came."""
    seen: list[bytes] = []

    def serve() -> None:
        with listener, listener.accept()[0] as connection:
            connection.settimeout(20)
            data = b""
            while not _is_whole(data):
                piece = connection.recv(65_536)
                assert piece
                data += piece
            seen.append(data)
            connection.sendall(
                answer(COMPLETION, b"content-type: application/json\r\nconnection: keep-alive\r\n")
            )

    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)
    port = listener.getsockname()[1]
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{port}/v1", seen
    thread.join(20)
    assert seen


def _is_whole(data: bytes) -> bool:
    head, end, body = data.partition(END)
    return bool(end) and len(body) >= parse_request_head(head + end, 100).length


def with_openai(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="mural_0_a", max_retries=0) as client:
        client.chat.completions.create(
            model="acme:v1",
            messages=[{"role": "user", "content": "Grüße 😀"}],
            max_tokens=16,
            stop=["\n"],
            extra_body={"top_k": 3},
        )


def with_openai_async(url: str) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="mural_0_a", max_retries=0) as client:
            await client.completions.create(model="acme:v1", prompt="Hi", n=1, stream=False)

    asyncio.run(ask())


def with_httpx(url: str) -> None:
    httpx.post(f"{url}/chat/completions", json=PAYLOAD, headers={"authorization": "Bearer a"})


def with_aiohttp(url: str) -> None:
    async def ask() -> None:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/chat/completions", json=PAYLOAD) as got,
        ):
            await got.read()

    asyncio.run(ask())


@pytest.mark.parametrize("ask", [with_openai, with_openai_async, with_httpx, with_aiohttp])
def test_what_the_usual_clients_send_is_plain(ask: Callable[[str], None]) -> None:
    with recorder() as (url, seen):
        ask(url)
    assert is_accepted_alike(seen[0]), seen


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_what_curl_sends_is_plain_once_it_says_that_it_is_json() -> None:
    async def ask(url: str) -> None:
        headers = ("-H", "authorization: Bearer a", "-H", "content-type: application/json")
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-s", "--noproxy", "*", *headers, "-d", json.dumps(PAYLOAD)),
            f"{url}/chat/completions",
            stdout=asyncio.subprocess.DEVNULL,
        )
        assert await asyncio.wait_for(curl.wait(), 20) == 0

    with recorder() as (url, seen):
        asyncio.run(ask(url))
    assert is_accepted_alike(seen[0]), seen


@pytest.mark.parametrize(
    "fields",
    [
        # Chromium's fetch, from a page of another origin.
        b"Host: router:8080\r\nConnection: keep-alive\r\nContent-Length: 36\r\n"
        b'sec-ch-ua-platform: "Linux"\r\nAuthorization: Bearer a\r\n'
        b"User-Agent: Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36\r\n"
        b'sec-ch-ua: "Chromium";v="131", "Not_A Brand";v="24"\r\n'
        b"Content-Type: application/json\r\nsec-ch-ua-mobile: ?0\r\nAccept: */*\r\n"
        b"Origin: http://localhost:3000\r\nSec-Fetch-Site: same-site\r\nSec-Fetch-Mode: cors\r\n"
        b"Sec-Fetch-Dest: empty\r\nReferer: http://localhost:3000/\r\n"
        b"Accept-Encoding: gzip, deflate, br, zstd\r\nAccept-Language: en-US,en;q=0.9\r\n",
        # Node's fetch.
        b"host: router:8080\r\nconnection: keep-alive\r\ncontent-type: application/json\r\n"
        b"authorization: Bearer a\r\naccept: */*\r\naccept-language: *\r\nsec-fetch-mode: cors\r\n"
        b"user-agent: node\r\naccept-encoding: gzip, deflate\r\ncontent-length: 36\r\n",
        # Go's net/http.
        b"Host: router:8080\r\nUser-Agent: Go-http-client/1.1\r\nContent-Length: 36\r\n"
        b"Authorization: Bearer a\r\nContent-Type: application/json\r\nAccept-Encoding: gzip\r\n",
    ],
)
def test_what_other_clients_send_is_plain(fields: bytes) -> None:
    assert is_accepted_alike(b"POST /v1/chat/completions HTTP/1.1\r\n%b\r\n%b" % (fields, BODY))
