"""The protocol's messages: what is read off Envoy's and how the answers are built.

Names are those of the Gateway API Inference Extension's endpoint picker protocol.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)

from mural_resolvers.errors import MuralError
from mural_router.http.errors import answer_fields, error_json

__all__ = [
    "DESTINATION",
    "OVERLOADED",
    "Fields",
    "RequestFacts",
    "answer_headers",
    "fields_of",
    "is_duplex",
    "is_gateway_s_own",
    "refusal",
    "request_body",
    "request_facts",
    "request_headers",
    "request_trailers",
    "response_body",
    "response_trailers",
    "said",
    "served_by",
]

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET_SPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
METADATA_SPACE: Final = "envoy.lb"
UPSTREAM_TIME: Final = "x-envoy-upstream-service-time"
OVERLOADED: Final = "x-envoy-overloaded"
"""Of Envoy's own answers, with which it says that the cluster's own limits are met."""
SERVED: Final = "x-gateway-destination-endpoint-served"

MAX_CHUNK: Final = 62_000
"""Of a body on its way to Envoy: what gateways take in one message."""

_KEPT: Final = frozenset(
    {
        "accept",
        "content-type",
        "host",
        "user-agent",
        "x-forwarded-for",
        "x-forwarded-proto",
        "x-request-id",
    }
)
"""Of the client's headers; the rest is taken away: keys, cookies, what names a destination or a
tenant, and codings in which the answer's usage could not be read."""

_AUTHORITY = re.compile(r"(?:[0-9.]{7,15}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")

_OVERWRITE: Final = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

Fields = tuple[tuple[str, str], ...]


class RequestFacts(NamedTuple):
    """A request's head as Envoy tells it."""

    method: str
    path: str
    """Without the query."""
    query: str
    fields: Fields
    ends: bool
    """No body follows."""
    candidates: frozenset[str] | None
    """``host:port`` of the endpoints that may be picked; None: all."""
    minor: int = 1
    """How it was framed is Envoy's affair."""

    def values(self, name: str) -> tuple[str, ...]:
        """Every value of a header."""
        return tuple(value for key, value in self.fields if key == name)


def is_duplex(message: ProcessingRequest) -> bool:
    """Whether Envoy streams both bodies both ways, as the first message of a stream tells."""
    config, duplex = message.protocol_config, ProcessingMode.FULL_DUPLEX_STREAMED
    return bool(config.request_body_mode == duplex and config.response_body_mode == duplex)


def fields_of(headers: HttpHeaders) -> Fields:
    """Names (lower-case, as HTTP/2 has them) and values."""
    return tuple(
        (header.key, header.raw_value.decode("latin-1") or header.value)
        for header in headers.headers.headers
    )


def request_facts(message: ProcessingRequest) -> RequestFacts:
    """Read the first message."""
    fields = fields_of(message.request_headers)
    pseudo = {name: value for name, value in fields if name.startswith(":")}
    path, _, query = pseudo.get(":path", "").partition("?")
    return RequestFacts(
        method=pseudo.get(":method", ""),
        path=path,
        query=query,
        fields=fields,
        ends=bool(message.request_headers.end_of_stream),
        candidates=_candidates(message),
    )


def _candidates(message: ProcessingRequest) -> frozenset[str] | None:
    spaces = message.metadata_context.filter_metadata
    if SUBSET_SPACE not in spaces or SUBSET not in spaces[SUBSET_SPACE].fields:
        return None
    hint = spaces[SUBSET_SPACE].fields[SUBSET]
    listed = [each.string_value for each in hint.list_value.values]
    texts = listed or hint.string_value.split(",")
    return frozenset(text.strip() for text in texts if text.strip())


def request_headers(
    facts: RequestFacts, destination: str, added: Fields, length: int | None
) -> ProcessingResponse:
    """Where the request goes and with which headers; ``length`` of its body, None: as it was."""
    length_fields = () if length is None else (("content-length", str(length)),)
    own = ((DESTINATION, destination), *length_fields, *added)
    kept = _KEPT if length is not None else _KEPT | {"content-length"}
    set_here = {name for name, _ in own}
    removed = {
        name
        for name, _ in facts.fields
        if not name.startswith(":") and name not in kept and name not in set_here
    }
    message = ProcessingResponse()
    common = message.request_headers.response
    common.clear_route_cache = True
    _mutate(common.header_mutation, own, removed)
    message.dynamic_metadata.update({METADATA_SPACE: {DESTINATION: destination}})
    return message


def request_body(body: bytes, *, ends: bool) -> Iterator[ProcessingResponse]:
    """The body in pieces that a gateway takes; the last one says whether the stream ends."""
    for piece, last in _pieces(body):
        yield ProcessingResponse(request_body=_streamed(piece, last and ends))


def request_trailers() -> ProcessingResponse:
    """They go on as they are."""
    return ProcessingResponse(request_trailers=TrailersResponse())


def served_by(message: ProcessingRequest) -> str | None:
    """``ip:port`` of the endpoint that gave the answer; None where the gateway does not say it."""
    spaces = message.metadata_context.filter_metadata
    if METADATA_SPACE not in spaces or SERVED not in spaces[METADATA_SPACE].fields:
        return None
    told = spaces[METADATA_SPACE].fields[SERVED].string_value.strip()
    return told if _AUTHORITY.fullmatch(told) else None


def is_gateway_s_own(status: int, by_name: Mapping[str, str]) -> bool:
    """Whether Envoy itself answers, since it got no answer from where it sent the request.

    To what a server answers it adds the time that it took, and where it is told to add nothing,
    the server's own date stands there. Its own answers get their date after this filter.
    """
    return status == 503 and UPSTREAM_TIME not in by_name and "date" not in by_name


def answer_headers(fields: Fields, added: Fields) -> ProcessingResponse:
    """The answer's headers, with what routing says of it and nothing that a replica says of it."""
    set_here = {name for name, _ in added}
    removed = {name for name, _ in fields if name.startswith("x-mural-") and name not in set_here}
    message = ProcessingResponse()
    _mutate(message.response_headers.response.header_mutation, added, removed)
    return message


def response_body(body: bytes, *, ends: bool) -> Iterator[ProcessingResponse]:
    """As `request_body`."""
    for piece, last in _pieces(body):
        yield ProcessingResponse(response_body=_streamed(piece, last and ends))


def response_trailers() -> ProcessingResponse:
    """They go on as they are."""
    return ProcessingResponse(response_trailers=TrailersResponse())


def refusal(error: MuralError, fields: Fields = ()) -> ProcessingResponse:
    """An answer in the replica's stead: the error's status, OpenAI's body, Retry-After."""
    return said(error.status, error_json(error), answer_fields(error) + fields)


def said(status: int, body: bytes, fields: Fields = ()) -> ProcessingResponse:
    """An answer in the replica's stead, of JSON."""
    message = ProcessingResponse()
    answer = message.immediate_response
    answer.status.code = status
    answer.body = body
    _mutate(answer.headers, (("content-type", "application/json"), *fields), ())
    return message


def _mutate(
    mutation: HeaderMutation, fields: Iterable[tuple[str, str]], removed: Iterable[str]
) -> None:
    # Field by field: messages given to constructors cost four times as much.
    for name, value in fields:
        option = mutation.set_headers.add(append_action=_OVERWRITE)
        option.header.key = name
        option.header.raw_value = value.encode("latin-1")
    mutation.remove_headers.extend(sorted(removed))


def _pieces(body: bytes) -> Iterator[tuple[bytes, bool]]:
    count = max(1, math.ceil(len(body) / MAX_CHUNK))
    for i in range(count):
        yield body[i * MAX_CHUNK : (i + 1) * MAX_CHUNK], i == count - 1


def _streamed(piece: bytes, ends: bool) -> BodyResponse:
    streamed = StreamedBodyResponse(body=piece, end_of_stream=ends)
    return BodyResponse(
        response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed))
    )
