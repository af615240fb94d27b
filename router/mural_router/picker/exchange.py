"""One request through Envoy: asked at its body's end, followed to its answer's last byte."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Final

import msgspec
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    ProcessingRequest,
    ProcessingResponse,
)

from mural_resolvers.errors import MuralError, TooLarge, Unavailable
from mural_router.fleet.endpoint import Endpoint, plain_authority
from mural_router.http.errors import BadRequest, BrokenAnswer
from mural_router.picker import messages
from mural_router.picker.answer import AnswerReader
from mural_router.picker.messages import Fields, RequestFacts
from mural_router.proxy.errors import RouterUnknown, log_unknown
from mural_router.proxy.paths import Answerer, Place, place_of
from mural_router.routing.ask import HEADERS, Ask, Outcome, Routed, Routing, request_id_of

__all__ = ["NotDuplex", "PickerExchange"]

LOOKUP_TIMEOUT_S: Final = 2.0

Messages = AsyncIterator[ProcessingRequest]
Send = Callable[[ProcessingResponse], Awaitable[None]]


class NotDuplex(Exception):
    """Envoy is not set up to stream the bodies; the text says how it should be."""


class _Left(Exception):
    """Envoy ended the stream: the client went away, or the replica did."""


class PickerExchange:
    """Owns one stream of messages, from a request's headers to the end of its answer."""

    def __init__(
        self, routing: Routing, incoming: Messages, send: Send, *, max_body_bytes: int
    ) -> None:
        self._routing = routing
        self._incoming = incoming
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()
        self._own_headers: Fields = ()
        """Of what no replica has a part in, once the request's head is known."""
        self._routed: Routed | None = None
        self._destination = ""
        """Where Envoy was told to send it."""
        self._status = 0
        self._first_byte_s: float | None = None
        self._bytes_sent = 0
        self._complete = False
        self._unreachable = False
        self._reader: AnswerReader | None = None

    async def run(self) -> None:
        """Answer each message; what routing refuses is an answer too.

        Raises `NotDuplex`, and `BrokenAnswer` for a replica's answer that cannot be followed.
        """
        error: str | None = "the stream broke off"
        broken = False
        try:
            await self._request()
            if self._routed is not None:
                await self._answer(self._routed)
            error = None
        except MuralError as refused:
            error, self._status = refused.code, refused.status
            await self._send(messages.refusal(refused, self._headers))
        except _Left:
            error = "the client went away"
        except BrokenAnswer as answer:
            error, broken = str(answer), True
            raise
        finally:
            self._done(error, broken=broken)

    # -- the request ------------------------------------------------------------------------------

    async def _request(self) -> None:
        first = await self._next()
        if not first.HasField("request_headers"):
            raise NotDuplex("the first message is no request's headers: send them to the picker")
        if not messages.is_duplex(first):
            raise NotDuplex("both body modes are to be FULL_DUPLEX_STREAMED")
        facts = messages.request_facts(first)
        ask = _ask(facts)
        self._own_headers = ask.own_headers
        place = place_of(facts)
        if place.answerer is Answerer.INFERENCE:
            await self._pick(facts, ask)
        elif place.answerer is Answerer.ADAPTERS:
            await self._forward(facts, ask)
        else:
            await self._send(await self._said(ask, place))

    async def _pick(self, facts: RequestFacts, ask: Ask) -> None:
        """Routed by its body, which is sent on with the exact model's name in it."""
        body, trailers = b"", False
        if not facts.ends:
            body, trailers = await self._body()
        # Set at once: what is routed has to be settled, whatever happens from here on.
        asked = msgspec.structs.replace(ask, body=body)
        routed = self._routed = await self._routing.route(asked)
        destination = self._destination = await _address(routed.endpoint)
        added = routed.request_headers
        if facts.ends:
            await self._send(messages.request_headers(facts, destination, added, None))
            return
        await self._send(messages.request_headers(facts, destination, added, len(routed.body)))
        await self._send_all(messages.request_body(routed.body, ends=not trailers))
        if trailers:
            await self._send(messages.request_trailers())

    async def _forward(self, facts: RequestFacts, ask: Ask) -> None:
        """To any Mural server, by its headers; the body passes as it comes."""
        routed = self._routed = await self._routing.forward(ask)
        destination = self._destination = await _address(routed.endpoint)
        await self._send(messages.request_headers(facts, destination, routed.request_headers, None))
        ends = facts.ends
        while not ends:
            message = await self._next()
            if message.HasField("request_trailers"):
                await self._send(messages.request_trailers())
                return
            piece = _request_piece(message)
            ends = piece.end_of_stream
            await self._send_all(messages.request_body(piece.body, ends=ends))

    async def _said(self, ask: Ask, place: Place) -> ProcessingResponse:
        """What the router answers itself."""
        body = b"{}"
        if place.answerer is Answerer.MODELS:
            body = await self._routing.models(ask)
        elif place.answerer is Answerer.MODEL:
            body = await self._routing.model(ask, place.name)
        return messages.said(200, body, ask.own_headers)

    async def _body(self) -> tuple[bytes, bool]:
        """The whole body, and whether trailers ended it."""
        pieces: list[bytes] = []
        size = 0
        while True:
            message = await self._next()
            if message.HasField("request_trailers"):
                return b"".join(pieces), True
            piece = _request_piece(message)
            size += len(piece.body)
            if size > self._max_body_bytes:
                raise TooLarge(f"The body is larger than {self._max_body_bytes} bytes.")
            pieces.append(piece.body)
            if piece.end_of_stream:
                return b"".join(pieces), False

    # -- the answer -------------------------------------------------------------------------------

    async def _answer(self, routed: Routed) -> None:
        """Pass it on; its last piece, or its trailers, are the end.

        Raises `RouterUnknown`, or `Unavailable` for an answer of Envoy's own, before anything of
        it was passed on.
        """
        while not self._complete:
            message = await self._next()
            # Noted before it is answered: Envoy may end the stream as soon as it has the answer.
            if message.HasField("response_headers"):
                self._complete = message.response_headers.end_of_stream
                await self._send(self._answer_begins(routed, message))
            elif message.HasField("response_body"):
                self._complete = message.response_body.end_of_stream
                await self._send_all(self._answer_goes_on(message))
            elif message.HasField("response_trailers"):
                self._complete = True
                await self._send_all(self._held())
                await self._send(messages.response_trailers())
            else:
                # Of the request: what follows what was taken for its end is not sent on.
                raise BadRequest("The request goes on after its end.")

    def _answer_begins(self, routed: Routed, message: ProcessingRequest) -> ProcessingResponse:
        fields = messages.fields_of(message.response_headers)
        by_name = dict(fields)
        self._status = int(by_name.get(":status", "0"))
        if messages.is_gateway_s_own(self._status, by_name):
            self._complete = False
            self._unreachable = messages.OVERLOADED not in by_name
            raise Unavailable("No replica could be reached.", retry_after_s=1.0)
        self._first_byte_s = self._loop.time() - self._arrived
        served = messages.served_by(message)
        if served is not None and plain_authority(served) == plain_authority(self._destination):
            served = None
        routed.answered(self._status, served)
        if self._status == 401:
            # Told as it is, it would have the client look for a fault in its own key.
            log_unknown(routed.endpoint.name)
            self._complete = False
            raise RouterUnknown
        events = by_name.get("content-type", "").startswith("text/event-stream")
        self._reader = AnswerReader(events=events, hide_usage=routed.hide_usage)
        return messages.answer_headers(fields, routed.answer_headers)

    def _answer_goes_on(self, message: ProcessingRequest) -> Iterable[ProcessingResponse]:
        piece, ends = message.response_body.body, message.response_body.end_of_stream
        passed = piece if self._reader is None else self._reader.feed(piece, ends=ends)
        self._bytes_sent += len(passed)
        if passed or ends:
            return messages.response_body(passed, ends=ends)
        return ()

    def _held(self) -> Iterable[ProcessingResponse]:
        """What was held back when trailers, not a last piece, end the body."""
        left = b"" if self._reader is None else self._reader.feed(b"", ends=True)
        return messages.response_body(left, ends=False) if left else ()

    @property
    def _headers(self) -> Fields:
        """Of a refusal."""
        return self._own_headers if self._routed is None else self._routed.answer_headers

    async def _next(self) -> ProcessingRequest:
        message = await anext(self._incoming, None)
        if message is None:
            raise _Left
        return message

    async def _send_all(self, answers: Iterable[ProcessingResponse]) -> None:
        for answer in answers:
            await self._send(answer)

    def _done(self, error: str | None, *, broken: bool) -> None:
        routed, self._routed = self._routed, None
        if routed is None:
            return
        usage = None if self._reader is None else self._reader.usage
        prompt, completion = usage or (None, None)
        routed.done(
            Outcome(
                status=self._status,
                prompt_tokens=prompt,
                completion_tokens=completion,
                error=None if self._complete and not broken else error,
                first_byte_s=self._first_byte_s,
                total_s=self._loop.time() - self._arrived,
                bytes_sent=self._bytes_sent,
                replica_failed=broken,
                unreachable=self._unreachable,
            )
        )


def _request_piece(message: ProcessingRequest) -> HttpBody:
    if not message.HasField("request_body"):
        raise BadRequest("The request's body did not follow its head.")
    return message.request_body


def _ask(facts: RequestFacts) -> Ask:
    headers = {name: value for name, value in facts.fields if name in HEADERS}
    return Ask(
        path=facts.path,
        authorization=facts.values("authorization"),
        headers=headers,
        candidates=facts.candidates,
        method=facts.method,
        query=facts.query,
        request_id=request_id_of(headers),
    )


async def _address(endpoint: Endpoint) -> str:
    """``ip:port``: Envoy connects to addresses, and looks no names up on the way."""
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        pass
    else:
        return endpoint.authority
    try:
        async with asyncio.timeout(LOOKUP_TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(
                endpoint.host, endpoint.port, type=socket.SOCK_STREAM
            )
    except OSError:
        raise Unavailable("The replica's name has no address.") from None
    host = found[0][4][0]
    return f"[{host}]:{endpoint.port}" if ":" in str(host) else f"{host}:{endpoint.port}"
