"""What the picker answers to each message of the protocol, spoken by a real gRPC client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
import msgspec
import pytest
from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    HttpTrailers,
    ProcessingRequest,
    ProcessingResponse,
    ProtocolConfiguration,
)
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
from google.protobuf.json_format import MessageToDict
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from mural_resolvers.errors import RateLimited, Unavailable
from mural_router.fleet.endpoint import Endpoint
from mural_router.picker import Picker, PickerSettings, start_picker

BOUND_S = 20.0
DESTINATION = "x-gateway-destination-endpoint"
DUPLEX = ProcessingMode.FULL_DUPLEX_STREAMED
BODY = b'{"model":"acme:stable","prompt":"hello","stream":true}'


def header_map(fields: dict[str, str]) -> HeaderMap:
    return HeaderMap(headers=[HeaderValue(key=k, raw_value=v.encode()) for k, v in fields.items()])


def head(
    path: str = "/v1/completions",
    *,
    method: str = "POST",
    ends: bool = False,
    mode: int = DUPLEX,
    subset: object = None,
    **fields: str,
) -> ProcessingRequest:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    message = ProcessingRequest(
        request_headers=HttpHeaders(
            headers=header_map({":method": method, ":path": path, **named}), end_of_stream=ends
        ),
        protocol_config=ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
    )
    if subset is not None:
        space = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        space.update({"x-gateway-destination-endpoint-subset": subset})
    return message


def body(piece: bytes, *, ends: bool = False) -> ProcessingRequest:
    return ProcessingRequest(request_body=HttpBody(body=piece, end_of_stream=ends))


def answer_head(
    status: int = 200, *, ends: bool = False, served: str | None = None, **fields: str
) -> ProcessingRequest:
    named = {name.replace("_", "-"): value for name, value in fields.items()}
    message = ProcessingRequest(
        response_headers=HttpHeaders(
            headers=header_map({":status": str(status), **named}), end_of_stream=ends
        )
    )
    if served is not None:
        message.metadata_context.filter_metadata["envoy.lb"].update(
            {f"{DESTINATION}-served": served}
        )
    return message


def answer_body(piece: bytes, *, ends: bool = False) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=piece, end_of_stream=ends))


class Client:
    """One stream of Envoy's."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = ExternalProcessorStub(channel).Process()

    async def send(self, *messages: ProcessingRequest) -> None:
        for message in messages:
            await self._call.write(message)

    async def receive(self) -> ProcessingResponse:
        async with asyncio.timeout(BOUND_S):
            received = await self._call.read()
        assert received is not grpc.aio.EOF
        return received

    async def ended(self) -> None:
        async with asyncio.timeout(BOUND_S):
            assert await self._call.read() is grpc.aio.EOF

    async def receive_body(self) -> bytes:
        pieces, ends = [], False
        while not ends:
            streamed = (await self.receive()).request_body.response.body_mutation.streamed_response
            assert len(streamed.body) <= 62_000
            pieces.append(streamed.body)
            ends = streamed.end_of_stream
        return b"".join(pieces)

    async def routed(self) -> None:
        """A request up to its sending."""
        await self.send(head(), body(BODY, ends=True))
        await self.receive()
        await self.receive_body()

    def cancel(self) -> None:
        self._call.cancel()

    async def code(self) -> grpc.StatusCode:
        async with asyncio.timeout(BOUND_S):
            return await self._call.code()


@pytest.fixture
async def channel(picker: Picker) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{picker.port}") as opened:
        yield opened


@pytest.fixture
def client(channel: grpc.aio.Channel) -> Client:
    return Client(channel)


def set_fields(options: Iterable[HeaderValueOption]) -> dict[str, str]:
    for option in options:
        assert option.append_action == HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return {option.header.key: option.header.raw_value.decode() for option in options}


async def test_the_body_is_read_to_its_end_before_a_replica_is_picked(
    client: Client, routing
) -> None:
    await client.send(head(content_length=str(len(BODY))), body(BODY[:9]), body(BODY[9:20]))
    await client.send(body(BODY[20:], ends=True))
    picked = await client.receive()
    common = picked.request_headers.response
    rewritten = BODY.replace(b"acme:stable", b"acme/default:v3")
    assert routing.asks[0].body == BODY
    assert common.clear_route_cache
    assert set_fields(common.header_mutation.set_headers) == {
        DESTINATION: "192.0.2.7:8000",
        "content-length": str(len(rewritten)),
        "x-mural-tenant": "acme",
        "authorization": "Bearer router",
    }
    assert MessageToDict(picked.dynamic_metadata) == {"envoy.lb": {DESTINATION: "192.0.2.7:8000"}}
    assert await client.receive_body() == rewritten


async def test_what_a_client_says_of_itself_is_taken_away(client: Client, routing) -> None:
    await client.send(
        head(
            authorization="Bearer mural_client_secret",
            cookie="session=1",
            content_type="application/json",
            accept_encoding="gzip",
            x_mural_tenant="globex",
            x_mural_weight="100",
            x_request_id="mine",
            x_gateway_destination_endpoint="192.0.2.66:1",
        ),
        body(BODY, ends=True),
    )
    mutation = (await client.receive()).request_headers.response.header_mutation
    assert set(mutation.remove_headers) == {"cookie", "accept-encoding", "x-mural-weight"}
    fields = set_fields(mutation.set_headers)
    assert fields["x-mural-tenant"] == "acme"
    assert fields["authorization"] == "Bearer router"
    assert fields[DESTINATION] == "192.0.2.7:8000"
    ask = routing.asks[0]
    assert ask.authorization == ("Bearer mural_client_secret",)
    assert dict(ask.headers) == {"x-request-id": "mine"}


async def test_a_large_body_goes_back_in_pieces_that_gateways_take(client: Client) -> None:
    large = b'{"model":"acme:stable","prompt":"' + b"x" * 3_000_000 + b'"}'
    sent = asyncio.create_task(
        client.send(
            head(),
            *(body(large[i : i + 65_536]) for i in range(0, len(large), 65_536)),
            body(b"", ends=True),
        )
    )
    await client.receive()
    assert await client.receive_body() == large.replace(b"acme:stable", b"acme/default:v3")
    await sent


async def test_trailers_end_a_body_and_go_on(client: Client) -> None:
    await client.send(head(), body(BODY), ProcessingRequest(request_trailers=HttpTrailers()))
    await client.receive()
    streamed = (await client.receive()).request_body.response.body_mutation.streamed_response
    assert not streamed.end_of_stream
    assert (await client.receive()).HasField("request_trailers")


async def test_a_body_over_the_limit_is_refused_while_it_comes(client: Client, routing) -> None:
    pieces = [body(b"x" * (1 << 20)) for _ in range(9)]
    async with asyncio.TaskGroup() as tasks:
        sending = tasks.create_task(client.send(head(), *pieces))
        answer = (await client.receive()).immediate_response
        sending.cancel()
    assert answer.status.code == 413
    assert msgspec.json.decode(answer.body)["error"]["code"] == "too_large"
    assert not routing.asks
    await client.ended()


@pytest.mark.parametrize(
    ("error", "status"),
    [(RateLimited("too many", retry_after_s=2.5), 429), (Unavailable("full"), 503)],
)
async def test_what_routing_refuses_is_answered_with_its_status_and_when_to_come_back(
    client: Client, routing, error: Exception, status: int
) -> None:
    routing.error = error
    await client.send(head(x_request_id="mine"), body(BODY, ends=True))
    answer = (await client.receive()).immediate_response
    fields = set_fields(answer.headers.set_headers)
    assert answer.status.code == status
    assert fields["x-request-id"] == routing.asks[0].request_id == "mine"
    assert fields["retry-after"] in ("1", "3")
    assert fields["content-type"] == "application/json"
    assert msgspec.json.decode(answer.body)["error"]["code"] in (
        "rate_limit_exceeded",
        "unavailable",
    )
    await client.ended()


async def test_a_request_that_ends_with_its_headers_is_picked_at_once(
    client: Client, routing
) -> None:
    await client.send(head(ends=True))
    assert (await client.receive()).HasField("request_headers")
    # A piece of a body that is none would be a fault to Envoy: what comes next is the answer's.
    await client.send(answer_head(ends=True))
    assert (await client.receive()).HasField("response_headers")
    assert routing.asks[0].body == b""


async def test_models_are_the_router_s_to_tell(client: Client, routing) -> None:
    await client.send(head("/v1/models?limit=3", method="GET", ends=True, authorization="k"))
    answer = (await client.receive()).immediate_response
    assert (answer.status.code, answer.body) == (200, b'{"object":"list","data":[]}')
    assert routing.asks[0].authorization == ("k",)
    await client.ended()


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/metrics", "GET", 404),
        ("/v1/load_lora_adapter", "POST", 404),
        ("/mural/v1/state", "GET", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/adapters/../metrics", "GET", 404),
    ],
)
async def test_what_is_no_tenant_s_affair_does_not_reach_a_replica(
    client: Client, routing, path: str, method: str, status: int
) -> None:
    await client.send(head(path, method=method, ends=True))
    assert (await client.receive()).immediate_response.status.code == status
    assert not routing.asks


async def test_uploads_pass_as_they_come(client: Client) -> None:
    await client.send(head("/v1/adapters/acme/support/v4", method="PUT", content_length="6"))
    mutation = (await client.receive()).request_headers.response.header_mutation
    assert "content-length" not in mutation.remove_headers
    for piece, ends in ((b"abc", False), (b"def", True)):
        await client.send(body(piece, ends=ends))
        streamed = (await client.receive()).request_body.response.body_mutation
        assert streamed.streamed_response.body == piece
        assert streamed.streamed_response.end_of_stream == ends


@pytest.mark.parametrize(
    "subset", ["192.0.2.7:8000, 192.0.2.8:8000", ["192.0.2.7:8000", "192.0.2.8:8000"]]
)
async def test_a_subset_hint_limits_the_candidates(client: Client, routing, subset) -> None:
    await client.send(head(subset=subset), body(BODY, ends=True))
    await client.receive()
    assert routing.asks[0].candidates == {"192.0.2.7:8000", "192.0.2.8:8000"}


async def test_without_a_hint_all_are_candidates_and_with_an_empty_one_none(
    channel: grpc.aio.Channel, routing
) -> None:
    for subset in (None, ""):
        client = Client(channel)
        await client.send(head(subset=subset), body(BODY, ends=True))
        await client.receive()
    assert [ask.candidates for ask in routing.asks] == [None, frozenset()]


async def test_an_answer_is_followed_to_its_end_and_its_tokens_are_told(
    client: Client, routing
) -> None:
    await client.routed()
    await client.send(
        answer_head(content_type="application/json", x_mural_secret="1", x_mural_replica="lie")
    )
    mutation = (await client.receive()).response_headers.response.header_mutation
    assert set_fields(mutation.set_headers) == {
        "x-mural-replica": "mural-0",
        "x-request-id": "r-1",
    }
    assert set(mutation.remove_headers) == {"x-mural-secret"}
    text = b'{"choices":[],"usage":{"prompt_tokens":11,"completion_tokens":7}}'
    for piece, ends in ((text[:40], False), (text[40:], True)):
        await client.send(answer_body(piece, ends=ends))
        streamed = (await client.receive()).response_body.response.body_mutation
        assert streamed.streamed_response.body == piece
        assert streamed.streamed_response.end_of_stream == ends
    outcome = await routing.outcome()
    assert (outcome.status, outcome.error) == (200, None)
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (11, 7)
    assert outcome.bytes_sent == len(text)
    assert routing.statuses == [200]
    await client.ended()


@pytest.mark.parametrize(
    ("served", "told"),
    [
        (None, []),
        ("", []),
        ("192.0.2.8:8000\r\nx-mural-tenant: \u20ac", []),
        ("192.0.2.7:8000", []),
        ("[::ffff:192.0.2.7]:8000", []),
        ("192.0.2.8:8000", ["192.0.2.8:8000"]),
        ("[2001:db8::8]:8000", ["[2001:db8::8]:8000"]),
    ],
)
async def test_who_really_served_is_taken_from_the_gateway(
    client: Client, routing, served: str | None, told: list[str]
) -> None:
    await client.routed()
    await client.send(answer_head(ends=True, served=served))
    mutation = (await client.receive()).response_headers.response.header_mutation
    assert set_fields(mutation.set_headers)["x-mural-replica"] == (told[0] if told else "mural-0")
    await routing.outcome()
    assert (routing.statuses, routing.served) == ([200], told)


@pytest.mark.parametrize("prefix", ["x-gateway-", "x-llm-d-"])
async def test_what_decides_fairness_and_the_model_elsewhere_is_no_client_s_to_say_here(
    client: Client, routing, prefix: str
) -> None:
    said = {
        f"{prefix}inference-fairness-id": "globex",
        f"{prefix}inference-objective": "critical",
        f"{prefix}model-name-rewrite": "globex:v1",
        f"{DESTINATION}-served": "192.0.2.66:1",
        f"{DESTINATION}-subset": "192.0.2.66:1",
    }
    message = head()
    message.request_headers.headers.headers.extend(header_map(said).headers)
    message.metadata_context.filter_metadata["envoy.lb"].update(said)
    await client.send(message, body(BODY, ends=True))
    picked = await client.receive()
    mutation = picked.request_headers.response.header_mutation
    assert set(mutation.remove_headers) == said.keys()
    assert not said.keys() & set_fields(mutation.set_headers).keys()
    assert MessageToDict(picked.dynamic_metadata) == {"envoy.lb": {DESTINATION: "192.0.2.7:8000"}}
    assert await client.receive_body() == BODY.replace(b"acme:stable", b"acme/default:v3")
    ask = routing.asks[0]
    assert (dict(ask.headers), ask.candidates, ask.body) == ({}, None, BODY)


async def test_usage_that_the_router_asked_for_is_not_passed_on(client: Client, routing) -> None:
    routing.hide_usage = True
    await client.routed()
    await client.send(answer_head(content_type="text/event-stream; charset=utf-8"))
    await client.receive()
    events = (
        b'data: {"choices":[{"text":"a"}]}\n\n',
        b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\n',
        b"data: [DONE]\n\n",
    )
    stream = b"".join(events)
    await client.send(answer_body(stream[:50]), answer_body(stream[50:], ends=True))
    passed, ends = b"", False
    while not ends:
        streamed = (await client.receive()).response_body.response.body_mutation.streamed_response
        passed += streamed.body
        ends = streamed.end_of_stream
    assert passed == events[0] + events[2]
    outcome = await routing.outcome()
    assert (outcome.prompt_tokens, outcome.completion_tokens) == (3, 1)


@pytest.mark.parametrize("ends", [True, False])
async def test_a_replica_that_does_not_know_the_router_is_no_fault_of_the_client_s_key(
    client: Client, routing, caplog, ends: bool
) -> None:
    await client.routed()
    await client.send(answer_head(401, ends=ends))
    answer = (await client.receive()).immediate_response
    assert answer.status.code == 502
    assert b"does not accept this router" in answer.body
    assert set_fields(answer.headers.set_headers)["x-request-id"] == "r-1"
    outcome = await routing.outcome()
    assert (outcome.status, outcome.error, outcome.replica_failed) == (502, "replica_failed", False)
    assert routing.statuses == [401]
    assert "mural-0 answers 401" in caplog.text


@pytest.mark.parametrize(
    ("fields", "unreachable"),
    [({}, True), ({"x-envoy-overloaded": "true"}, False)],
)
@pytest.mark.parametrize("ends", [True, False])
async def test_a_replica_that_envoy_could_not_reach_is_told_so_and_the_client_in_our_words(
    client: Client, routing, fields: dict[str, str], unreachable: bool, ends: bool
) -> None:
    await client.routed()
    await client.send(answer_head(503, ends=ends, content_type="text/plain", **fields))
    answer = (await client.receive()).immediate_response
    assert answer.status.code == 503
    assert msgspec.json.decode(answer.body)["error"]["code"] == "unavailable"
    told = set_fields(answer.headers.set_headers)
    assert (told["retry-after"], told["x-mural-replica"]) == ("1", "mural-0")
    outcome = await routing.outcome()
    assert (outcome.status, outcome.error, outcome.first_byte_s) == (503, "unavailable", None)
    assert (outcome.unreachable, outcome.replica_failed) == (unreachable, False)
    assert routing.statuses == []


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (503, {"x-envoy-upstream-service-time": "3"}),
        (503, {"date": "Mon, 30 Nov 2026 12:00:00 GMT"}),
        (404, {}),
        (429, {}),
    ],
)
async def test_what_a_replica_answers_is_passed_on_as_it_is(
    client: Client, routing, status: int, fields: dict[str, str]
) -> None:
    await client.routed()
    await client.send(answer_head(status, ends=True, **fields))
    assert (await client.receive()).HasField("response_headers")
    outcome = await routing.outcome()
    assert (outcome.status, outcome.error, outcome.unreachable) == (status, None, False)
    assert routing.statuses == [status]


async def test_an_answer_without_a_body_ends_with_its_headers(client: Client, routing) -> None:
    await client.routed()
    await client.send(answer_head(204, ends=True))
    await client.receive()
    assert (await routing.outcome()).status == 204
    await client.ended()


async def test_a_client_that_leaves_is_settled(client: Client, routing) -> None:
    await client.routed()
    await client.send(answer_head())
    await client.receive()
    client.cancel()
    outcome = await routing.outcome()
    assert outcome.status == 200
    assert outcome.error is not None


async def test_a_client_that_leaves_while_it_waits_ends_the_wait(client: Client, routing) -> None:
    routing.gate = asyncio.Event()
    await client.send(head(), body(BODY, ends=True))
    async with asyncio.timeout(BOUND_S):
        await routing.was_asked.wait()
    client.cancel()
    assert await client.code() == grpc.StatusCode.CANCELLED
    assert routing.outcomes.empty()


async def test_a_filter_that_does_not_stream_both_ways_is_told_so(client: Client) -> None:
    await client.send(head(mode=ProcessingMode.BUFFERED))
    assert await client.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_replica_s_name_is_looked_up_for_envoy(client: Client, routing) -> None:
    routing.endpoints = [Endpoint("local", "localhost", 8000)]
    await client.send(head(), body(BODY, ends=True))
    fields = set_fields(
        (await client.receive()).request_headers.response.header_mutation.set_headers
    )
    assert fields[DESTINATION] in ("127.0.0.1:8000", "[::1]:8000")


async def test_a_replica_whose_name_has_no_address_is_503_and_settled(
    client: Client, routing
) -> None:
    routing.endpoints = [Endpoint("gone", "gone.invalid", 8000)]
    await client.send(head(), body(BODY, ends=True))
    assert (await client.receive()).immediate_response.status.code == 503
    assert (await routing.outcome()).error == "unavailable"


@pytest.mark.parametrize(
    ("service", "serving", "serving_without_replicas"),
    [
        ("liveness", 1, 1),
        ("readiness", 1, 2),
        ("", 1, 2),
        ("envoy.service.ext_proc.v3.ExternalProcessor", 1, 2),
    ],
)
async def test_health_is_told_by_service(
    channel: grpc.aio.Channel,
    readiness,
    service: str,
    serving: int,
    serving_without_replicas: int,
) -> None:
    stub, request = HealthStub(channel), HealthCheckRequest(service=service)
    assert (await stub.Check(request, timeout=BOUND_S)).status == serving
    readiness.why_not = "No replica is ready."
    assert (await stub.Check(request, timeout=BOUND_S)).status == serving_without_replicas


async def test_an_unknown_service_has_no_health(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await HealthStub(channel).Check(HealthCheckRequest(service="x"), timeout=BOUND_S)
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND


async def test_a_port_that_is_taken_is_an_error(picker: Picker, routing, readiness) -> None:
    with pytest.raises(OSError):
        await start_picker(PickerSettings("127.0.0.1", picker.port), routing, not_ready=readiness)


async def test_requests_in_flight_end_within_the_grace(
    picker: Picker, client: Client, routing
) -> None:
    await client.routed()
    draining = asyncio.create_task(picker.drain(BOUND_S))
    await client.send(answer_head(ends=True))
    await client.receive()
    await client.ended()
    async with asyncio.timeout(BOUND_S):
        await draining
    assert (await routing.outcome()).error is None
