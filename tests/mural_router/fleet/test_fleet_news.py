"""What the log says of replicas that come and go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from mural_router.fleet.news import FleetNews
from mural_server.protocol import ControlClient

LOGGER = logging.getLogger("mural.router.fleet")


class Lines(logging.Handler):
    """The lines that were logged, and more of them to wait for."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self._more = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))
        self._more.set()

    async def until(self, count: int) -> list[tuple[str, str]]:
        async with asyncio.timeout(20):
            while len(self.lines) < count:
                await self._more.wait()
                self._more.clear()
        return self.lines


@pytest.fixture
def logged() -> Iterator[Lines]:
    handler, level = Lines(), LOGGER.level
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    yield handler
    LOGGER.removeHandler(handler)
    LOGGER.setLevel(level)


async def test_a_fleet_that_drains_away_is_told_with_its_reason(
    watch, start_server, endpoint_of, logged: Lines
) -> None:
    server = await start_server()
    watched = await watch(endpoint_of(server))
    await watched.ready("a")
    news = FleetNews(watched.view, interval_s=0.0)
    news.begin()
    await ControlClient("127.0.0.1", server.control_port).drain()
    assert await logged.until(3) == [
        ("INFO", "replica a (mural): ready"),
        ("WARNING", "replica a (mural): not ready: not ready, or draining, by its own word"),
        ("ERROR", "none of 1 replicas is ready: requests are answered 503"),
    ]
    news.close()


async def test_a_fleet_that_comes_up_is_told(
    watch, listed, start_server, endpoint_of, logged: Lines
) -> None:
    found = listed()
    watched = await watch(found)
    news = FleetNews(watched.view, interval_s=0.0)
    news.begin()
    assert logged.lines == []
    found.sets.put_nowait((endpoint_of(await start_server()),))
    messages = [message for _, message in await logged.until(4)]
    assert messages[0].startswith("replica a (mural): not ready: not heard yet")
    assert messages[1:] == [
        "none of 1 replicas is ready: requests are answered 503",
        "replica a (mural): ready",
        "1 of 1 replicas are ready again",
    ]
    found.sets.put_nowait(())
    assert (await logged.until(5))[-1] == ("INFO", "replica a has left the fleet")
    news.close()


async def test_what_is_not_heard_is_told_with_the_error_and_without_the_token(
    watch, start_server, endpoint_of, logged: Lines
) -> None:
    server = await start_server(control_token="the-right-token")
    watched = await watch(endpoint_of(server), control_token="the-wrong-token")
    await watched.until(lambda _: watched.view.settled)
    news = FleetNews(watched.view)
    news.begin()
    news.close()
    assert logged.lines[0] == (
        "WARNING",
        "replica a (mural): not ready: not heard yet (A valid control token is required.)",
    )
    assert "-token" not in str(logged.lines)


async def test_loads_and_adapters_are_no_news(
    watch, start_server, adapter_dir, endpoint_of, logged: Lines
) -> None:
    server = await start_server(adapter_dir=str(adapter_dir))
    watched = await watch(endpoint_of(server))
    await watched.ready("a")
    news = FleetNews(watched.view, interval_s=0.0)
    news.begin()
    await ControlClient("127.0.0.1", server.control_port).set_resident("acme:v1")
    await watched.replica("a", lambda one: one.adapters)
    news.close()
    assert logged.lines == [("INFO", "replica a (mural): ready")]
