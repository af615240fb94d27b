"""Where a hub's redirects may lead, and with what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.errors import InvalidInput, Unavailable
from mural_resolvers.hub import HubSettings
from mural_resolvers.hub.client import HubClient

Tools = dict[str, Any]
Made = Callable[[HubSettings], HubClient]


@pytest.fixture
async def make() -> AsyncIterator[Made]:
    made: list[HubClient] = []

    def client(settings: HubSettings) -> HubClient:
        made.append(HubClient(settings))
        return made[-1]

    yield client
    for one in made:
        await one.close()


async def status(client: HubClient) -> int:
    async with client.content("acme/sql", "0" * 40, "f", None) as response:
        return response.status


def redirecting(hub: Any, tools: Tools, location: str) -> None:
    hub.alter = lambda asked, answer: (
        tools["answer"](302, {"Location": location})
        if "/resolve/" in asked.path
        else tools["answer"](204)
    )


@pytest.mark.parametrize(
    ("location", "hosts", "allowed"),
    [
        ("/same", None, True),
        ("{store}/x", None, True),
        ("{store}/x", (), True),
        ("http://127.0.0.1:{port}/x", None, False),
        ("http://127.0.0.1:{port}/x", ("127.0.0.*",), True),
        ("http://user:pass@localhost:{port}/x", None, False),
        ("http://169.254.169.254/latest", None, False),
        ("ftp://localhost/x", None, False),
        ("file:///etc/passwd", None, False),
        ("https://elsewhere.invalid/x", (), False),
    ],
)
async def test_a_redirect_over_plain_http_stays_on_the_endpoints_host(
    hub: Any,
    settings: HubSettings,
    make: Made,
    small_hub_tools: Tools,
    location: str,
    hosts: tuple[str, ...] | None,
    allowed: bool,
) -> None:
    port = hub.store_url.rpartition(":")[2]
    redirecting(hub, small_hub_tools, location.format(store=hub.store_url, port=port))
    client = make(replace(settings, redirect_hosts=hosts))

    if allowed:
        assert await status(client) == 204
    else:
        with pytest.raises(Unavailable, match="not allowed"):
            await status(client)
        assert len(hub.asked) == 1


@pytest.mark.parametrize("redirect_hosts", [None, ("*",)])
async def test_https_is_never_left(
    tls_hub: Any,
    hub: Any,
    ca_file: Path,
    settings: HubSettings,
    make: Made,
    small_hub_tools: Tools,
    redirect_hosts: tuple[str, ...] | None,
) -> None:
    redirecting(tls_hub, small_hub_tools, f"{hub.url}/x")
    client = make(
        replace(settings, endpoint=tls_hub.url, ca_bundle=ca_file, redirect_hosts=redirect_hosts)
    )

    with pytest.raises(Unavailable, match="not allowed"):
        await status(client)
    assert hub.asked == []


async def test_redirects_without_an_end_are_left(
    hub: Any, settings: HubSettings, make: Made, small_hub_tools: Tools
) -> None:
    hub.alter = lambda asked, answer: small_hub_tools["answer"](302, {"Location": asked.path})

    with pytest.raises(Unavailable, match="without an end"):
        await status(make(settings))
    assert len(hub.asked) == 6


@pytest.mark.parametrize("location", ["http://[", "http://localhost:99999/", "//", "\x01"])
async def test_a_redirect_to_no_address_is_unavailable(
    hub: Any, settings: HubSettings, make: Made, small_hub_tools: Tools, location: str
) -> None:
    redirecting(hub, small_hub_tools, location)

    with pytest.raises(Unavailable):
        await status(make(settings))


async def test_cookies_are_not_kept(
    hub: Any, settings: HubSettings, make: Made, small_hub_tools: Tools
) -> None:
    hub.alter = lambda asked, answer: small_hub_tools["answer"](204, {"Set-Cookie": "a=b"})
    client = make(settings)

    await status(client)
    await status(client)

    assert [asked.headers.get("cookie") for asked in hub.asked] == [None, None]


async def test_the_environments_proxy_is_used(
    hub: Any,
    settings: HubSettings,
    make: Made,
    small_hub_tools: Tools,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hub.alter = lambda asked, answer: small_hub_tools["answer"](204)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", hub.url)
    behind = replace(settings, endpoint="http://hub.invalid")

    assert await status(make(behind)) == 204

    monkeypatch.setenv("no_proxy", "hub.invalid")
    with pytest.raises(Unavailable):
        await status(make(behind))


def test_a_proxy_that_cannot_be_used_is_refused_at_the_start(
    settings: HubSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "gopher://user:canary@proxy")

    with pytest.raises(InvalidInput, match="proxy") as refused:
        HubClient(settings)
    assert "canary" not in str(refused.value)
