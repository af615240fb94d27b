"""Routing as a whole, over a fleet that the test makes up."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mural_resolvers.errors import (
    AdapterNotFound,
    Forbidden,
    InvalidInput,
    MalformedName,
    MuralError,
    RateLimited,
    Unauthorized,
    Unavailable,
)
from mural_resolvers.tenants import ADMIN, Principal, TenantLimits
from mural_resolvers.tracing import open_tracing
from mural_router.placement import Base, Residency
from mural_router.routing.ask import Ask, request_id_of
from mural_router.routing.identity import Authenticator
from mural_router.routing.metrics import RouterMetrics
from mural_router.routing.options import RoutingOptions
from mural_router.routing.target import Targets
from mural_router.routing.versions import Versions
from tests.mural_router.routing.made_up_fleet import DIGEST, Keys, Made, MadeUpFleet, done, resident


async def test_a_request_goes_where_its_adapter_is_with_the_routers_word_and_not_the_clients():
    made = Made(MadeUpFleet({}, resident("acme:v3"), {}))
    routed = await made.ask("acme:v3")
    headers, answer = dict(routed.request_headers), dict(routed.answer_headers)
    assert headers["authorization"] == "Bearer the-token"
    assert headers["x-mural-tenant"] == "acme"
    assert headers["x-mural-digest"] == "3" * 64
    assert answer["x-mural-adapter"] == "acme:v3"
    assert answer["x-mural-replica"] == routed.endpoint.name
    assert answer["x-request-id"] == headers["x-request-id"]
    done(routed)


async def test_an_alias_is_rewritten_to_one_exact_version_for_one_session():
    made = Made(MadeUpFleet({}, {}))
    models = set()
    for _ in range(5):
        routed = await made.ask("acme:stable")
        models.add(json.loads(routed.body)["model"])
        done(routed, first_byte_s=0.1)
    assert len(models) == 1
    assert models < {"acme:v3", "acme:v4"}
    line = (await made.logged())[0]
    assert (line["asked"], line["adapter"]) == ("acme:stable", models.pop())


async def test_two_names_of_one_version_are_one_adapter():
    made = Made(MadeUpFleet({}, {}, {}))
    first = await made.ask("acme:v3")
    done(first)
    second = await made.ask("acme/default:v3")
    done(second)
    assert first.endpoint == second.endpoint
    assert json.loads(second.body)["model"] == "acme:v3"


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("globex:v1", Forbidden),
        ("globex", Forbidden),
        ("No Name", MalformedName),
        ("acme:..", MalformedName),
        ("acme/none", AdapterNotFound),
        ("", MalformedName),
        (5, InvalidInput),
    ],
)
async def test_refusals_have_their_error_and_leave_nothing_behind(
    model: str, error: type[MuralError]
):
    made = Made(MadeUpFleet({}, {}), auth=Keys(acme=TenantLimits(concurrency=1)))
    if error is AdapterNotFound:
        made.routing._versions = Versions(None)
    for _ in range(3):
        with pytest.raises(error):
            await made.ask(model)
    assert sum(made.dispatch.ledger.loads.by_name.values()) == 0
    lines = await made.logged()
    assert [line["status"] for line in lines] == [error.status] * 3
    assert made.metrics.refusals.total() == 3


async def test_without_a_key_nothing_else_is_looked_at():
    made = Made(MadeUpFleet({}))
    with pytest.raises(Unauthorized):
        await made.routing.route(Ask("/v1/completions", (), b"no json"))


async def test_a_registered_name_needs_its_grant_or_to_be_shared():
    made = Made(MadeUpFleet({"sql-expert": Residency("slot")}, {}))
    with pytest.raises(Forbidden):
        await made.ask("sql-expert")
    made.routing.options = replace(made.routing.options, shared_names=frozenset({"sql-expert"}))
    routed = await made.ask("sql-expert")
    assert json.loads(routed.body)["model"] == "sql-expert"
    done(routed)


async def test_while_nobody_has_told_what_the_base_is_a_bare_name_is_not_guessed_at():
    fleet = MadeUpFleet({})
    fleet.base = Base()
    with pytest.raises(Unavailable):
        await Made(fleet).ask("tiny")


async def test_a_lost_connection_is_tried_on_another_replica_and_told_to_the_fleet():
    fleet = MadeUpFleet({}, {}, {})
    made = Made(fleet)
    routed = await made.ask("acme:v3")
    first = routed.endpoint.name
    assert routed.retry("connect: refused")
    assert routed.endpoint.name != first
    assert fleet.suspected == [first]
    assert dict(routed.answer_headers)["x-mural-replica"] == routed.endpoint.name
    routed.answered(200)
    done(routed, prompt_tokens=3, completion_tokens=4)
    assert sum(made.dispatch.ledger.loads.by_name.values()) == 0
    (line,) = await made.logged()
    assert (line["attempts"], line["completion_tokens"]) == (2, 4)


async def test_attempts_end_with_the_replicas_or_the_bound():
    made = Made(MadeUpFleet({}, {}, {}, {}, {}))
    routed = await made.ask("acme:v3")
    seen = {routed.endpoint.name}
    while routed.retry("connect: refused"):
        assert routed.endpoint.name not in seen
        seen.add(routed.endpoint.name)
    assert len(seen) == 3
    done(routed, 503, error="no replica could be reached")
    alone = Made(MadeUpFleet({}))
    routed = await alone.ask("acme:v3")
    assert not routed.retry("connect: refused")
    done(routed, 503)
    assert alone.metrics.retries["replicas"] == 1
    assert sum(alone.dispatch.ledger.loads.by_name.values()) == 0


async def test_a_replica_that_keeps_failing_is_left_alone_and_4xx_and_503_never_count():
    made = Made(MadeUpFleet({}, {}))
    home = (await made.ask("acme:v3")).endpoint.name
    for status in (400, 404, 422, 429, 503) * 5:
        routed = await made.ask("acme:v3")
        routed.answered(status)
        done(routed, status)
    assert made.breakers.excluded(0.0) == frozenset()
    for _ in range(2):
        routed = await made.ask("acme:v3")
        assert routed.endpoint.name == home
        routed.answered(500)
        done(routed, 500)
    routed = await made.ask("acme:v3")
    assert routed.endpoint.name != home


async def test_a_cold_load_that_takes_too_long_does_not_count_against_the_replica():
    made = Made(MadeUpFleet({}))
    for _ in range(5):
        routed = await made.ask("acme:v3")
        done(routed, 503, error="no answer in time", replica_failed=True)
    assert made.breakers.states(0.0).get("a", "closed") == "closed"
    warm = Made(MadeUpFleet(resident("acme:v3")))
    for _ in range(2):
        routed = await warm.ask("acme:v3")
        done(routed, 503, error="no answer in time", replica_failed=True)
    assert warm.breakers.states(0.0)["a"] == "open"


async def test_over_its_own_limit_a_tenant_is_told_and_tokens_are_settled_by_real_usage():
    limits = TenantLimits(tokens_per_minute=600)
    made = Made(MadeUpFleet({}, {}), auth=Keys(acme=limits))
    first = await made.ask("acme:v3", max_tokens=500)
    with pytest.raises(RateLimited):
        await made.ask("acme:v3", max_tokens=500)
    first.answered(200)
    done(first, prompt_tokens=2, completion_tokens=8)
    done(await made.ask("acme:v3", max_tokens=500))
    with pytest.raises(RateLimited):
        await made.ask("acme:v3", max_tokens=500)
    done(await made.ask("globex:v3", "globex", max_tokens=500))


async def test_a_full_fleet_makes_requests_wait_and_those_that_wait_too_long_are_told_503():
    made = Made(MadeUpFleet({}))
    held = [await made.ask("acme:v3") for _ in range(6)]
    with pytest.raises(Unavailable) as refused:
        await made.ask("acme:v3")
    assert refused.value.retry_after_s is not None
    made.routing.options = replace(made.routing.options, queue_wait_s=60.0)
    waiting = asyncio.create_task(made.ask("globex:v3", "globex"))
    while made.queue.snapshot().waiting == 0:  # noqa: ASYNC110 - the queue has no event for it
        await asyncio.sleep(0)
    done(held.pop())
    routed = await waiting
    done(routed)
    for other in held:
        done(other)
    assert sum(made.dispatch.ledger.loads.by_name.values()) == 0
    lines = await made.logged()
    assert [line["status"] for line in lines if line["status"] != 200] == [503]
    assert any("queued_s" in line for line in lines)


async def test_a_client_that_leaves_the_queue_leaves_nothing_behind():
    made = Made(MadeUpFleet({}), auth=Keys(globex=TenantLimits(concurrency=1)), wait_s=60)
    held = [await made.ask("acme:v3") for _ in range(6)]
    waiting = asyncio.create_task(made.ask("globex:v3", "globex"))
    while made.queue.snapshot().waiting == 0:  # noqa: ASYNC110 - the queue has no event for it
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert made.queue.snapshot().waiting == 0
    for routed in held:
        done(routed)
    done(await made.ask("globex:v3", "globex"))
    assert (await made.logged())[0]["status"] == 0


async def test_with_nobody_ready_a_client_is_told_soon():
    fleet = MadeUpFleet({})
    fleet.set(replace(fleet.fleet.replicas[0], ready=False))
    made = Made(fleet)
    with pytest.raises(Unavailable, match="No replica is ready"):
        await made.ask("acme:v3")


async def test_a_gateways_subset_limits_the_choice_and_an_unknown_one_is_503():
    made = Made(MadeUpFleet({}, {}, {}))
    body = b'{"model":"acme:v3","prompt":"x"}'
    for address, name in (("10.0.0.1:8000", "a"), ("10.0.0.3:8000", "c")):
        ask = Ask("/v1/completions", ("Bearer acme",), body, candidates=frozenset({address}))
        routed = await made.routing.route(ask)
        assert routed.endpoint.name == name
        assert not routed.retry("connect: refused")
        done(routed)
    with pytest.raises(Unavailable):
        await made.routing.route(
            Ask("/v1/completions", ("Bearer acme",), body, candidates=frozenset({"1.1.1.1:1"}))
        )


async def test_tokenising_is_not_counted_as_generation():
    made = Made(MadeUpFleet({}), auth=Keys(acme=TenantLimits(tokens_per_minute=10)))
    for _ in range(30):
        routed = await made.routing.route(
            Ask("/tokenize", ("Bearer acme",), b'{"model":"tiny","prompt":"x"}')
        )
        done(routed)


async def test_what_is_sent_to_vllm_is_the_exact_name_and_the_pods_own_key():
    made = Made(MadeUpFleet({}, engine="vllm"))
    made.routing.options = RoutingOptions(vllm_api_key="pod", router_token="the-token")
    routed = await made.ask("acme:stable")
    assert dict(routed.request_headers)["authorization"] == "Bearer pod"
    assert "x-mural-tenant" not in dict(routed.request_headers)
    assert json.loads(routed.body)["model"] in ("acme:v3", "acme:v4")
    assert routed.may_retry(503, None)
    done(routed)


async def test_uploads_of_one_tenant_go_to_one_server_with_its_identity():
    made = Made(MadeUpFleet({}, {}, {}))
    ask = Ask("/v1/adapters/acme:v9", ("Bearer acme",))
    homes = set()
    for _ in range(3):
        forwarded = await made.routing.forward(ask)
        homes.add(forwarded.endpoint.name)
        assert dict(forwarded.request_headers)["x-mural-tenant"] == "acme"
        done(forwarded, 201)
    assert len(homes) == 1
    assert forwarded.retry("connect: refused")
    assert forwarded.endpoint.name not in homes
    with pytest.raises(Unavailable):
        await Made(MadeUpFleet({}, engine="vllm")).routing.forward(ask)


async def test_models_are_filtered_and_one_is_found_under_its_alias():
    made = Made(MadeUpFleet(resident("acme:v3"), resident("globex:v1", "acme:v1")))
    listed = json.loads(await made.routing.models(Ask("/v1/models", ("Bearer acme",))))
    assert [card["id"] for card in listed["data"]] == ["tiny", "acme:v1", "acme:v3"]
    assert listed["data"][1]["parent"] == "tiny"
    ask = Ask("/v1/models/x", ("Bearer acme",))
    assert json.loads(await made.routing.model(ask, "acme:v3"))["digest"] == DIGEST
    assert json.loads(await made.routing.model(ask, "tiny"))["id"] == "tiny"
    # In the store, though nobody holds it and its digest is not known.
    assert json.loads(await made.routing.model(ask, "acme:v4"))["digest"] is None
    with pytest.raises(Forbidden):
        await made.routing.model(ask, "globex:v1")
    with pytest.raises(AdapterNotFound):
        await made.routing.model(ask, "acme:v77")


async def test_names_that_somebody_makes_up_take_no_labels():
    made = Made(MadeUpFleet({}, {}))
    for at in range(300):
        routed = await made.ask(f"acme:made-up-{at}")
        routed.answered(404)
        done(routed, 404)
    assert [name for name, _ in made.metrics.adapters()] == ["other"]
    routed = await made.ask("acme:v3")
    done(routed, first_byte_s=0.1, prompt_tokens=2, completion_tokens=3)
    assert [name for name, _ in made.metrics.adapters()] == ["acme:v3", "other"]
    text = made.metrics.exposition().decode()
    assert 'mural_router_adapter_requests_total{adapter="other",outcome="client_error"} 300' in text


def test_the_express_way_is_counted_before_it_was_used():
    text = RouterMetrics().exposition().decode()
    for outcome in ("whole", "unfolded", "refused"):
        assert f'mural_router_express_total{{outcome="{outcome}"}} 0.0' in text


async def test_two_routers_that_see_one_fleet_choose_alike():
    fleet = MadeUpFleet({}, {}, {}, {})
    one, two = Made(fleet), Made(fleet)
    for at in range(50):
        first, second = await one.ask(f"acme:v{at}"), await two.ask(f"acme:v{at}")
        assert first.endpoint == second.endpoint
        done(first)
        done(second)


async def test_a_trace_shows_the_attempts_and_goes_on_in_the_replica():
    exporter = InMemorySpanExporter()
    tracing = open_tracing("http://unused", "mural-router", exporter=lambda: exporter)
    made = Made(MadeUpFleet({}, {}), tracing=tracing)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    body = b'{"model":"acme:v3","prompt":"a secret prompt"}'
    ask = Ask("/v1/completions", ("Bearer acme",), body, headers={"traceparent": parent})
    routed = await made.routing.route(ask)
    assert routed.retry("connect: refused")
    onward = dict(routed.request_headers)["traceparent"]
    done(routed, prompt_tokens=3)
    with pytest.raises(Forbidden):
        await made.ask("globex:v1")
    tracing.close()
    answered, refused = exporter.get_finished_spans()
    assert f"{answered.context.trace_id:032x}" == parent.split("-")[1]
    assert onward.split("-")[2] == f"{answered.context.span_id:016x}"
    assert answered.attributes is not None
    assert refused.attributes is not None
    assert answered.attributes["mural.adapter"] == "acme:v3"
    assert answered.attributes["mural.attempts"] == 2
    assert [event.name for event in answered.events] == ["attempt failed: connect: refused"]
    assert refused.attributes["http.response.status_code"] == 403
    assert "secret" not in answered.to_json()


async def test_without_tracing_a_clients_traceparent_is_passed_on():
    made = Made(MadeUpFleet({}))
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    body = b'{"model":"acme:v3","prompt":"x"}'
    routed = await made.routing.route(
        Ask("/v1/completions", ("Bearer acme",), body, headers=headers)
    )
    assert dict(routed.request_headers)["traceparent"] == headers["traceparent"]
    done(routed)


async def test_a_request_id_of_the_client_is_kept_where_it_is_one():
    made = Made(MadeUpFleet({}))
    for sent, kept in (("abc-1", True), ("a b", False), ("x" * 129, False), ("é", False)):
        body = b'{"model":"acme:v3","prompt":"x"}'
        known = request_id_of({"x-request-id": sent})
        assert (known == sent) is kept
        ask = Ask("/v1/completions", ("Bearer acme",), body, request_id=known)
        routed = await made.routing.route(ask)
        assert dict(routed.answer_headers)["x-request-id"] == known
        done(routed)
        with pytest.raises(Unauthorized):
            await made.routing.route(Ask("/v1/completions", (), body, request_id=known))
        assert ask.own_headers == (("x-request-id", known),)
    lines = await made.logged()
    assert [line["request_id"] for line in lines[0::2]] == [
        line["request_id"] for line in lines[1::2]
    ]
    assert len({line["request_id"] for line in lines}) == 4


class Admins(Authenticator):
    def __init__(self) -> None:
        super().__init__("keys")

    def principal(self, authorization: tuple[str, ...]) -> Principal:
        return Principal(tenant=None, rights=frozenset({ADMIN}))


@pytest.mark.parametrize(
    ("method", "path", "query", "tenant"),
    [
        ("POST", "/v1/adapters/acme:v3", "", "acme"),
        ("POST", "/v1/adapters/acme%3Av3", "", "acme"),
        ("GET", "/v1/adapters/acme/sql:v3/manifest", "tenant=globex", "acme"),
        ("PUT", "/v1/adapters/acme/sql/aliases/stable", "", "acme"),
        ("GET", "/v1/adapters", "tenant=acme", "acme"),
        ("GET", "/v1/adapters", "", None),
        ("GET", "/v1/adapters", "tenant=acme&tenant=globex", None),
        ("GET", "/v1/adapters", "tenant=No%20Name", None),
        ("GET", "/v1/adapters/", "tenant=..", None),
    ],
)
async def test_an_admin_acts_for_the_tenant_that_the_request_names(
    method: str, path: str, query: str, tenant: str | None
):
    made = Made(MadeUpFleet({}, {}), auth=Admins())
    ask = Ask(path, ("Bearer x",), method=method, query=query)
    if tenant is None:
        with pytest.raises(InvalidInput):
            await made.routing.forward(ask)
        return
    forwarded = await made.routing.forward(ask)
    assert dict(forwarded.request_headers)["x-mural-tenant"] == tenant
    done(forwarded, 201)
    own = await Made(made.fleet).routing.forward(Ask(path, ("Bearer acme",), method=method))
    assert own.endpoint == forwarded.endpoint, "who counts its uploads"
    done(own, 201)


async def test_a_tenant_acts_for_itself_whatever_it_names():
    made = Made(MadeUpFleet({}))
    ask = Ask("/v1/adapters/globex:v1", ("Bearer acme",), query="tenant=globex")
    forwarded = await made.routing.forward(ask)
    assert dict(forwarded.request_headers)["x-mural-tenant"] == "acme"
    done(forwarded, 403)


async def test_a_request_that_waits_for_nothing_is_routed_without_a_turn_of_the_loop():
    made = Made(MadeUpFleet({}, {}))
    body = json.dumps({"model": "acme:v3", "prompt": "hello"}).encode()
    ask = Ask("/v1/completions", ("Bearer acme",), body)
    made.routing._targets = Targets(Versions(None))
    routed = made.routing.route_now(ask)
    assert not callable(routed)
    done(routed)
    assert sum(made.dispatch.ledger.loads.by_name.values()) == 0


async def test_a_request_over_its_limit_takes_no_seat_and_counts_as_no_choice():
    made = Made(MadeUpFleet({}, {}), auth=Keys(acme=TenantLimits(concurrency=1)))
    made.routing._targets = Targets(Versions(None))
    first = await made.ask("acme:v3")
    with pytest.raises(RateLimited):
        await made.ask("acme:v3")
    assert made.metrics.choices.total() == 1
    assert sum(made.dispatch.ledger.loads.by_name.values()) == 1
    done(first)
    done(await made.ask("acme:v3"))
    assert sum(made.dispatch.ledger.loads.by_name.values()) == 0


async def test_a_request_that_has_to_wait_and_never_does_holds_nothing():
    made = Made(MadeUpFleet({}), auth=Keys(acme=TenantLimits(concurrency=100)))
    made.routing._targets = Targets(Versions(None))
    running = [await made.ask("acme:v3") for _ in range(6)]
    body = json.dumps({"model": "acme:v3", "prompt": "hello"}).encode()
    later = made.routing.route_now(Ask("/v1/completions", ("Bearer acme",), body))
    assert callable(later)
    assert sum(made.dispatch.ledger.loads.by_name.values()) == 6
    assert made.limiter.snapshot().tenants[0].sequences == 6
    for each in running:
        done(each)
    assert made.limiter.snapshot().tenants[0].sequences == 0


async def test_on_vllm_each_tenants_prefix_blocks_are_its_own_and_a_clients_salt_only_narrows():
    async def salt(made: Made, tenant: str, model: str = "tiny", **more: object) -> object:
        routed = await made.ask(model, tenant=tenant, **more)
        done(routed)
        return json.loads(routed.body).get("cache_salt")

    one, two = Made(MadeUpFleet({}, engine="vllm")), Made(MadeUpFleet({}, engine="vllm"))
    acme = await salt(one, "acme")
    assert isinstance(acme, str)
    assert len(acme) >= 32
    # Routers with one token share what the pods have cached.
    assert acme == await salt(two, "acme") == await salt(one, "acme", stream=True)
    assert await salt(one, "globex") not in (acme, None)
    narrowed = await salt(one, "acme", cache_salt="mine")
    assert narrowed not in (acme, "mine")
    assert await salt(one, "globex", cache_salt=acme) not in (acme, await salt(one, "globex"))
    # A Mural server salts by the tenant that it is told.
    assert await salt(Made(MadeUpFleet({})), "acme") is None
