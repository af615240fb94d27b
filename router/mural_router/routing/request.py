"""One request on its way: its attempts, its accounts, and the line that is written at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from mural_resolvers.tenants import Principal
from mural_resolvers.tracing import Trace
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.limits.limiter import Hold
from mural_router.limits.queue import Turn
from mural_router.placement import PlacementRequest
from mural_router.routing.access_log import AccessLog, AccessRecord, for_log, now_text
from mural_router.routing.ask import Outcome
from mural_router.routing.dispatch import BY_GATEWAY, Attempt, Dispatch
from mural_router.routing.identity import Headers
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.retry import RetryBudget, may_ask_again
from mural_router.routing.target import Target

__all__ = ["Admitted", "Forwarded", "RoutedRequest", "Story"]

Identity = Callable[[Endpoint], Headers]
BodyFor = Callable[[Engine], bytes]


class Admitted(NamedTuple):
    """What a request was given at the door."""

    principal: Principal
    target: Target
    placement: PlacementRequest
    hold: Hold
    turn: Turn[Attempt]
    counted: bool
    """It generates tokens, which its tenant's accounts are settled by."""


class Story(msgspec.Struct, eq=False):
    """What is known of a request so far, for the log, the metrics and the trace."""

    request_id: str
    path: str
    arrived: float
    clock: Callable[[], float]
    metrics: RouterMetrics
    log: AccessLog | None
    trace: Trace | None
    passed_on: Headers
    """``traceparent`` and the like for the replica."""
    principal: Principal | None = None
    asked: str | None = None
    target: Target | None = None
    stream: bool = False
    queued_s: float | None = None
    digest: str | None = None
    replica: str | None = None
    reason: str | None = None
    attempts: int = 0

    def end(self, *, status: int, error: str | None = None) -> None:
        """It ended here: refused, or answered by the router itself."""
        total_s = self.clock() - self.arrived
        self.finish(Outcome(status=status, error=error, total_s=total_s))

    def finish(self, outcome: Outcome) -> None:
        """Count it, write its line, end its span."""
        self._count(outcome)
        if self.log is not None:
            self.log.record(self._record(outcome))
        if self.trace is not None:
            self._end_trace(self.trace, outcome)

    def _count(self, outcome: Outcome) -> None:
        metrics = self.metrics
        metrics.answers[outcome.status] += 1
        metrics.request_s.observe(outcome.total_s)
        if outcome.first_byte_s is not None:
            metrics.first_byte_s.observe(outcome.first_byte_s)
        if self.queued_s is not None:
            metrics.queued_s.observe(self.queued_s)
        metrics.prompt_tokens += outcome.prompt_tokens or 0
        metrics.completion_tokens += outcome.completion_tokens or 0
        if self.target is None or self.target.adapter is None:
            return
        ok = 200 <= outcome.status < 300 and not outcome.replica_failed
        numbers = metrics.adapter(self.target.model, exists=ok and self.replica is not None)
        if ok:
            numbers.ok += 1
            numbers.first_byte_s += outcome.first_byte_s or 0.0
        elif 400 <= outcome.status < 500:
            numbers.client_errors += 1
        elif outcome.status:
            numbers.server_errors += 1
        numbers.prompt_tokens += outcome.prompt_tokens or 0
        numbers.completion_tokens += outcome.completion_tokens or 0

    def _record(self, outcome: Outcome) -> AccessRecord:
        principal, target = self.principal, self.target
        alias = None if target is None else target.alias
        if target is None and self.asked is not None:
            alias = for_log(self.asked)
        return AccessRecord(
            at=now_text(time.time()),
            request_id=self.request_id,
            path=self.path,
            status=outcome.status,
            tenant=None if principal is None else principal.tenant,
            key_id=None if principal is None else principal.key_id,
            asked=alias,
            adapter=None if target is None or target.adapter is None else target.model,
            digest=self.digest,
            replica=self.replica,
            reason=self.reason,
            attempts=self.attempts,
            stream=self.stream,
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=outcome.completion_tokens,
            queued_s=None if self.queued_s is None else _rounded(self.queued_s),
            first_byte_s=None if outcome.first_byte_s is None else _rounded(outcome.first_byte_s),
            total_s=_rounded(outcome.total_s),
            bytes_sent=outcome.bytes_sent,
            error=outcome.error,
        )

    def _end_trace(self, trace: Trace, outcome: Outcome) -> None:
        target = self.target
        trace.set(
            request_id=self.request_id,
            tenant=None if self.principal is None else self.principal.tenant,
            adapter=None if target is None or target.adapter is None else target.model,
            digest=self.digest,
            replica=self.replica,
            reason=self.reason,
            attempts=self.attempts,
            queued_s=self.queued_s,
            first_byte_s=outcome.first_byte_s,
            prompt_tokens=outcome.prompt_tokens,
            completion_tokens=outcome.completion_tokens,
        )
        trace.end(status=outcome.status, error=outcome.error)


class RoutedRequest:
    """An admitted inference request, at one replica after another until one answers."""

    def __init__(
        self,
        admitted: Admitted,
        *,
        body_for: BodyFor,
        stream: bool,
        hide_usage: bool,
        story: Story,
        dispatch: Dispatch,
        budget: RetryBudget,
        identity: Identity,
        clock: Callable[[], float],
        sent: bool = False,
    ) -> None:
        """``sent``: it was sent to the replica of its turn, and counted, before."""
        self._body_for = body_for
        self.stream = stream
        self.hide_usage = hide_usage
        self._admitted = admitted
        self._story = story
        self._dispatch = dispatch
        self._budget = budget
        self._identity = identity
        self._clock = clock
        self._tried: frozenset[str] = frozenset()
        self._done = False
        if not sent:
            self._count(admitted.turn.seat)
        self._go_to(admitted.turn.seat)

    def may_retry(self, status: int, mark: str | None) -> bool:
        return may_ask_again(self.endpoint.engine, status, mark)

    def answered(self, status: int, served: str | None = None) -> None:
        if served is not None:
            self._move(served)
        if not self._attempt.ended:
            self._dispatch.answered(self._attempt, status)

    def retry(self, why: str) -> bool:
        attempt, metrics = self._attempt, self._story.metrics
        if not attempt.answered:
            self._dispatch.unreachable(attempt)
        self._dispatch.end(attempt)
        self._tried |= {attempt.endpoint.name}
        if self._story.trace is not None:
            self._story.trace.event(f"attempt failed: {why}")
        if self._story.attempts >= self._budget.settings.attempts:
            metrics.retries["attempts"] += 1
            return False
        if not self._budget.take(self._clock()):
            metrics.retries["budget"] += 1
            return False
        placement = self._admitted.placement
        taken = self._dispatch.take(
            PlacementRequest(
                adapter=placement.adapter,
                prefix=placement.prefix,
                session=placement.session,
                sequences=placement.sequences,
                candidates=placement.candidates,
                excluded=self._tried,
            )
        )
        if taken is None:
            metrics.retries["replicas"] += 1
            return False
        metrics.retries["made"] += 1
        self._count(taken)
        self._go_to(taken)
        return True

    def done(self, outcome: Outcome) -> None:
        if self._done:
            return
        self._done = True
        if outcome.unreachable:
            self._dispatch.unreachable(self._attempt)
        elif outcome.replica_failed and not self._attempt.ended:
            self._dispatch.failed(self._attempt)
        self._settle(outcome)
        self._dispatch.end(self._attempt)
        self._story.finish(outcome)

    def _settle(self, outcome: Outcome) -> None:
        hold, turn = self._admitted.hold, self._admitted.turn
        used: int | None = None
        if outcome.prompt_tokens is not None or outcome.completion_tokens is not None:
            used = (outcome.prompt_tokens or 0) + (outcome.completion_tokens or 0)
        elif not self._admitted.counted or outcome.status >= 300:
            # Refused: nothing was generated. Of a client that left the estimate stays.
            used = 0
        if used is not None:
            hold.settle(used)
            turn.settle(used)
        hold.close()

    def _count(self, attempt: Attempt) -> None:
        metrics = self._story.metrics
        metrics.choices[attempt.reason] += 1
        metrics.replica(attempt.endpoint.name).attempts += 1

    def _go_to(self, attempt: Attempt) -> None:
        story, target = self._story, self._admitted.target
        self._attempt = attempt
        self.endpoint = attempt.endpoint
        self.body = self._body_for(attempt.endpoint.engine)
        story.attempts += 1
        self.request_headers = (
            *self._identity(attempt.endpoint),
            ("x-request-id", story.request_id),
            *story.passed_on,
        )
        self._tell(attempt.endpoint.name, attempt.reason, attempt.digest or target.digest)

    def _move(self, served: str) -> None:
        moved = self._dispatch.moved(self._attempt, served)
        if moved is not None:
            self._attempt = moved
            self.endpoint = moved.endpoint
        replica = served if moved is None else moved.endpoint.name
        self._tell(replica, BY_GATEWAY, self._admitted.target.digest)

    def _tell(self, replica: str, reason: str, digest: str | None) -> None:
        """Have log, trace and the answer's headers say who serves it."""
        story, target = self._story, self._admitted.target
        story.replica, story.reason, story.digest = replica, reason, digest
        answer = [("x-request-id", story.request_id), ("x-mural-replica", replica)]
        if target.adapter is not None:
            answer.append(("x-mural-adapter", target.model))
            if digest is not None:
                answer.append(("x-mural-digest", digest))
        self.answer_headers = tuple(answer)


class Forwarded:
    """A request about a tenant's own adapters: passed to one Mural server, or the next."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        identity: Identity,
        story: Story,
        changed: Callable[[], None] | None,
    ) -> None:
        """``changed`` is told when a server has done what was asked; None: nothing changes then."""
        self._changed = changed
        self.body = b""
        self.stream = self.hide_usage = False
        self._left = list(endpoints)
        self._identity = identity
        self._story = story
        self._done = False
        self._go_to(self._left.pop(0))

    def may_retry(self, status: int, mark: str | None) -> bool:
        # An upload's body has been passed on by then.
        return False

    def answered(self, status: int, served: str | None = None) -> None:
        """Uploads say nothing about how a replica generates."""
        if self._changed is not None and 200 <= status < 300:
            # Before the client hears of it: its next request is to find what it has changed.
            self._changed()
        if served is not None:
            self._tell(served)

    def retry(self, why: str) -> bool:
        if not self._left:
            return False
        self._go_to(self._left.pop(0))
        return True

    def done(self, outcome: Outcome) -> None:
        if not self._done:
            self._done = True
            self._story.finish(outcome)

    def _go_to(self, endpoint: Endpoint) -> None:
        story = self._story
        self.endpoint = endpoint
        story.attempts += 1
        request_id = ("x-request-id", story.request_id)
        self.request_headers = (*self._identity(endpoint), request_id, *story.passed_on)
        self._tell(endpoint.name)

    def _tell(self, replica: str) -> None:
        self._story.replica = replica
        self.answer_headers: Headers = (
            ("x-request-id", self._story.request_id),
            ("x-mural-replica", replica),
        )


def _rounded(seconds: float) -> float:
    # To the microsecond; `round` goes by way of a text, which takes longer than the rest of a line.
    return int(seconds * 1e6 + 0.5) / 1e6
