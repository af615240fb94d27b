"""Ends in order: drained by a stop, or with the core; nobody waits without a bound."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_resolvers.errors import InvalidInput, Unavailable
from mural_server.api.admission import Admission, may_enter
from mural_server.protocol import ControlClient, ControlError


async def begun_stream(server):
    server.engine.gate = asyncio.Event()
    stream = await server.client().completions.create(model="tiny", prompt="Hi", stream=True)
    chunks = aiter(stream)
    await anext(chunks)
    return chunks


async def test_a_stop_lets_open_requests_end_and_takes_no_more(server):
    chunks = await begun_stream(server)
    server.stop.set()
    while server.state.admission.accepting:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0)
    refused = await server.complete()
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    assert (await server.http.get("/health")).status_code == 200
    assert (await server.http.get("/ready")).status_code == 503
    server.engine.gate.set()
    text = "".join([chunk.choices[0].text async for chunk in chunks])
    assert text == " world"
    assert await server.exit_status == 0


async def test_a_stop_is_told_at_once_to_whoever_follows_the_state(server):
    chunks = await begun_stream(server)
    told: list[tuple[bool, bool]] = []

    async def follow() -> None:
        async with aclosing(ControlClient("127.0.0.1", server.control_port).states()) as states:
            async for state in states:
                if not told:
                    server.stop.set()
                told.append((state.accepting, state.ready))
                if not state.accepting:
                    # Told while the open request still runs.
                    server.engine.gate.set()

    with pytest.raises(ControlError, match="ended the stream"):
        await asyncio.wait_for(follow(), 20)
    assert (told[0], told[-1]) == ((True, True), (False, False))
    assert "".join([chunk.choices[0].text async for chunk in chunks]) == " world"
    assert await server.exit_status == 0


async def test_an_idle_server_says_that_it_stops_before_it_is_gone(server):
    async with aclosing(ControlClient("127.0.0.1", server.control_port).states()) as states:
        assert (await anext(states)).accepting
        server.stop.set()
        assert not (await asyncio.wait_for(anext(states), 20)).accepting
    assert await server.exit_status == 0


async def test_what_outlasts_the_grace_is_aborted_with_an_error(start_server):
    server = await start_server(shutdown_grace_s=0.05)
    chunks = await begun_stream(server)
    server.stop.set()
    with pytest.raises(Exception, match="before it was complete"):
        async for _ in chunks:
            pass
    assert await server.exit_status == 0


async def test_the_cores_death_ends_requests_and_server(server):
    chunks = await begun_stream(server)
    whole = asyncio.create_task(server.complete(n=2))
    while len(server.engine.requests) < 3:  # noqa: ASYNC110 - the server has no event for it
        await asyncio.sleep(0)
    server.engine.die("killed by SIGKILL")
    with pytest.raises(Exception, match="SIGKILL"):
        async for _ in chunks:
            pass
    answer = await whole
    assert answer.status_code == 503
    assert "SIGKILL" in answer.json()["error"]["message"]
    assert await asyncio.wait_for(server.exit_status, 10) == 1


async def test_health_says_that_the_core_died(server):
    server.engine.gate = asyncio.Event()
    held = asyncio.create_task(server.complete())
    await asyncio.wait_for(server.engine.stepped.wait(), 10)
    # The server lingers while a request is open, so that its error can be sent.
    server.engine._dead.set()
    responses = await asyncio.gather(
        server.http.get("/health"), server.http.get("/ready"), held, return_exceptions=True
    )
    assert [getattr(response, "status_code", None) for response in responses] == [503, 503, 503]


async def test_a_request_that_waits_too_long_for_its_turn_is_503(start_server):
    server = await start_server(queue_wait_s=0.05)
    blocked = asyncio.Event()

    async def never(request):
        await blocked.wait()
        yield

    server.engine.generate = never
    for stream in (False, True):
        response = await server.complete(stream=stream)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "5"
    assert server.state.admission.open_sequences == 0


async def test_more_than_may_wait_is_503_with_retry_after(start_server):
    server = await start_server(max_queued_requests=1)
    server.engine.gate = asyncio.Event()
    open_requests = [asyncio.create_task(server.complete(n=1)) for _ in range(5)]
    while server.state.admission.open_sequences < 5:  # noqa: ASYNC110 - as above
        await asyncio.sleep(0)
    refused = await server.complete()
    assert refused.status_code == 503
    assert refused.headers["retry-after"]
    server.engine.gate.set()
    assert [response.status_code for response in await asyncio.gather(*open_requests)] == [200] * 5


tenants = st.sampled_from(["a", "b", "c", "d"])


@given(st.lists(st.tuples(tenants, st.integers(1, 5))), st.integers(1, 20))
def test_no_tenant_keeps_another_out(arrivals, capacity):
    open_by_tenant: dict[str, int] = {}
    for tenant, count in arrivals:
        if may_enter(tenant, count, open_by_tenant, capacity):
            open_by_tenant[tenant] = open_by_tenant.get(tenant, 0) + count
    # Bounded in all, and whoever has nothing open may enter, whatever the others did.
    assert sum(open_by_tenant.values()) <= capacity * 3 + 4
    others = {name: n for name, n in open_by_tenant.items() if name != "new"}
    if others and capacity >= 5:
        assert may_enter("new", 1, others, capacity)


async def test_admission_counts_back_to_nothing():
    admission = Admission(2)
    with admission.enter("a", 2):
        with pytest.raises(Unavailable), admission.enter("a", 1):
            pass
        assert admission.open_sequences == 2
    await admission.wait_idle()
    with pytest.raises(InvalidInput), admission.enter("a", 3):
        pass
    admission.close("closed")
    with pytest.raises(Unavailable, match="closed"), admission.enter("a", 1):
        pass
