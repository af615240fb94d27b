"""What routing is asked and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from mural_router.fleet.endpoint import Endpoint

__all__ = ["Ask", "Outcome", "Routed", "Routing"]


@dataclass(frozen=True, slots=True)
class Ask:
    """An inference request, its body read."""

    path: str
    """Without the query."""
    authorization: tuple[str, ...]
    """Every Authorization header; other than one is refused where keys are asked for."""
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    """Lower-case names; only those that routing reads (`routing.HEADERS`)."""
    candidates: frozenset[str] | None = None
    """``host:port`` of the endpoints that may serve it (a gateway's subset); None: all."""


@dataclass(frozen=True, slots=True)
class Outcome:
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


class Routed(ABC):
    """One admitted request and where it goes. `done` is called once, whatever happens."""

    endpoint: Endpoint
    """Where to send it now."""
    body: bytes
    """With ``model`` rewritten to the exact version."""
    stream: bool
    request_headers: tuple[tuple[str, str], ...]
    """To add upstream: identity (`x-mural-*`, Authorization), request id, `traceparent`."""
    answer_headers: tuple[tuple[str, str], ...]
    """To add downstream: `x-mural-adapter`, `x-mural-digest`, `x-mural-replica`, request id."""

    @abstractmethod
    def retry(self, why: str) -> bool:
        """The attempt failed before its first byte, where asking again is safe.

        True: `endpoint` and the headers are of another replica now. False: the budget, the
        candidates or the time are used up.
        """

    @abstractmethod
    def answered(self, status: int) -> None:
        """The status line of an answer came (counts for the replica's breaker)."""

    @abstractmethod
    def done(self, outcome: Outcome) -> None:
        """Settle limits, queues and counters, and write the access-log line."""


class Routing(ABC):
    """Everything decided about a request: identity, rights, limits, version, replica."""

    @abstractmethod
    async def route(self, ask: Ask) -> Routed:
        """Admit a request; may wait in its tenant's queue, within a bound.

        Raises `MuralError`s as design.md lists them (400, 401, 403, 404, 413, 429, 503).
        """
