"""What routing makes of a gateway's word: who really served, and whom it did not reach."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mural_router.fleet.endpoint import Endpoint
from mural_router.routing.ask import Ask
from tests.mural_router.routing.made_up_fleet import Made, MadeUpFleet, done, resident


async def test_a_request_that_a_gateway_sent_elsewhere_is_counted_where_it_is() -> None:
    made = Made(MadeUpFleet(resident("acme:v1"), {}))
    routed = await made.ask("acme:v1")
    assert routed.endpoint.name == "a"
    routed.answered(200, "10.0.0.2:8000")
    ledger = made.dispatch.ledger
    assert (ledger.in_flight("a"), ledger.in_flight("b")) == (0, 1)
    assert dict(routed.answer_headers)["x-mural-replica"] == "b"
    done(routed)
    assert (ledger.in_flight("a"), ledger.in_flight("b")) == (0, 0)
    (line,) = await made.logged()
    assert (line["replica"], line["reason"], line["attempts"]) == ("b", "gateway", 1)
    assert made.metrics.choices == {"resident": 1, "gateway": 1}
    assert made.metrics.replica("b").attempts == 1


async def test_what_another_answers_opens_and_closes_no_breaker_of_the_one_that_was_chosen() -> (
    None
):
    made = Made(MadeUpFleet(resident("acme:v1"), {}))
    for served in ("10.0.0.2:8000", "192.0.2.99:1"):
        for _ in range(made.breakers.settings.failures):
            routed = await made.ask("acme:v1")
            assert routed.endpoint.name == "a"
            routed.answered(500, served)
            done(routed, 500)
    assert made.breakers.states(made.dispatch.now) == {"b": "open"}


async def test_a_replica_that_a_gateway_does_not_reach_is_suspected_and_avoided() -> None:
    fleet = MadeUpFleet(resident("acme:v1"), {})
    made = Made(fleet)
    for _ in range(made.breakers.settings.failures):
        routed = await made.ask("acme:v1")
        assert routed.endpoint.name == "a"
        done(routed, 503, error="unavailable", unreachable=True)
    assert set(fleet.suspected) == {"a"}
    assert made.breakers.states(made.dispatch.now) == {"a": "open"}
    assert made.metrics.replica("a").failures == made.breakers.settings.failures
    assert made.dispatch.ledger.in_flight("a") == 0
    assert (await made.ask("acme:v1")).endpoint.name == "b"


async def test_an_endpoint_that_nobody_knows_is_logged_and_holds_nothing() -> None:
    made = Made(MadeUpFleet(resident("acme:v1")))
    routed = await made.ask("acme:v1")
    routed.answered(200, "192.0.2.99:1")
    assert made.dispatch.ledger.in_flight("a") == 0
    done(routed)
    (line,) = await made.logged()
    assert (line["replica"], line["reason"]) == ("192.0.2.99:1", "gateway")


async def test_what_a_gateway_moves_takes_its_rank_along() -> None:
    held = {name: replace(each, rank=8) for name, each in resident("acme:v1").items()}
    made = Made(MadeUpFleet(held, {}))
    routed = await made.ask("acme:v1")
    ranks = made.dispatch.ledger._ranks
    assert ranks == {"a": 8, "b": 0}
    routed.answered(200, "10.0.0.2:8000")
    assert ranks == {"a": 0, "b": 8}
    done(routed)
    assert ranks == {"a": 0, "b": 0}


async def test_an_upload_that_another_server_took_is_logged_so() -> None:
    made = Made(MadeUpFleet({}, {}))
    routed = await made.routing.forward(Ask("/v1/adapters/acme/default/v9", ("Bearer acme",)))
    routed.answered(201, "192.0.2.99:1")
    done(routed, 201)
    assert dict(routed.answer_headers)["x-mural-replica"] == "192.0.2.99:1"
    (line,) = await made.logged()
    assert line["replica"] == "192.0.2.99:1"


@pytest.mark.parametrize(
    ("host", "said"),
    [
        ("2001:db8::1", "[2001:DB8:0:0:0:0:0:1]:8000"),
        ("2001:DB8:0::1", "[2001:db8::1]:8000"),
        ("10.0.0.9", "[::ffff:10.0.0.9]:8000"),
        ("::ffff:10.0.0.9", "[::ffff:a00:9]:8000"),
    ],
)
async def test_an_address_is_known_however_a_gateway_writes_it(host: str, said: str) -> None:
    fleet = MadeUpFleet(resident("acme:v1"), {})
    fleet.listening["b"] = Endpoint("b", host, 8000)
    made = Made(fleet)
    body = json.dumps({"model": "acme:v1", "prompt": "hello"}).encode()

    only_b = Ask("/v1/completions", ("Bearer acme",), body, candidates=frozenset({said}))
    routed = await made.routing.route(only_b)
    assert routed.endpoint.name == "b"
    done(routed)

    routed = await made.ask("acme:v1")
    assert routed.endpoint.name == "a"
    routed.answered(200, said)
    assert routed.endpoint.name == "b"
    done(routed)


@pytest.mark.parametrize("said", ["[::1", "[]:80", "[::1]", "[x]:80", "::1:80", ""])
async def test_what_is_no_address_is_nobody_s(said: str) -> None:
    made = Made(MadeUpFleet(resident("acme:v1")))
    assert made.dispatch.names_of(frozenset({said})) == frozenset()
