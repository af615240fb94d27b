"""What routing is asked and what it answers."""

from __future__ import annotations

import itertools
import re
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from mural_resolvers.redaction import holds_secret
from mural_router.fleet.endpoint import Endpoint

if TYPE_CHECKING:
    from mural_router.routing.flows import Express

__all__ = [
    "HEADERS",
    "RETRY_HEADER",
    "Ask",
    "Outcome",
    "Routed",
    "Routing",
    "new_request_id",
    "request_id_of",
]

HEADERS: Final = frozenset({"x-session-id", "x-request-id", "traceparent", "tracestate"})
"""The request headers that routing reads, lower-case."""

RETRY_HEADER: Final = "x-mural-retry"
"""An answer of a Mural server that holds ``elsewhere`` here was refused before any work."""

REQUEST_ID: Final = "x-request-id"

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
# Unique among routers and restarts; to draw each one costs more than to count.
_PREFIX: Final = f"req-{secrets.token_hex(10)}"
_NUMBERS: Final = itertools.count(1)


def new_request_id() -> str:
    """Unique among routers and restarts."""
    return f"{_PREFIX}{next(_NUMBERS):012x}"


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's own, where it is one and may stand in a log; else a new one."""
    given = headers.get(REQUEST_ID)
    if given and _REQUEST_ID.fullmatch(given) and not holds_secret(given):
        return given
    return new_request_id()


class Ask(msgspec.Struct, frozen=True, gc=False):
    """An inference request, its body read; or what is asked about models and adapters."""

    path: str
    """Without the query."""
    authorization: tuple[str, ...]
    """Every Authorization header; other than one is refused where keys are asked for."""
    body: bytes = b""
    headers: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Lower-case names; only those that routing reads (`HEADERS`)."""
    candidates: frozenset[str] | None = None
    """``host:port`` of the endpoints that may serve it (a gateway's subset); None: all."""
    method: str = "POST"
    query: str = ""
    """As it was sent, without the question mark."""
    request_id: str = msgspec.field(default_factory=new_request_id)
    """Of every answer, refusals too, of the access log, and of what the replica is told."""

    @property
    def own_headers(self) -> tuple[tuple[str, str], ...]:
        """To add to an answer that no replica has a part in."""
        return ((REQUEST_ID, self.request_id),)


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How a routed request ended."""

    status: int
    """Of the answer; 0: none came."""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str | None = None
    """Why it did not end well, in words for the log; None: it did."""
    first_byte_s: float | None = None
    """From the request's arrival to the answer's first byte."""
    total_s: float = 0.0
    bytes_sent: int = 0
    replica_failed: bool = False
    """It was the replica that did not answer in time, or broke off in the midst of its answer
    (counts for its breaker); what `Routed.retry` was told of is counted already."""
    unreachable: bool = False
    """A gateway got no answer from the replica: counts for its breaker, and it is used no more
    until its port takes a connection."""


class Routed(Protocol):
    """One admitted request and where it goes. `done` is called once, whatever happens."""

    endpoint: Endpoint
    """Where to send it now."""
    body: bytes
    """With ``model`` rewritten to the exact version."""
    stream: bool
    hide_usage: bool
    """``body`` asks for the usage at the end of the stream though the client did not: the proxy
    reads that event and does not pass it on. False for what is no stream."""
    request_headers: tuple[tuple[str, str], ...]
    """To add upstream: identity (`x-mural-*`, Authorization), request id, `traceparent`."""
    answer_headers: tuple[tuple[str, str], ...]
    """To add downstream: `x-mural-adapter`, `x-mural-digest`, `x-mural-replica`, request id."""

    @abstractmethod
    def retry(self, why: str) -> bool:
        """The attempt failed before its first byte, where asking again is safe.

        Safe are: a connection that could not be made, one that broke before the answer's first
        byte, or that was ended since the replica answers nobody, and an answer of which
        `may_retry` says so; no timeout of an answer's first byte is, since the replica may be at
        work on it. True: `endpoint` and the headers are of another replica
        now. False: the budget, the candidates or the time are used up.
        """

    @abstractmethod
    def may_retry(self, status: int, mark: str | None) -> bool:
        """Whether an answer that has a status, and a `RETRY_HEADER` or none, is no last word.

        A cold load that took too long is one: it would take as long elsewhere.
        """

    @abstractmethod
    def answered(self, status: int, served: str | None = None) -> None:
        """The status line of an answer came (counts for the replica's breaker).

        ``served``: ``host:port`` of who gave it, where a gateway went elsewhere than to
        `endpoint`; `answer_headers` tell of that one from here on.
        """

    @abstractmethod
    def done(self, outcome: Outcome) -> None:
        """Settle limits, queues and counters, and write the access-log line."""


class Routing(Protocol):
    """Everything decided about a request: identity, rights, limits, version, replica."""

    express: Express | None = None
    """Where the proxy may ask first about the plainest requests; None: nowhere."""

    @abstractmethod
    async def route(self, ask: Ask) -> Routed:
        """Admit a request; may wait in its tenant's queue, within a bound.

        Raises `MuralError`s as design.md lists them (400, 401, 403, 404, 413, 429, 503).
        """

    def route_now(self, ask: Ask) -> Routed | Callable[[], Awaitable[Routed]]:
        """`route` for a request that has to wait for nothing; else what to call and to await.

        Nothing is held for a request that waits until that is awaited. Raises as `route`.
        """
        return partial(self.route, ask)

    def on_silence(self, fell_silent: Callable[[Endpoint], None]) -> None:
        """Have each replica told that answers nothing any more, again and again while it does not:
        what waits for its first byte is better asked elsewhere."""
        return

    @abstractmethod
    async def forward(self, ask: Ask) -> Routed:
        """Where a tenant's request about its own adapters (``/v1/adapters…``) goes.

        Any ready Mural server, with the caller's identity; the body is not looked at, and the
        proxy streams it. Raises as `route`.
        """

    @abstractmethod
    async def models(self, ask: Ask) -> bytes:
        """The JSON of ``GET /v1/models``: what the caller may use. Raises 401, 429."""

    @abstractmethod
    async def model(self, ask: Ask, name: str) -> bytes:
        """The JSON of ``GET /v1/models/{name}``. Raises 400, 401, 403, 404, 429."""
