"""An API server by hand, over real sockets: what a real one does rarely is done here at will."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest

if TYPE_CHECKING:
    from lightkube.config.kubeconfig import SingleConfig

__all__ = ["FakeAPI", "kube_api"]


@dataclass(frozen=True)
class Asked:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """What a request gets, whatever it asks. ``body``: bytes, or sent as JSON."""

    status: int
    body: Any
    headers: dict[str, str]


class FakeAPI:
    """One collection of ``objects`` by name at ``version``.

    A watch is told what has come since the version that it names, then what comes, until it is
    cut. ``answers`` are given first, and ``refusal`` for as long as it is set.
    """

    def __init__(self) -> None:
        self.version = 10
        self.objects: dict[str, dict[str, Any]] = {}
        self.oldest = 0
        """Watches that begin before it are told 410."""
        self.asked: list[Asked] = []
        self.answers: deque[Answer] = deque()
        self.refusal: tuple[int, str] | None = None
        self.hanging = False
        self.port = 0
        self.watching = asyncio.Event()
        self.refused = asyncio.Event()
        self.hung = asyncio.Event()
        self._history: list[tuple[int, bytes]] = []
        self._watchers: list[asyncio.StreamWriter] = []
        self._open: set[asyncio.StreamWriter] = set()
        self._listening: asyncio.Server | None = None

    # -- for tests --------------------------------------------------------------------------------

    def config(self, **user: Any) -> SingleConfig:
        """How it is reached, in the namespace ``prod``."""
        # Not there in every environment that loads this file, such as one made for vLLM.
        from lightkube.config.kubeconfig import SingleConfig
        from lightkube.config.models import Cluster, Context, User

        return SingleConfig(
            context_name="test",
            context=Context(cluster="test", namespace="prod"),
            cluster=Cluster(server=f"http://127.0.0.1:{self.port}"),
            user=User(**user) if user else None,
        )

    async def up(self) -> None:
        """Listen, where it did before."""
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._listening.sockets[0].getsockname()[1]

    def down(self) -> None:
        """Break every connection and refuse new ones."""
        assert self._listening is not None
        self._listening.close()
        for writer in self._open:
            writer.transport.abort()
        self._watchers.clear()

    def answer(self, status: int, body: Any = b"", *, times: int = 1, **headers: str) -> None:
        """What the next request gets, whatever it asks. ``retry_after="1"`` is a header."""
        fields = {name.replace("_", "-"): text for name, text in headers.items()}
        self.answers.extend([Answer(status, body, fields)] * times)

    def put(self, each: dict[str, Any]) -> None:
        name = each["metadata"]["name"]
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = self.send(kind, each)

    def remove(self, name: str) -> None:
        self.send("DELETED", self.objects.pop(name))

    def send(self, kind: str, each: dict[str, Any]) -> dict[str, Any]:
        """An event of the next version; what was sent."""
        self.version += 1
        if "metadata" in each:
            each = each | {"metadata": each["metadata"] | {"resourceVersion": str(self.version)}}
        line = json.dumps({"type": kind, "object": each}, ensure_ascii=False).encode() + b"\n"
        if kind in ("ADDED", "MODIFIED", "DELETED"):
            self._history.append((self.version, line))
        self.send_raw(line)
        return each

    def send_raw(self, data: bytes) -> None:
        for writer in self._watchers:
            writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def end(self, *, cut: bool) -> None:
        """End every watch, as after its time or as by a broken network."""
        for writer in self._watchers:
            if cut:
                writer.transport.abort()
            else:
                writer.write(b"0\r\n\r\n")
        self._watchers.clear()

    def forget(self) -> None:
        """Every version before the present one."""
        self.oldest = self.version
        self._history.clear()

    async def watched(self) -> None:
        """Wait for the next watch."""
        await asyncio.wait_for(self.watching.wait(), 20)
        self.watching.clear()

    def since(self) -> list[str | None]:
        """What each watch so far has begun with."""
        return [each.query.get("resourceVersion") for each in self.asked if "watch" in each.query]

    def lists(self) -> int:
        """How many lists were begun."""
        return sum("watch" not in e.query and "continue" not in e.query for e in self.asked)

    # -- the server -------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            while True:
                await self._answer(await _read(reader), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # The client has gone.
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        self.asked.append(asked)
        if self.hanging:
            self.hung.set()
            await asyncio.Event().wait()
        elif self.answers:
            given = self.answers.popleft()
            _write(writer, given.status, given.body, given.headers)
        elif self.refusal is not None:
            code, message = self.refusal
            self.refused.set()
            _write(writer, code, {"kind": "Status", "code": code, "message": message})
        elif "watch" in asked.query:
            self._watch(int(asked.query["resourceVersion"]), writer)
        else:
            _write(writer, 200, self._page(asked.query))

    def _page(self, query: dict[str, str]) -> dict[str, Any]:
        first = int(query.get("continue", "0"))
        end = first + int(query.get("limit", "1000000"))
        metadata = {"resourceVersion": str(self.version)}
        if end < len(self.objects):
            metadata["continue"] = str(end)
        return {"metadata": metadata, "items": list(self.objects.values())[first:end]}

    def _watch(self, version: int, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self._watchers.append(writer)
        lines = [line for each, line in self._history if each > version]
        if version < self.oldest:
            gone = {"kind": "Status", "code": 410, "message": "too old resource version"}
            lines = [json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n"]
        for line in lines:
            writer.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.watching.set()


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, target, _ = first.split()
    headers = {key.lower(): text for key, text in (line.split(": ", 1) for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    url = urlsplit(target)
    query = {key: values[0] for key, values in parse_qs(url.query).items()}
    return Asked(method, url.path, query, headers, body)


def _write(
    writer: asyncio.StreamWriter, code: int, body: Any, headers: dict[str, str] | None = None
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    fields = {"content-length": str(len(data))} | (headers or {})
    head = "".join(f"{key}: {text}\r\n" for key, text in fields.items())
    writer.write(f"HTTP/1.1 {code} X\r\n{head}\r\n".encode() + data)


@pytest.fixture
async def kube_api(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeAPI]:
    """It listens; whoever watches it tries again soon."""
    monkeypatch.setattr("mural_resolvers.kubernetes.watch.RETRY_FIRST_S", 0.01)
    monkeypatch.setattr("mural_resolvers.kubernetes.watch.RETRY_MOST_S", 0.05)
    api = FakeAPI()
    await api.up()
    yield api
    api.down()
