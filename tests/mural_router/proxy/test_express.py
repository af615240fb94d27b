"""What the express way holds, counts and says by itself."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from mural_resolvers.errors import Unavailable
from mural_resolvers.tenants import TenantLimits
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.scan import plain_request
from mural_router.http.settings import HttpSettings
from mural_router.proxy import express
from mural_router.proxy.express import _Express
from mural_router.proxy.relay import InferenceRelay
from mural_router.routing.dispatch import Attempt
from tests.mural_router.proxy.express_stage import (
    ADMIN,
    Here,
    Setting,
    answers_after,
    request,
    whole,
)
from tests.mural_router.proxy.scripted_answers import ANSWER, EVENTS, HEAD
from tests.mural_router.proxy.scripted_replica import Received, lose, says, silence

pytestmark = pytest.mark.skipif(plain_request is None, reason="nothing native is built")


@pytest.fixture
async def here(authorities: str) -> AsyncIterator[Here]:
    here = Here(Setting(limits=TenantLimits(requests_per_minute=5)), authorities, express=True)
    await here.begin()
    yield here
    await here.close()


async def test_nothing_of_a_request_stays_until_the_collector_comes(here: Here) -> None:
    kinds = (_Express, Attempt, InferenceRelay)

    def left() -> list[object]:
        return [each for each in gc.get_objects() if isinstance(each, kinds)]

    gc.collect()
    gc.disable()
    try:
        client = await here.client()
        in_pieces = says(HEAD % len(ANSWER), ANSWER[:9], ANSWER[9:])
        for script in (says(whole()), in_pieces, lose):
            here.plays(script)
            client.send(request())
            await client.answer()
        gone = await here.client()
        here.plays(silence)
        gone.send(request())
        await here.until(lambda: here.proxy.state().requests == 1)
        gone.leave()
        await here.at_rest()
        await here.ask(n=2)
        client.send(request())
        await client.answer()
        assert here.used == ["whole", "unfolded", "unfolded", "unfolded", "refused"]
        await here.until(lambda: not left())
    finally:
        gc.enable()


async def test_who_takes_no_answers_is_asked_for_no_more_requests(here: Here) -> None:
    here.replicas["a"].usual = says(whole(b'{"text":"%b"}' % (b"x" * 50_000)))
    client = await here.client()
    client.reading.pause_reading()
    sent = 0
    while not any(each._unread_answers for each in here.server._connections):
        client.send(request(key=ADMIN))
        sent += 1
        await here.has_had(1 + sent)
        await here.at_rest()
    client.send(request(key=ADMIN, prompt="later"))
    await here.ask(key=ADMIN)
    assert here.proxy.state().requests_total == 2 + sent
    client.reading.resume_reading()
    for _ in range(sent + 1):
        await client.answer()
    assert here.used.count("whole") > 1


async def test_what_is_in_flight_is_counted_and_bounded(here: Here) -> None:
    go = asyncio.Event()
    here.plays(answers_after(go))
    client = await here.client()
    client.send(request())
    await here.until(lambda: here.proxy.state().requests == 1)
    assert here.proxy.state().buffered_bytes == len(request())
    go.set()
    await client.answer()
    assert here.proxy.state().buffered_bytes == 0
    # Where no more may be held, the slow way says so.
    here.server.buffered_bytes = here.http.max_buffered_bytes
    client.send(request())
    assert (await client.answer()).startswith(b"HTTP/1.1 503")
    assert here.used == ["whole"]
    here.server.buffered_bytes = 0


def raises(*arguments: object) -> object:
    raise RuntimeError("a fault of ours")


@pytest.mark.parametrize("how", ["in pieces", "lost", "silent", "client gone", "end"])
async def test_a_fault_of_ours_leaves_no_client_waiting_and_no_place_held(
    here: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Whatever has a request go on as one of any kind."""
    scripts = {"in pieces": says(HEAD % len(ANSWER), ANSWER[:9], ANSWER[9:]), "lost": lose}
    here.plays(scripts.get(how, silence))
    monkeypatch.setattr(here.routing, "unfold", raises)
    client = await here.client()
    client.send(request(key=ADMIN))
    if how not in scripts:
        await here.until(lambda: here.proxy.state().requests == 1)
        (reader,) = here.server.readers()
        if how == "silent":
            here.dispatch.fell_silent(here.source.endpoints["a"])
        elif how == "end":
            reader.end_now(Unavailable("The router stops."))
        else:
            client.leave()
    if how != "client gone":
        assert (await client.rest()).removesuffix(b" and a reset") == b""
    await here.at_rest()
    assert here.dispatch.ledger.in_flight("a") == 0
    assert here.dispatch.ledger.loads.total_cost == 0
    assert all(each.sequences == 0 for each in here.limiter.snapshot().tenants)
    assert here.metrics.answers[0] == 1
    assert sum("could not be gone on with" in each.message for each in caplog.records) == 1
    monkeypatch.undo()
    assert (await here.ask(key=ADMIN)).startswith(b"HTTP/1.1 200")


async def test_a_fault_in_noting_the_end_of_a_request_comes_after_its_answer(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    for at, name in ((here.dispatch, "left"), (here.routing, "finish")):
        monkeypatch.setattr(at, name, raises)
        client = await here.client()
        for _ in range(2):
            client.send(request(key=ADMIN))
            assert (await client.answer()).startswith(b"HTTP/1.1 200")
        monkeypatch.undo()
        await here.at_rest()


async def test_a_body_is_kept_once_when_its_answer_comes_in_pieces(here: Here) -> None:
    go = asyncio.Event()

    async def stream(received: Received) -> None:
        await received.send(EVENTS + chunk(b"data: 1\n\n"))
        await go.wait()
        await received.send(LAST_CHUNK)

    here.plays(stream)
    client = await here.client()
    client.send(request(stream=True))
    await client.reader.readuntil(b"data: 1\n\n")
    (exchange,) = (each._exchange for each in here.server._connections if each._exchange)
    assert isinstance(exchange, _Express)
    assert (exchange._data, exchange.body) == (b"", request(stream=True).partition(b"\r\n\r\n")[2])
    go.set()
    await client.reader.readuntil(LAST_CHUNK)


def test_a_router_without_the_native_reader_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(express, "plain_request", None)
    routing = SimpleNamespace(express=object())
    assert express.open_express_lane(HttpSettings(), routing, None) is None  # type: ignore[arg-type] # not asked
    assert "the native reader was not built" in caplog.text
