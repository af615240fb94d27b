"""What routing makes of a gateway's word: who really served, and whom it did not reach."""

from __future__ import annotations

from made_up_fleet import Made, MadeUpFleet, done, resident

from mural_router.routing.ask import Ask


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
    made = Made(MadeUpFleet(resident("acme:v1"), {}))
    for _ in range(made.breakers.settings.failures):
        routed = await made.ask("acme:v1")
        assert routed.endpoint.name == "a"
        done(routed, 503, error="unavailable", unreachable=True)
    assert set(made.fleet.suspected) == {"a"}
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


async def test_an_upload_that_another_server_took_is_logged_so() -> None:
    made = Made(MadeUpFleet({}, {}))
    routed = await made.routing.forward(Ask("/v1/adapters/acme/default/v9", ("Bearer acme",)))
    routed.answered(201, "192.0.2.99:1")
    done(routed, 201)
    assert dict(routed.answer_headers)["x-mural-replica"] == "192.0.2.99:1"
    (line,) = await made.logged()
    assert line["replica"] == "192.0.2.99:1"
