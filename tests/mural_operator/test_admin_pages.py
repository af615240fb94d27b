"""The operator's own port, asked by a real HTTP client."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from mural_operator import admin
from mural_operator.admin import AdminPages, serve_admin


class Told:
    """What the pages are told."""

    def __init__(self) -> None:
        self.trouble: str | None = None
        self.not_ready: str | None = None

    def pages(self) -> AdminPages:
        return AdminPages(
            lambda: self.trouble,
            lambda: self.not_ready,
            lambda: b"# TYPE mural_x gauge\nmural_x 1.0\n",
        )


async def ask(port: int, path: str, method: str = "GET") -> httpx.Response:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
        return await client.request(method, path)


async def test_probes_say_what_is_wrong_while_it_is() -> None:
    told = Told()
    async with serve_admin(told.pages(), "127.0.0.1", 0) as port:
        assert (await ask(port, "/health")).status_code == 200
        assert (await ask(port, "/ready")).status_code == 200
        told.not_ready = "adapters have not been listed yet"
        answer = await ask(port, "/ready")
        assert (answer.status_code, answer.text) == (503, "adapters have not been listed yet\n")
        assert (await ask(port, "/health")).status_code == 200
        told.trouble = "the election has ended"
        assert (await ask(port, "/health?verbose")).status_code == 503


async def test_a_scrape_gets_the_metrics_in_their_own_media_type() -> None:
    async with serve_admin(Told().pages(), "127.0.0.1", 0) as port:
        answer = await ask(port, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    (family,) = text_string_to_metric_families(answer.text)
    assert family.name == "mural_x"


async def test_other_paths_and_methods_are_refused() -> None:
    async with serve_admin(Told().pages(), "127.0.0.1", 0) as port:
        assert (await ask(port, "/debug")).status_code == 404
        assert (await ask(port, "/metrics", "POST")).status_code == 405


@pytest.mark.parametrize("sent", [b"", b"GET", b"\x00" * 40_000, b"\r\n\r\n", b"GET \r\n\r\n"])
async def test_what_is_no_request_ends_and_the_next_one_is_answered(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin, "TIMEOUT_S", 0.1)
    async with serve_admin(Told().pages(), "127.0.0.1", 0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        async with asyncio.timeout(10):
            try:
                answer = await reader.read()
            except ConnectionResetError:
                answer = b""
        writer.close()
        assert b"200 OK" not in answer
        assert (await ask(port, "/health")).status_code == 200


async def test_a_crowd_is_turned_away_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admin, "MAX_CONNECTIONS", 2)
    async with serve_admin(Told().pages(), "127.0.0.1", 0) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        async with asyncio.timeout(10):
            assert (await reader.read()).startswith(b"HTTP/1.1 503")
        for _, each in [*idle, (reader, writer)]:
            each.close()


async def test_connections_that_are_open_do_not_keep_it_from_ending() -> None:
    async with asyncio.timeout(10):
        async with serve_admin(Told().pages(), "127.0.0.1", 0) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()


async def test_an_address_that_is_taken_is_an_error_at_once() -> None:
    async with serve_admin(Told().pages(), "127.0.0.1", 0) as port:
        with pytest.raises(OSError, match=r".+"):
            async with serve_admin(Told().pages(), "127.0.0.1", port):
                pass
