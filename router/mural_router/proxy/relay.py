"""One request on its way to a replica and back: attempts, the answer's bytes, how it ended."""

from __future__ import annotations

import asyncio
import logging
import re
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final, NamedTuple

from mural_resolvers.errors import MuralError
from mural_router.http.exchange import Exchange, Reader, status_line
from mural_router.http.head import ResponseHead
from mural_router.http.upstream import (
    Caller,
    ConnectFailed,
    ReplicaConnection,
    ReplicaPool,
    ReplicaSilent,
)
from mural_router.proxy.errors import RouterUnknown, log_unknown, told
from mural_router.proxy.events import EventRelay, error_event
from mural_router.proxy.usage import Usage, UsageReader
from mural_router.routing.ask import (
    HEADERS,
    RETRY_HEADER,
    Ask,
    Outcome,
    Routed,
    Routing,
    request_id_of,
)

__all__ = ["InferenceRelay", "Relay", "Sent", "ask_of", "passed_on", "refusal_of"]

_log = logging.getLogger(__name__)

Fields = tuple[tuple[str, str], ...]

_HEADERS: Final = tuple((name.encode("ascii"), name) for name in sorted(HEADERS))
_RETRY_HEADER: Final = RETRY_HEADER.encode("ascii")

# Of a connection rather than of an answer (RFC 9110, section 7.6.1), or the router's own to say.
_NOT_PASSED_ON = re.compile(
    rb"\r\n(?:connection|keep-alive|proxy-(?:authenticate|authentication-info|connection)|server|te"
    rb"|trailer|transfer-encoding|upgrade|x-request-id|x-mural-[^:]*+):[^\r]*+",
    re.IGNORECASE,
)

# What an answer's Connection may say and takes no field away by: a length frames what is passed on.
_NAME_NOTHING: Final = frozenset({b"", b"close", b"keep-alive", b"content-length"})


def ask_of(exchange: Exchange) -> Ask:
    """What routing is asked about a request."""
    head = exchange.head
    named = head.named
    headers = {
        name: named[key].rstrip(b" \t").decode("latin-1") for key, name in _HEADERS if key in named
    }
    authorization = tuple([value.decode("latin-1") for value in head.values(b"authorization")])
    return Ask(
        head.path,
        authorization,
        exchange.body,
        headers,
        method=head.method,
        query=head.query,
        request_id=request_id_of(headers),
    )


def refusal_of(error: Exception) -> MuralError:
    """What a client is told for what routing raised."""
    if isinstance(error, MuralError):
        return error
    _log.error("a request could not be routed", exc_info=error)
    return MuralError("The router failed to answer this request.")


class Sent(NamedTuple):
    """A request that was routed, and sent on a connection, before its relay was made."""

    ask: Ask
    routed: Routed
    connection: ReplicaConnection


class Relay(Caller, Reader):
    """Owns its exchange and its attempt from the request's arrival until `Routed.done`."""

    def __init__(
        self,
        pool: ReplicaPool,
        routing: Routing,
        exchange: Exchange,
        sent: Sent | None = None,
    ) -> None:
        self._pool = pool
        self._routing = routing
        self._exchange = exchange
        self._ask = ask_of(exchange) if sent is None else sent.ask
        self._loop = asyncio.get_running_loop()
        self._routed: Routed | None = None
        self._connection: ReplicaConnection | None = None
        self._refreshed = False
        """A kept connection that turned out to be closed was replaced once."""
        self._head: ResponseHead | None = None
        self._began = False
        """Something of the answer's body has come, and its head was sent with it: only then is
        there no other attempt."""
        self._first_byte_s: float | None = None
        self._events: EventRelay | None = None
        self._reader: UsageReader | None = None
        self._task: asyncio.Task[None] | None = None
        """What is waited for: routing, or a connection."""
        exchange.reader = self
        if sent is None:
            self._start()
        else:
            self._routed, self._connection = sent.routed, sent.connection

    # -- what differs between kinds of requests ---------------------------------------------------

    @abstractmethod
    def _route(self) -> Routed | Callable[[], Awaitable[Routed]]:
        """Ask routing, as `Routing.route_now` does."""

    @abstractmethod
    def _send(self, connection: ReplicaConnection, routed: Routed) -> None:
        """Send the request, or begin to."""

    @abstractmethod
    def _may_ask_again(self) -> bool:
        """Whether the request can be sent once more as a whole."""

    # -- attempts ---------------------------------------------------------------------------------

    def _start(self) -> None:
        """Ask and send at once where nothing has to be waited for: a task costs much of both."""
        try:
            routed = self._route()
        except Exception as error:
            self._refuse(error)
            return
        if callable(routed):
            self._task = self._loop.create_task(self._run(routed))
            return
        self._routed = routed
        self._connection = self._pool.take(routed.endpoint)
        if self._connection is None:
            self._task = self._loop.create_task(self._again(routed))
        else:
            self._send(self._connection, routed)

    async def _run(self, route: Callable[[], Awaitable[Routed]]) -> None:
        try:
            self._routed = await route()
        except Exception as error:
            self._refuse(error)
        else:
            await self._attempt(self._routed)
        self._task = None

    def _refuse(self, error: Exception) -> None:
        self._exchange.fail(refusal_of(error), self._ask.own_headers)

    async def _attempt(self, routed: Routed) -> None:
        """Find a connection and send; what comes of it is told to the methods of `Caller`."""
        while True:
            endpoint = routed.endpoint
            try:
                connection = self._pool.take(endpoint) or await self._pool.connect(endpoint)
            except ConnectFailed as error:
                if routed.retry(f"connect: {error}"):
                    continue
                self._fail(error)
                return
            self._connection = connection
            self._send(connection, routed)
            return

    async def _again(self, routed: Routed) -> None:
        await self._attempt(routed)
        self._task = None

    def _try_again(self, routed: Routed) -> None:
        self._connection = None
        self._head = None
        self._events = self._reader = None
        self._task = self._loop.create_task(self._again(routed))

    # -- the replica's side -----------------------------------------------------------------------

    def answer_begins(self, head: ResponseHead) -> None:
        routed, connection = self._routed, self._connection
        assert routed is not None
        assert connection is not None
        routed.answered(head.status)
        unknown = head.status == 401
        if unknown:
            log_unknown(routed.endpoint.name)
        refused = unknown or head.status >= 500
        if refused and self._may_ask_again() and self._refused(routed, head):
            connection.discard()
            self._try_again(routed)
            return
        if unknown:
            # Told as a 401 it would have the client look for a fault in its own key.
            connection.discard()
            self._connection = None
            self._fail(RouterUnknown())
            return
        self._head = head
        self._first_byte_s = monotonic() - self._exchange.arrived
        if head.length is None and _is_events(head):
            self._events = EventRelay(hide_usage=routed.hide_usage)
        else:
            self._reader = UsageReader()

    def answer_goes_on(self, raw: bytes, payload: bytes, whole: bool) -> None:
        if self._events is not None:
            raw = self._events.feed(raw, payload, whole)
        elif self._reader is not None:
            self._reader.feed(payload)
        if self._began:
            self._exchange.write(raw)
        elif raw:
            self._began = True
            self._exchange.write(self._answer_head() + raw)
        if self._events is not None and self._began and not self._events.held:
            self._let_pass()

    def _let_pass(self) -> None:
        """Nothing is held: plain events go on as they come, as `EventRelay.feed` would have it."""
        way, connection = self._exchange.way, self._connection
        # Writing may have shown that the client is gone.
        if way is not None and connection is not None:
            connection.pass_on(*way, self._exchange)

    def answer_ends(self) -> None:
        self._connection = None
        last = self._events.end() if self._events is not None else b""
        if not self._began:
            last = self._answer_head() + last
        try:
            if last:
                self._exchange.write(last)
            self._exchange.finish()
        finally:
            # Whatever a transport raises: what the request holds of limits is given back.
            self._done(None)

    def answer_breaks(self, error: Exception) -> None:
        connection, self._connection = self._connection, None
        routed = self._routed
        assert connection is not None
        assert routed is not None
        if self._began:
            self._break_off(error)
            return
        lost = isinstance(error, OSError)
        if not (lost or isinstance(error, ReplicaSilent)) or not self._may_ask_again():
            self._fail(error)
        elif lost and connection.requests > 1 and not self._refreshed:
            # A kept connection may be closed just when it is used: that is no failed replica.
            self._refreshed = True
            self._try_again(routed)
        elif routed.retry(f"lost: {error}"):
            self._try_again(routed)
        else:
            self._fail(error)

    def replica_falls_silent(self) -> None:
        connection = self._connection
        assert connection is not None
        if not self._began:
            # Should it go on after all, it finds its work aborted.
            connection.discard()
            self.answer_breaks(ReplicaSilent("the replica answers nothing any more"))

    def request_pauses(self) -> None:
        self._exchange.pause_body()

    def request_resumes(self) -> None:
        self._exchange.resume_body()

    # -- the client's side ------------------------------------------------------------------------

    def gone(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._connection is not None:
            self._connection.discard()
            self._connection = None
        self._done("the client went away")

    def paused(self) -> None:
        if self._connection is not None:
            self._connection.pause()

    def resumed(self) -> None:
        if self._connection is not None:
            self._connection.resume()

    # -- ends -------------------------------------------------------------------------------------

    def end_now(self, error: MuralError) -> None:
        """The router stops: end as if the replica had broken off."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._connection is not None:
            self._connection.discard()
            self._connection = None
        if self._began:
            self._break_off(error)
        else:
            self._fail(error)

    def _refused(self, routed: Routed, head: ResponseHead) -> bool:
        """Whether the replica did not take the request, and another one will be asked."""
        mark = head.value(_RETRY_HEADER)
        text = None if mark is None else mark.decode("latin-1")
        return routed.may_retry(head.status, text) and routed.retry(f"status {head.status}")

    def _fail(self, error: Exception) -> None:
        """Nothing of an answer was sent: say what happened."""
        self._head = None
        routed = self._routed
        fields = self._ask.own_headers if routed is None else routed.answer_headers
        self._log(error)
        answer = told(error)
        try:
            self._exchange.fail(answer, fields)
        finally:
            self._done(str(error), status=answer.status, replica_failed=error is not answer)

    def _break_off(self, error: Exception) -> None:
        """A part of the answer was sent: a stream ends with an error, anything else short."""
        self._log(error)
        try:
            if self._events is not None:
                self._exchange.close_after()
                self._exchange.write(error_event(told(error)))
                self._exchange.finish()
            else:
                self._exchange.cut()
        finally:
            # What the router ends by its own word is no fault of the replica.
            self._done(str(error), replica_failed=not isinstance(error, MuralError))

    def _log(self, error: Exception) -> None:
        if self._routed is not None and not isinstance(error, MuralError):
            _log.warning("replica %s: %s", self._routed.endpoint.name, error)

    def _done(self, error: str | None, *, status: int = 0, replica_failed: bool = False) -> None:
        routed, self._routed = self._routed, None
        if routed is None:
            return
        prompt, completion = self._usage() or (None, None)
        exchange = self._exchange
        routed.done(
            Outcome(
                status=self._head.status if self._head is not None else status,
                prompt_tokens=prompt,
                completion_tokens=completion,
                error=error,
                first_byte_s=self._first_byte_s,
                total_s=monotonic() - exchange.arrived,
                bytes_sent=exchange.bytes_sent,
                replica_failed=replica_failed,
            )
        )

    def _usage(self) -> Usage | None:
        if self._events is not None:
            return self._events.usage
        return self._reader.usage if self._reader is not None else None

    def _answer_head(self) -> bytes:
        head, routed = self._head, self._routed
        assert head is not None
        assert routed is not None
        fields = _with_digest(routed.answer_headers, head)
        added = "".join([f"{name}: {value}\r\n" for name, value in fields])
        if head.length is None:
            added += "transfer-encoding: chunked\r\n"
        if not self._exchange.keeps:
            added += "connection: close\r\n"
        added_lines = added.encode("latin-1")
        return b"%b%b\r\n%b\r\n" % (status_line(head.status), passed_on(head), added_lines)


def passed_on(head: ResponseHead) -> bytes:
    """The fields of an answer that its client gets, each after a CRLF."""
    lines = _NOT_PASSED_ON.sub(b"", head.lines)
    if b"connection" not in head.named:
        return lines
    options = b",".join(head.values(b"connection")).lower().split(b",")
    named = {option.strip(b" \t") for option in options} - _NAME_NOTHING
    if not named:
        return lines
    kept = [line for line in lines.split(b"\r\n") if line.partition(b":")[0].lower() not in named]
    return b"\r\n".join(kept)


def _with_digest(fields: Fields, head: ResponseHead) -> Fields:
    """With the replica's own word on what served, where routing could not know it beforehand."""
    names = [name for name, _ in fields]
    if "x-mural-adapter" not in names or "x-mural-digest" in names:
        return fields
    digest = head.value(b"x-mural-digest")
    return fields if digest is None else (*fields, ("x-mural-digest", digest.decode("latin-1")))


class InferenceRelay(Relay):
    """A request whose body was read whole: it can be asked again until its answer's first byte."""

    def _route(self) -> Routed | Callable[[], Awaitable[Routed]]:
        return self._routing.route_now(self._ask)

    def _may_ask_again(self) -> bool:
        return True

    def _send(self, connection: ReplicaConnection, routed: Routed) -> None:
        added = "".join([f"{name}: {value}\r\n" for name, value in routed.request_headers])
        body = routed.body
        head = (
            f"POST {self._exchange.head.path} HTTP/1.1\r\n"
            f"host: {routed.endpoint.authority}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{added}\r\n"
        )
        connection.send(self, (head.encode("latin-1"), body))


def _is_events(head: ResponseHead) -> bool:
    return (head.value(b"content-type") or b"").lower().startswith(b"text/event-stream")
