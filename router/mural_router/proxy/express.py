"""The way of plain requests: taken whole, decided by their flow, answered whole.

Most requests are of one form, come in one piece, and follow others of the same tenant for the same
adapter (`mural_router.routing.flows`). They are carried here with little work. Whatever turns out
to be otherwise is handed to an `InferenceRelay` at the point that it has reached: an answer that
comes in pieces, a replica that fails, a client that leaves.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING, Final

import msgspec

from mural_resolvers.errors import MuralError
from mural_resolvers.redaction import holds_secret
from mural_router.http.cut_through import send_now
from mural_router.http.exchange import WholeExchange, status_line
from mural_router.http.head import ResponseHead, parse_request_head
from mural_router.http.scan import plain_answer, plain_answer_head, plain_request
from mural_router.http.settings import HttpSettings
from mural_router.http.upstream import Caller, ReplicaConnection, ReplicaPool
from mural_router.proxy.relay import InferenceRelay, Sent, ask_of, refusal_of
from mural_router.proxy.usage import find_usage
from mural_router.routing.ask import Ask, Outcome, Routing, new_request_id
from mural_router.routing.flows import Express, Flow, FlowRequest

if TYPE_CHECKING:
    from mural_router.http.client import ClientConnection

__all__ = ["ExpressLane", "open_express_lane"]

_log = logging.getLogger(__name__)

_STATUS: Final = status_line(200)
_PLAIN: Final = parse_request_head(b"POST / HTTP/1.1\r\nhost: router\r\n\r\n", 1)


def open_express_lane(
    settings: HttpSettings, routing: Routing, pool: ReplicaPool
) -> ExpressLane | None:
    """One for a proxy; None where it cannot be: nothing native, or routing has no flows."""
    express = routing.express
    if express is None:
        return None
    if plain_request is None or plain_answer is None:
        _log.warning(
            "the native reader was not built, for want of a compiler or of Python's headers at the"
            " installation: a short request costs about twice as much CPU"
        )
        return None
    return ExpressLane(settings, routing, express, pool)


class ExpressLane:
    """Of one proxy."""

    def __init__(
        self, settings: HttpSettings, routing: Routing, express: Express, pool: ReplicaPool
    ) -> None:
        assert plain_request is not None
        self.pool = pool
        self.routing = routing
        self.unfolding = express.routing
        self.max_fields = settings.max_head_fields
        self._read = plain_request
        self._flows = express.flows
        self._max_head_bytes = settings.max_head_bytes
        self._max_body_bytes = settings.max_body_bytes

    def take(self, connection: ClientConnection, data: bytes) -> WholeExchange | None:
        """As `mural_router.http.exchange.Express`."""
        plain = self._read(data, self._max_head_bytes, self.max_fields)
        if plain is None:
            return None
        (
            asked,
            prompt_bytes,
            max_tokens,
            stream,
            body_at,
            model_at,
            after_model,
            asks_usage,
            request_id,
            trace,
        ) = plain
        try:
            flow = self._flows.find(asked)
        except Exception:
            # The ordinary way meets it too, and answers.
            return None
        if flow is None or len(data) - body_at > self._max_body_bytes:
            return None
        if request_id is not None and holds_secret(request_id):
            # It gets another one there.
            return None
        replica = self.pool.take_from(flow.address)
        if replica is None:
            return None
        try:
            request = self._flows.admit(
                flow, prompt_bytes, None if max_tokens < 0 else max_tokens, stream, request_id
            )
        except Exception as error:
            self.pool.put_back(replica)
            return _Refused(self, connection, data, body_at, flow, request_id, error)
        if request is None:
            self.pool.put_back(replica)
            return None
        value = flow.value_of_stream if stream and not asks_usage else flow.value
        return _Carried(
            self, connection, data, body_at, model_at, after_model, value, trace, request, replica
        )


class _Express(WholeExchange):
    """It has the head that all of its kind have in common, until it is read."""

    __slots__ = ("_body_at", "_data", "_lane")

    _lane: ExpressLane
    _data: bytes
    _body_at: int

    def _read(self, request_id: str) -> Ask:
        """Become what it would be if it had been read; give what routing would be asked."""
        self.head = parse_request_head(self._data[: self._body_at], self._lane.max_fields)
        self.body = self._data[self._body_at :]
        self._data = b""
        return msgspec.structs.replace(ask_of(self), request_id=request_id)


class _Refused(_Express):
    """A request that its tenant's limits refuse, or cannot be asked about."""

    __slots__ = ("_error", "_flow", "_request_id")

    def __init__(
        self,
        lane: ExpressLane,
        connection: ClientConnection,
        data: bytes,
        body_at: int,
        flow: Flow,
        request_id: str | None,
        error: Exception,
    ) -> None:
        super().__init__(connection, _PLAIN, monotonic())
        self._lane, self._data, self._body_at = lane, data, body_at
        self._flow, self._request_id, self._error = flow, request_id, error

    def begin(self) -> None:
        error = self._error
        # Its traceback leads back here: neither would go until the collector comes.
        del self._error
        ask = self._read(self._request_id or new_request_id())
        self._lane.unfolding.refuse(self._flow, ask, error)
        self.fail(refusal_of(error), ask.own_headers)


class _Carried(_Express, Caller):
    """A request that was admitted: it is its own relay for as long as all is plain."""

    __slots__ = (
        "_after_model",
        "_held",
        "_model_at",
        "_replica",
        "_request",
        "_trace",
        "_value",
    )

    def __init__(
        self,
        lane: ExpressLane,
        connection: ClientConnection,
        data: bytes,
        body_at: int,
        model_at: int,
        after_model: int,
        value: bytes,
        trace: bytes,
        request: FlowRequest,
        replica: ReplicaConnection,
    ) -> None:
        super().__init__(connection, _PLAIN, monotonic())
        self._lane, self._data, self._body_at = lane, data, body_at
        self._model_at, self._after_model = model_at, after_model
        self._value, self._trace = value, trace
        self._request = request
        self._held = b""
        """The answer's head, until something of its body comes."""
        self._replica: ReplicaConnection | None = replica
        self.reader = self

    def begin(self) -> None:
        request, data = self._request, self._data
        flow, replica = request.flow, self._replica
        assert replica is not None
        before, after = data[self._body_at : self._model_at], data[self._after_model :]
        value = self._value
        size = len(before) + len(value) + len(after)
        head = b"%b%d%b%b%b\r\n\r\n" % (
            flow.head,
            size,
            flow.identity,
            request.request_id.encode("ascii"),
            self._trace,
        )
        replica.send(self, (head, before, value, after), first=self._is_answer)

    def _is_answer(self, data: bytes) -> bool:
        """Pass the answer on, if this is all of one; hold it, if it is all of a head."""
        request, connection, held = self._request, self._connection, self._held
        answer = None
        if connection is not None and connection.keep:
            assert plain_answer is not None
            assert plain_answer_head is not None
            answer = plain_answer(held + data if held else data)
            if answer is None and not held and plain_answer_head(data):
                assert self._replica is not None
                self._held = data
                self._replica.wait_for_more(self._is_answer)
                return True
        if answer is None or (answer[2] and request.flow.digest is None):
            return self._unfold() is None
        assert connection is not None
        fields, body_at, _ = answer
        body = data if held else data[body_at:]
        sent = b"%b%b\r\nx-request-id: %b%b%b" % (
            _STATUS,
            fields,
            request.request_id.encode("ascii"),
            request.flow.answer,
            body,
        )
        passed_s = monotonic() - self.arrived
        replica, self._replica = self._replica, None
        assert replica is not None
        replica.answered_whole()
        self.bytes_sent = len(sent)
        try:
            send_now(connection.transport, connection.fd, sent)
            self.finish()
        finally:
            # As `Relay.answer_ends`.
            prompt, completion = find_usage(body) or (None, None)
            self._lane.unfolding.finish(
                request,
                Outcome(
                    status=200,
                    prompt_tokens=prompt,
                    completion_tokens=completion,
                    first_byte_s=passed_s,
                    total_s=monotonic() - self.arrived,
                    bytes_sent=self.bytes_sent,
                ),
            )
        return True

    def _unfold(self) -> InferenceRelay | None:
        """Go on as a request of any kind, from where it is: sent, with no answer or its head.

        None: that failed, by a fault of ours, and the request is over.
        """
        request, lane, replica = self._request, self._lane, self._replica
        assert replica is not None
        try:
            ask = self._read(request.request_id)
            routed = lane.unfolding.unfold(request, ask)
        except Exception:
            _log.exception("a request could not be gone on with")
            self._give_up(replica)
            return None
        relay = InferenceRelay(lane.pool, lane.routing, self, Sent(ask, routed, replica))
        held, self._held = self._held, b""
        replica.hand_over(relay, held)
        return relay

    def _give_up(self, replica: ReplicaConnection) -> None:
        """Nobody goes on waiting for an answer that will not come, and no place stays held."""
        self.reader = self._replica = None
        replica.discard()
        self.cut()
        self._lane.unfolding.drop(self._request)

    # -- the replica's side -----------------------------------------------------------------------

    def answer_begins(self, head: ResponseHead) -> None:
        raise AssertionError("what comes first is seen before it begins")

    def answer_goes_on(self, raw: bytes, payload: bytes, whole: bool) -> None:
        raise AssertionError("it has not begun")

    def answer_ends(self) -> None:
        raise AssertionError("it has not begun")

    def answer_breaks(self, error: Exception) -> None:
        if (relay := self._unfold()) is not None:
            relay.answer_breaks(error)

    def replica_falls_silent(self) -> None:
        if (relay := self._unfold()) is not None:
            relay.replica_falls_silent()

    def request_pauses(self) -> None:
        """It was sent whole."""

    def request_resumes(self) -> None:
        """It was sent whole."""

    # -- the client's side ------------------------------------------------------------------------

    def gone(self) -> None:
        if (relay := self._unfold()) is not None:
            relay.gone()
        self.reader = None

    def paused(self) -> None:
        if self._replica is not None:
            self._replica.pause()

    def resumed(self) -> None:
        if self._replica is not None:
            self._replica.resume()

    def end_now(self, error: MuralError) -> None:
        if (relay := self._unfold()) is not None:
            relay.end_now(error)
