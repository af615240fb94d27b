"""What clients ask for and replicas answer, as most tests of the relay want it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mural_router.http.chunks import LAST_CHUNK, chunk

if TYPE_CHECKING:
    from tests.mural_router.proxy.scripted_replica import Received

BODY = b'{"model":"acme:v1","prompt":"hi"}'
STREAM = b'{"model":"acme:v1","prompt":"hi","stream":true}'
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = CHUNKED % b"text/event-stream"
EVENTS_UTF8 = CHUNKED % b"text/event-stream; charset=utf-8"
ANSWER = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}'
USAGE_EVENT = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE_EVENT = b"data: [DONE]\n\n"


def event(text: str) -> bytes:
    return b'data: {"choices":[{"text":"%b"}]}\n\n' % text.encode()


async def answer(received: Received) -> None:
    await received.send(HEAD % len(ANSWER) + ANSWER)


async def stream(received: Received) -> None:
    await received.send(EVENTS_UTF8)
    await received.send(*(chunk(event(str(i))) for i in range(5)))
    await received.send(chunk(USAGE_EVENT), chunk(DONE_EVENT), LAST_CHUNK)
