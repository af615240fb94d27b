"""What stands in the line of a request that was really carried, whichever way it took."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import pytest

from mural_resolvers.tenants import KeyRing, Principal, StoredKey
from mural_resolvers.tenants.keys import hash_secret
from mural_resolvers.versions import AliasTarget
from mural_router.fleet.endpoint import Endpoint
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.scan import plain_request
from mural_router.http.settings import HttpSettings
from mural_router.proxy import Proxy, start
from mural_router.routing.identity import Authenticator
from mural_router.routing.versions import KnownVersions, Versions, VersionSettings, VersionSource
from tests.mural_router.routing.made_up_fleet import DIGEST, Made, MadeUpFleet, resident

BOUND_S = 20.0
DELAY_S = 0.05
"""Of the replica, before the first byte of an answer and again before the end of a stream."""
ROUNDING_S = 2e-6
SECRET = "s" * 43
ANSWER = b'{"choices":[{"text":"x"}],"usage":{"prompt_tokens":7,"completion_tokens":5}}'
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
    len(ANSWER),
    ANSWER,
)
EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices":[{"text":"x"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5}}\n\n'
DONE = b"data: [DONE]\n\n"


class Stable(VersionSource):
    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        return KnownVersions({"stable": (AliasTarget("v3", 1),)}, {"v3": DIGEST})


class Ring:
    ring = KeyRing(
        [StoredKey("acme0000", hash_secret(SECRET), Principal(tenant="acme", key_id="acme0000"))]
    )


@dataclass
class Times:
    """When what happened, by the loop's clock."""

    sent: float = 0.0
    """By the client."""
    got_first: float = 0.0
    asked: float = 0.0
    """Of the replica."""
    began: float = 0.0
    ended: float = 0.0
    """The replica's answer."""


@dataclass
class Stand:
    """A client, a router and a replica that takes its time."""

    made: Made
    proxy: Proxy | None = None
    times: Times = field(default_factory=Times)
    went_on: asyncio.Event = field(default_factory=asyncio.Event)
    """The client has got the first of a stream's bytes."""
    ways: list[str] = field(default_factory=list)
    """What became of requests on the express way."""

    async def replica(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clock = asyncio.get_running_loop().time
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"content-length: (\d+)", head)
                assert length is not None
                body = await reader.readexactly(int(length[1]))
                self.times.asked = clock()
                await asyncio.sleep(DELAY_S)
                self.times.began = clock()
                if json.loads(body).get("stream"):
                    writer.write(EVENTS + chunk(TEXT))
                    await self.went_on.wait()
                    await asyncio.sleep(DELAY_S)
                    self.times.ended = clock()
                    writer.write(chunk(USAGE) + chunk(DONE) + LAST_CHUNK)
                else:
                    self.times.ended = self.times.began
                    writer.write(WHOLE)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The test has ended.
        finally:
            writer.close()

    async def ask(self, model: str, *, stream: bool = False) -> bytes:
        """One request on a connection of its own; gives all bytes of the answer."""
        assert self.proxy is not None
        clock, self.times = asyncio.get_running_loop().time, Times()
        self.went_on.clear()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.proxy.port)
        members = {"model": model, "prompt": "a secret prompt", "max_tokens": 16}
        body = json.dumps(members | ({"stream": True} if stream else {})).encode()
        self.times.sent = clock()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
            b"authorization: Bearer mural_acme0000_%b\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (SECRET.encode(), len(body), body)
        )
        answer = await reader.readuntil(b"\r\n\r\n")
        self.times.got_first = clock()
        self.went_on.set()
        answer += await reader.readuntil(LAST_CHUNK if stream else ANSWER)
        writer.close()
        return answer


@asynccontextmanager
async def standing(*, express: bool) -> AsyncIterator[Stand]:
    fleet = MadeUpFleet(resident("acme:v3"))
    versions = Versions(Stable(), VersionSettings(ttl_s=600.0))
    made = Made(fleet, auth=Authenticator("keys", tenants=Ring()), versions=versions)
    here = Stand(made)
    server = await asyncio.start_server(here.replica, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fleet.listening["a"] = Endpoint("a", "127.0.0.1", port)
    if not express:
        made.routing.express = None
    for name in ("finish", "unfold"):
        setattr(made.routing, name, noting(here.ways, name, getattr(made.routing, name)))
    async with asyncio.timeout(BOUND_S):
        here.proxy = await start(HttpSettings(port=0), made.routing, version="1")
        yield here
        await here.proxy.close()
    server.close()


def noting(ways: list[str], name: str, call: Callable[..., object]) -> Callable[..., object]:
    def noted(*arguments: object) -> object:
        ways.append(name)
        return call(*arguments)

    return noted


def seconds(line: dict[str, object], name: str) -> float:
    value = line.pop(name)
    assert isinstance(value, float)
    return value


def check_times(line: dict[str, object], times: Times, now: float) -> None:
    """The line's times lie between what the replica took and what the client waited."""
    first_byte_s, total_s = seconds(line, "first_byte_s"), seconds(line, "total_s")
    assert first_byte_s + ROUNDING_S >= times.began - times.asked >= DELAY_S / 2
    assert first_byte_s <= times.got_first - times.sent + ROUNDING_S
    assert total_s + ROUNDING_S >= times.ended - times.asked
    assert first_byte_s <= total_s <= now - times.sent + ROUNDING_S


@pytest.mark.parametrize(
    ("way", "model", "stream"),
    [
        (None, "acme:stable", False),
        (None, "acme:stable", True),
        ("finish", "acme:v3", False),
        ("unfold", "acme:v3", True),
    ],
    ids=["ordinary", "ordinary_stream", "express", "express_stream"],
)
async def test_a_line_says_who_asked_what_why_it_went_where_how_much_it_was_and_how_long_it_took(
    way: str | None, model: str, stream: bool
) -> None:
    if way is not None and plain_request is None:
        pytest.skip("nothing native is built")
    before = datetime.now(UTC)
    async with standing(express=way is not None) as here:
        if way is not None:
            await here.ask(model)  # After it there is a connection, and its versions are known.
        here.ways.clear()
        body = await here.ask(model, stream=stream)
        lines = await here.made.logged()
        line, now = dict(lines[-1]), asyncio.get_running_loop().time()
    assert here.ways == ([] if way is None else [way])
    assert len(lines) == (1 if way is None else 2)
    check_times(line, here.times, now)
    assert before.timestamp() - 1 <= datetime.fromisoformat(str(line.pop("at"))).timestamp()
    assert re.fullmatch(r"req-[0-9a-f]{32}", str(line.pop("request_id")))
    asked = {"asked": "acme:stable"} if way is None else {}
    streamed = {"stream": True} if stream else {}
    assert line == {
        "path": "/v1/completions",
        "status": 200,
        "tenant": "acme",
        "key_id": "acme0000",
        **asked,
        "adapter": "acme:v3",
        "digest": DIGEST,
        "replica": "a",
        "reason": "resident",
        "attempts": 1,
        **streamed,
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "bytes_sent": len(body),
    }
