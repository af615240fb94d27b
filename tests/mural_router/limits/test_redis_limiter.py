"""Limits that several routers count together, against real servers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trustme

from mural_resolvers.errors import InvalidInput, RateLimited
from mural_resolvers.tenants import ANYONE, Principal, TenantLimits
from mural_router.limits import redis_limiter
from mural_router.limits.limiter import Hold
from mural_router.limits.redis_limiter import RedisLimiter, RedisSettings

Make = Callable[..., Awaitable[RedisLimiter]]
Until = Callable[[Callable[[], object]], Awaitable[None]]


def acme(**limits: int) -> Principal:
    return Principal(tenant="acme", limits=TenantLimits(**limits))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done every two seconds is done sooner, so that tests need not wait."""
    for name in ("REVIEW_S", "BEAT_S", "GRACE_S"):
        monkeypatch.setattr(redis_limiter, name, 0.1)


async def enter(
    limiter: RedisLimiter, principal: Principal, count: int, tokens: int = 1, sequences: int = 1
) -> list[Hold]:
    """Those of so many requests that were admitted."""
    admitted = []
    for _ in range(count):
        with contextlib.suppress(RateLimited):
            admitted.append(await limiter.enter(principal, sequences, tokens))
    return admitted


async def refused(limiter: RedisLimiter, principal: Principal, tokens: int = 1) -> float:
    with pytest.raises(RateLimited) as caught:
        await limiter.enter(principal, 1, tokens)
    assert caught.value.retry_after_s
    return caught.value.retry_after_s


def counted(server: Any, tenant: str = "acme") -> tuple[int, int]:
    """Requests and tokens that the store counts of a tenant, leases included."""
    raw = server.client.hget(f"{{mural:limits}}:t:{tenant}", "m")
    return (0, 0) if raw is None else tuple(msgspec.msgpack.decode(raw)[1:])


def used(*limiters: RedisLimiter) -> tuple[int, int]:
    """Requests and tokens that routers themselves count."""
    usages = [usage for limiter in limiters for usage in limiter.snapshot().tenants]
    return sum(usage.requests for usage in usages), sum(usage.tokens for usage in usages)


def is_shared(limiter: RedisLimiter) -> bool:
    return limiter.snapshot().away_s is None


# -- together --------------------------------------------------------------------------------------


async def test_routers_share_a_limit_to_the_last_request(store: Any, make: Make) -> None:
    one, two = await make(), await make()
    principal = acme(requests_per_minute=100)

    admitted = [
        len(await enter(limiter, principal, 10)) for _ in range(15) for limiter in (one, two)
    ]

    # A lease that lies with one router is not there for the other until it is given back.
    assert 90 <= sum(admitted) <= 100
    assert used(one, two)[0] == sum(admitted)


async def test_what_one_router_leaves_the_other_gets(store: Any, make: Make, until: Until) -> None:
    one, two = await make(), await make()
    principal = acme(tokens_per_minute=1000)
    holds = await enter(one, principal, 10, tokens=100)
    assert len(holds) == 10
    assert 0 < await refused(two, principal, 100) <= 61

    for hold in holds:
        hold.settle(30)
    await until(lambda: counted(store)[1] == 300)

    assert len(await enter(two, principal, 10, tokens=100)) == 7


async def test_what_was_used_beyond_the_estimate_counts_for_all(
    store: Any, make: Make, until: Until
) -> None:
    one, two = await make(), await make()
    principal = acme(tokens_per_minute=1000)
    (hold,) = await enter(one, principal, 1, tokens=10)

    hold.settle(5000)
    await until(lambda: counted(store)[1] == 5000)

    assert 59 < await refused(two, principal) <= 61


async def test_an_estimate_above_the_limit_shuts_nobody_out_for_good(
    store: Any, make: Make
) -> None:
    one = await make()
    principal = acme(tokens_per_minute=100)

    (hold,) = await enter(one, principal, 1, tokens=5000)
    hold.settle(60)

    await refused(one, principal, 5000)
    assert len(await enter(one, principal, 1, tokens=20)) == 1


async def test_requests_make_no_trips(store: Any, make: Make) -> None:
    one = await make()
    principal = acme(requests_per_minute=1_000_000, tokens_per_minute=1 << 40, concurrency=1000)
    before = one.snapshot().trips

    for _ in range(2000):
        hold = await one.enter(principal, 1, 700)
        hold.settle(650)
        hold.close()

    assert used(one) == (2000, 1_300_000)
    # Leases double with the pace, so few are needed.
    assert one.snapshot().trips - before < 60


async def test_knocking_makes_no_trips(store: Any, make: Make) -> None:
    one = await make()
    principal = acme(requests_per_minute=1)
    await enter(one, principal, 1)
    await refused(one, principal)
    before = one.snapshot().trips

    waits = [await refused(one, principal) for _ in range(500)]

    assert one.snapshot().trips - before < 10
    assert all(59 < wait <= 61 for wait in waits)
    assert one.snapshot().refused["requests"] == 501


async def test_those_who_ask_at_once_share_a_trip(store: Any, make: Make) -> None:
    one = await make()
    principal = acme(requests_per_minute=200)
    before = one.snapshot().trips

    admitted = await asyncio.gather(*(enter(one, principal, 1) for _ in range(300)))

    assert sum(map(len, admitted)) == 200
    assert one.snapshot().trips - before < 20


async def test_tenants_share_a_trip(store: Any, make: Make) -> None:
    one = await make()
    limits = TenantLimits(requests_per_minute=5)
    before = one.snapshot().trips

    admitted = await asyncio.gather(
        *(enter(one, Principal(tenant=f"t{n}", limits=limits), 1) for n in range(1000))
    )

    assert sum(map(len, admitted)) == 1000
    assert one.snapshot().trips - before < 30


async def test_sequences_are_limited_over_all_routers(store: Any, make: Make, until: Until) -> None:
    one, two = await make(), await make()
    principal = acme(concurrency=4)
    holds = await enter(one, principal, 10)
    assert len(holds) == 4
    assert await refused(two, principal) > 0
    with pytest.raises(InvalidInput, match="may have 4"):
        await two.enter(principal, 5, 1)

    for hold in holds[:3]:
        hold.close()
        hold.close()
    got: list[Hold] = []

    async def all_got() -> None:
        while len(got) < 3:
            got.extend(await enter(two, principal, 1))
            await asyncio.sleep(0.01)

    await asyncio.wait_for(all_got(), 30)
    await refused(two, principal)


async def test_whoever_has_no_limits_makes_no_trip(store: Any, make: Make) -> None:
    one = await make()
    before = one.snapshot()

    for principal in (ANYONE, Principal(tenant="initech")):
        (await one.enter(principal, 1000, 1 << 40)).settle(1 << 50)

    assert one.snapshot().tenants == before.tenants == ()


async def test_a_closed_router_gives_its_leases_back(store: Any, make: Make) -> None:
    one, two = await make(), await make()
    principal = acme(requests_per_minute=100, concurrency=100)
    for hold in await enter(one, principal, 3):
        hold.close()
    assert counted(store)[0] > 3

    await one.close()

    assert counted(store)[0] == 3
    assert len(await enter(two, principal, 100)) == 97


async def test_tenants_that_are_gone_are_forgotten(
    store: Any, make: Make, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = await make()
    (hold,) = await enter(one, acme(requests_per_minute=10, concurrency=10), 1)
    await until(lambda: counted(store)[0] == 1)
    assert one.snapshot().tenants[0].sequences == 1

    hold.close()
    now = one.shared_now
    monkeypatch.setattr(one, "shared_now", lambda: now() + 120)

    await until(lambda: not one.snapshot().tenants)


async def test_whoever_goes_away_while_a_lease_is_asked_for_holds_nothing(
    store: Any, make: Make, until: Until
) -> None:
    one = await make()
    principal = acme(concurrency=1, tokens_per_minute=100)
    for _ in range(50):
        task = asyncio.ensure_future(one.enter(principal, 1, 100))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            # It may have been admitted before.
            hold = await task
            hold.settle(0)
            hold.close()

    usage = one.snapshot().tenants[0]
    assert (usage.sequences, usage.tokens) == (0, 0)


# -- clocks that do not agree ----------------------------------------------------------------------


@pytest.fixture
def make_skewed(make: Make, monkeypatch: pytest.MonkeyPatch) -> Make:
    """``await make_skewed(seconds)``: a limiter on a machine whose clock is wrong by so much."""

    async def make_skewed(skew_s: float, **settings: object) -> RedisLimiter:
        with monkeypatch.context() as machine:
            wrong = SimpleNamespace(time=lambda: time.time() + skew_s, monotonic=time.monotonic)
            machine.setattr(redis_limiter, "time", wrong)
            return await make(**settings)

    return make_skewed


@pytest.mark.parametrize("skew_s", [300, -300])
async def test_routers_whose_clocks_differ_by_minutes_share_one_count(
    store: Any, make_skewed: Make, until: Until, skew_s: float
) -> None:
    one, two = await make_skewed(skew_s), await make_skewed(-skew_s)
    principal = acme(requests_per_minute=100, tokens_per_minute=10_000)
    admitted = [
        hold
        for _ in range(15)
        for limiter in (one, two)
        for hold in await enter(limiter, principal, 10, tokens=100)
    ]
    assert 90 <= len(admitted) <= 100

    for hold in admitted:
        hold.settle(40)

    await until(lambda: counted(store) == (len(admitted), 40 * len(admitted)))
    assert used(one, two) == counted(store)
    async with asyncio.timeout(30):
        while len(admitted) < 100:
            admitted += await enter(one, principal, 1) + await enter(two, principal, 1)
            await asyncio.sleep(0.01)
    for limiter in (one, two):
        # A minute after the first of them, by whichever clock.
        assert 30 < await refused(limiter, principal) <= 61


@pytest.mark.parametrize("skew_s", [300, -300])
async def test_what_was_used_by_a_wrong_clock_counts_at_its_true_time(
    server: Any,
    make_skewed: Make,
    until: Until,
    monkeypatch: pytest.MonkeyPatch,
    skew_s: float,
) -> None:
    """A router that began without the store knows its own machine's time alone until then."""
    one, two = await make_skewed(skew_s, routers=2), await make_skewed(-skew_s, routers=2)
    principal = acme(requests_per_minute=100, tokens_per_minute=10_000)
    holds = [
        hold for limiter in (one, two) for hold in await enter(limiter, principal, 100, tokens=100)
    ]
    assert len(holds) == 100

    server.start()
    await until(lambda: is_shared(one) and is_shared(two))
    await until(lambda: counted(server) == (100, 10_000))
    for hold in holds:
        # Its estimate is put right where it stands now.
        hold.settle(40)
    await until(lambda: counted(server) == (100, 4_000))
    assert used(one, two) == (100, 4_000)
    for limiter in (one, two):
        assert 30 < await refused(limiter, principal) <= 61

    # So do the router's own books, by which it goes on when the store is away again.
    server.kill()
    await until(lambda: not is_shared(one) and not is_shared(two))
    for limiter in (one, two):
        assert 30 < await refused(limiter, principal) <= 61
    now = one.shared_now()
    monkeypatch.setattr(one, "shared_now", lambda: now + 62)
    assert len(await enter(one, principal, 100)) == 50


# -- without the store -----------------------------------------------------------------------------


async def test_without_a_store_each_router_has_its_share(
    server: Any, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "mural.router.limits"):
        one = await make(routers=4)
        admitted = await enter(one, acme(requests_per_minute=100), 100)

    assert len(admitted) == 25
    assert not is_shared(one)
    assert "out of reach (ConnectionError): tenants have 1/4" in caplog.text
    assert len(caplog.records) == 1


async def test_what_was_used_meanwhile_is_told_when_the_store_comes(
    server: Any, make: Make, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    one, two = await make(routers=2), await make(routers=2)
    principal = acme(requests_per_minute=100)
    assert [len(await enter(limiter, principal, 100)) for limiter in (one, two)] == [50, 50]

    with caplog.at_level(logging.INFO, "mural.router.limits"):
        server.start()
        await until(lambda: is_shared(one) and is_shared(two))

    await until(lambda: counted(server)[0] == 100)
    assert await refused(one, principal) > 30
    assert "counted together" in caplog.text


async def test_a_store_that_is_killed_and_forgets_everything_is_told_again(
    server: Any, make: Make, until: Until
) -> None:
    server.start()
    one, two = await make(), await make()
    await until(lambda: one.snapshot().routers == two.snapshot().routers == 2)
    principal = acme(requests_per_minute=100, tokens_per_minute=10_000)
    before = len(await enter(one, principal, 30, tokens=10))
    before += len(await enter(two, principal, 20, tokens=10))
    assert before == 50

    server.kill()
    meanwhile = len(await enter(one, principal, 100, tokens=10))
    meanwhile += len(await enter(two, principal, 100, tokens=10))
    # Each is up to its half of the limit.
    assert meanwhile == 50
    server.start()
    await until(lambda: is_shared(one) and is_shared(two))
    await until(lambda: counted(server) == (100, 1000))
    await refused(one, principal)

    assert used(one, two) == (100, 1000)


async def test_the_bound_while_the_store_is_away_is_held_however_uneven_the_load(
    server: Any, make: Make, until: Until
) -> None:
    server.start()
    one, two = await make(), await make()
    await until(lambda: one.snapshot().routers == two.snapshot().routers == 2)
    principal = acme(requests_per_minute=100)
    admitted = len(await enter(one, principal, 200))
    assert admitted == 100

    server.kill()
    admitted += len(await enter(one, principal, 200))
    admitted += len(await enter(two, principal, 200))
    server.start()
    await until(lambda: is_shared(one) and is_shared(two))
    admitted += len(await enter(one, principal, 200)) + len(await enter(two, principal, 200))

    # (2 - 1/n) times the limit.
    assert admitted == 150
    await until(lambda: counted(server)[0] == 150)


async def test_a_store_that_forgot_nothing_counts_nothing_twice(
    server: Any, make: Make, until: Until
) -> None:
    server.start(durable=True)
    one, two = await make(), await make()
    await until(lambda: one.snapshot().routers == two.snapshot().routers == 2)
    principal = acme(requests_per_minute=1000, tokens_per_minute=100_000)
    for _ in range(5):
        await enter(one, principal, 20, tokens=10)
        holds = await enter(two, principal, 10, tokens=10)
        server.kill()
        for hold in holds:
            hold.settle(5)
        await enter(one, principal, 5, tokens=10)
        server.start(durable=True)
        await until(lambda: is_shared(one) and is_shared(two))

    await until(lambda: counted(server) == used(one, two))
    assert used(one, two)[0] == 5 * 35


async def test_a_frozen_store_keeps_nobody_waiting_for_long(
    server: Any, make: Make, until: Until
) -> None:
    server.start()
    one = await make(timeout_s=0.1)
    principal = acme(requests_per_minute=1000)
    await enter(one, principal, 1)

    server.freeze()
    admitted = await asyncio.wait_for(enter(one, principal, 300), 30)
    await until(lambda: not is_shared(one))
    server.thaw()

    assert len(admitted) == 300
    await until(lambda: is_shared(one))
    await until(lambda: counted(server)[0] == 301)


async def test_an_answer_that_is_lost_is_asked_for_again_and_nothing_is_counted_twice(
    server: Any, make: Make, until: Until
) -> None:
    server.start()
    async with losing_answers(server.port) as wire:
        one = await make(url=f"redis://127.0.0.1:{wire.port}", timeout_s=0.1)
        principal = acme(requests_per_minute=10_000, tokens_per_minute=1 << 30, concurrency=100)
        for _ in range(5):
            wire.lose = True
            # The lease runs out, and the answer with the next one is lost.
            await until_async(lambda: not is_shared(one), lambda: enter(one, principal, 20, 7))
            wire.lose = False
            await until(lambda: is_shared(one))
        await until(lambda: counted(server) == used(one))
        assert wire.lost >= 5


async def test_a_store_that_is_emptied_by_hand_is_told_again(
    store: Any, make: Make, until: Until
) -> None:
    one, two = await make(), await make()
    principal = acme(requests_per_minute=100)
    await enter(one, principal, 30)
    await enter(two, principal, 30)

    store.client.flushall()
    store.client.script_flush()

    await until(lambda: counted(store)[0] == used(one, two)[0] == 60)


async def test_a_store_without_room_is_as_one_that_is_away(
    store: Any, make: Make, until: Until
) -> None:
    one = await make(routers=1)
    store.client.config_set("maxmemory", "1")
    store.client.config_set("maxmemory-policy", "noeviction")

    await until(lambda: not is_shared(one))
    assert len(await enter(one, acme(requests_per_minute=10), 20)) == 10
    store.client.config_set("maxmemory", "0")
    await until(lambda: is_shared(one))
    await until(lambda: counted(store)[0] == 10)


# -- who may speak with it -------------------------------------------------------------------------


async def test_a_wrong_password_is_told_without_the_password(
    server: Any, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    server.start("--requirepass", "right-secret")

    right = await make(password="right-secret")
    wrong = await make(url=f"redis://:wrong-secret@127.0.0.1:{server.port}")

    assert is_shared(right)
    assert not is_shared(wrong)
    assert "AuthenticationError" in caplog.text
    assert "secret" not in caplog.text
    assert "secret" not in repr(RedisSettings(url="redis://:secret@host", password="secret"))


@pytest.mark.parametrize("url", ["http://secret@host", "redis://:secret@host:secret/0", "secret"])
def test_a_url_that_cannot_be_used_is_told_without_the_url(url: str) -> None:
    with pytest.raises(ValueError, match="is wanted") as caught:
        RedisLimiter(RedisSettings(url=url))

    assert "secret" not in str(caught.value)


async def test_the_store_is_reached_by_tls_and_its_certificate_is_checked(
    server: Any, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.start()
    ours, theirs = trustme.CA(), trustme.CA()
    ours.cert_pem.write_to_path(tmp_path / "ours.pem")
    theirs.cert_pem.write_to_path(tmp_path / "theirs.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ours.issue_cert("localhost").configure_cert(context)
    async with losing_answers(server.port, context) as wire:
        url = f"rediss://localhost:{wire.port}"
        trusting = await make(url=url, ca_certs=str(tmp_path / "ours.pem"))
        mistrusting = await make(url=url, ca_certs=str(tmp_path / "theirs.pem"))

        # Its certificate is for the name, not for the address.
        other_name = f"rediss://127.0.0.1:{wire.port}"
        elsewhere = await make(url=other_name, ca_certs=str(tmp_path / "ours.pem"))

        assert is_shared(trusting)
        assert not is_shared(mistrusting)
        assert not is_shared(elsewhere)


# -- a wire between --------------------------------------------------------------------------------


class Wire:
    def __init__(self) -> None:
        self.port = 0
        self.lose = False
        self.lost = 0


@contextlib.asynccontextmanager
async def losing_answers(port: int, tls: ssl.SSLContext | None = None) -> AsyncIterator[Wire]:
    """A relay to a server that swallows the server's answers when it is told to."""
    wire = Wire()

    async def relay(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, answers: bool
    ) -> None:
        while data := await reader.read(65536):
            if answers and wire.lose:
                wire.lost += 1
                continue
            writer.write(data)
            await writer.drain()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        ways = [
            asyncio.ensure_future(relay(reader, up_writer, False)),
            asyncio.ensure_future(relay(up_reader, writer, True)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        up_writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    wire.port = listener.sockets[0].getsockname()[1]
    try:
        yield wire
    finally:
        listener.close()


async def until_async(holds: Callable[[], bool], step: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await step()
            await asyncio.sleep(0)
