"""An asynchronous client of the control API over the standard library's streams.

One connection a call, every wait bounded. TLS where an ``SSLContext`` is given.
"""

from __future__ import annotations

import asyncio
import ssl as tls
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar
from urllib.parse import quote

import msgspec

from mural_server.protocol.exchange import Exchange, ExchangeError, exchange
from mural_server.protocol.wire import (
    AdapterResidency,
    AdapterStatus,
    DeclaredAnswer,
    DeclaredRequest,
    DrainAnswer,
    FreedAnswer,
    ResidentRequest,
    Snapshot,
    StateEvent,
    StateGap,
    apply,
)

__all__ = ["ControlClient", "ControlError", "decode_event"]

MAX_EVENT_BYTES = 64 << 20
MAX_BODY_BYTES = 4 << 20

T = TypeVar("T")


class ControlError(Exception):
    """The server refused or could not be understood; ``status`` is 0 when it did not answer.

    ``refused``: nobody listens there.
    """

    def __init__(
        self,
        message: str,
        status: int = 0,
        retry_after_s: float | None = None,
        *,
        refused: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s
        self.refused = refused


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


_event_decoder = msgspec.json.Decoder(StateEvent)


def decode_event(data: bytes) -> StateEvent:
    """Read one event of the stream; raise `ControlError` for what is none."""
    try:
        event: StateEvent = _event_decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlError(f"an event that is none: {error}") from None
    return event


class ControlClient:
    """Speaks with one server. Every call raises `ControlError`.

    ``timeout_s`` bounds each short call. ``idle_timeout_s`` bounds the silence of the state
    stream, whose heartbeats come more often. Unloading drains, so `remove` has a longer bound.
    ``server_name`` is what its certificate must be for, where it is reached by address.
    ``max_event_bytes`` bounds one event of the stream: a snapshot takes about 250 bytes a name.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        token: str | None = None,
        ssl: tls.SSLContext | None = None,
        server_name: str | None = None,
        timeout_s: float = 10.0,
        load_timeout_s: float = 120.0,
        idle_timeout_s: float = 15.0,
        max_event_bytes: int = MAX_EVENT_BYTES,
    ) -> None:
        self._host = host
        self._port = port
        self._token = token
        self._ssl = ssl
        self._server_name = server_name
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._max_event_bytes = max_event_bytes

    async def healthy(self) -> bool:
        """Whether the server and its core live."""
        return await self._ok("/health")

    async def ready(self) -> bool:
        """Whether it accepts requests and has its declared adapters."""
        return await self._ok("/ready")

    async def set_resident(
        self,
        name: str,
        *,
        digest: str | None = None,
        level: AdapterResidency = "host",
        pinned: bool = False,
        source: str | None = None,
    ) -> AdapterStatus:
        """Have an adapter loaded, or on disk; idempotent. 409: other content; 422: unusable."""
        body = ResidentRequest(name=name, digest=digest, level=level, pinned=pinned, source=source)
        return await self._call(
            "PUT", "/mural/v1/resident", body, AdapterStatus, self._load_timeout_s
        )

    async def remove(self, name: str) -> FreedAnswer:
        """Drain and unload a name; idempotent."""
        path = f"/mural/v1/resident/{quote(name, safe='')}"
        return await self._call("DELETE", path, None, FreedAnswer, self._load_timeout_s)

    async def declare(self, names: tuple[str, ...]) -> DeclaredAnswer:
        """Say what must be resident before the server is ready."""
        return await self._call(
            "PUT",
            "/mural/v1/declared",
            DeclaredRequest(names=names),
            DeclaredAnswer,
            self._timeout_s,
        )

    async def drain(self) -> DrainAnswer:
        """Have the server take no new requests."""
        return await self._call("POST", "/mural/v1/drain", None, DrainAnswer, self._timeout_s)

    async def events(self, since: int | None = None) -> AsyncGenerator[StateEvent, None]:
        """The state stream, from ``since`` where the server still has it, else from a snapshot.

        Ends with `ControlError` when the connection does, or falls silent.
        """
        async with aclosing(self.raw_events(since)) as lines:
            async for line in lines:
                yield decode_event(line)

    async def raw_events(self, since: int | None = None) -> AsyncGenerator[bytes, None]:
        """As `events`, for a caller who counts what an event costs before `decode_event`."""
        query = "" if since is None else f"?since={since}"
        async with self._request("GET", f"/mural/v1/state{query}", b"") as answer:
            if answer.head.status != 200:
                raise await self._refusal(answer)
            lines = answer.lines(self._max_event_bytes, self._idle_timeout_s)
            async with aclosing(lines):
                async for line in lines:
                    if line.startswith(b"data: "):
                        yield line[6:]
            raise ControlError("the server ended the stream")

    async def states(self) -> AsyncGenerator[Snapshot, None]:
        """The state after every event; a gap asks for a snapshot. Ends as `events` does."""
        state: Snapshot | None = None
        while True:
            events = self.events(None if state is None else state.seq)
            try:
                async for event in events:
                    state = apply(state, event)
                    yield state
            except StateGap:
                state = None
            finally:
                await events.aclose()

    async def _ok(self, path: str) -> bool:
        async with self._request("GET", path, b"") as answer:
            return answer.head.status == 200

    async def _call(
        self,
        method: str,
        path: str,
        body: msgspec.Struct | None,
        answer: type[T],
        timeout_s: float,
    ) -> T:
        sent = b"" if body is None else msgspec.json.encode(body)
        try:
            async with asyncio.timeout(timeout_s):
                async with self._request(method, path, sent) as got:
                    if got.head.status != 200:
                        raise await self._refusal(got)
                    received = await got.body(MAX_BODY_BYTES)
        except TimeoutError:
            raise ControlError(f"no answer within {timeout_s:g} s") from None
        try:
            return msgspec.json.decode(received, type=answer)
        except msgspec.MsgspecError as error:
            raise ControlError(f"an answer that is none: {error}") from None

    @asynccontextmanager
    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[Exchange]:
        headers = {"Content-Type": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            async with exchange(
                self._host,
                self._port,
                method,
                path,
                body=body,
                headers=headers,
                ssl=self._ssl,
                server_name=self._server_name,
                connect_timeout_s=self._timeout_s,
                # A load or an unload answers only when it is done: the caller's bound is longer.
                answer_timeout_s=self._load_timeout_s,
            ) as answer:
                yield answer
        except ExchangeError as error:
            raise ControlError(error.message, refused=error.refused) from None

    async def _refusal(self, answer: Exchange) -> ControlError:
        head = answer.head
        async with asyncio.timeout(self._timeout_s):
            body = await answer.body(MAX_BODY_BYTES)
        try:
            message = msgspec.json.decode(body, type=_ErrorBody).error.message
        except msgspec.MsgspecError:
            message = f"status {head.status}"
        if self._token:
            # Who refuses a request may quote it, and this is logged.
            message = message.replace(self._token, "…")
        retry = head.headers.get("retry-after", "")
        return ControlError(message, head.status, float(retry) if retry.isdecimal() else None)
