"""Tokens whose files change under a running router."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.tenants import ANYONE
from mural_router import tokens
from mural_router.admin.app import create_admin_app
from mural_router.config import Config
from mural_router.fleet.endpoint import Endpoint, Engine
from mural_router.limits.local import LocalLimiter
from mural_router.running import Router
from mural_router.settings import Secrets

NAMES = ("router_token", "control_token", "vllm_api_key")


def write(path: Path, text: str) -> None:
    """As a mounted Secret changes: in one step."""
    path.with_suffix(".next").write_text(text)
    path.with_suffix(".next").replace(path)


@pytest.fixture
async def router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setattr(tokens, "HANDOVER_S", 0.05)
    for name in NAMES:
        (tmp_path / name).write_text(f"the-first-{name}")
    texts: dict[str, Any] = {name: f"the-first-{name}" for name in NAMES}
    files: dict[str, Any] = {f"{name}_file": str(tmp_path / name) for name in NAMES}
    secrets = Secrets(**texts, **files)
    router = Router(Config(None, {}, secrets), LocalLimiter())
    create_admin_app(router)
    yield router
    await router.close()


def look(router: Router) -> None:
    """A change is taken when it was seen twice."""
    for _ in range(2):
        for watch in router.file_watches().values():
            watch.poll()


def shown(router: Router, engine: Engine) -> str:
    """With a request, to a replica."""
    endpoint = Endpoint("a", "127.0.0.1", 1, engine=engine)
    (token,) = [
        value
        for name, value in router.routing._identity(ANYONE, None, endpoint)
        if name == "authorization"
    ]
    return token.removeprefix("Bearer ")


def metrics(router: Router) -> list[str]:
    return router.metrics.exposition().decode().splitlines()


async def until(router: Router, token: str) -> None:
    for _ in range(2_000):
        if shown(router, "mural") == token:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{token} was never shown")


async def test_renewed_tokens_are_shown_and_the_routers_own_when_servers_know_it(
    router: Router, tmp_path: Path
) -> None:
    for name in NAMES:
        await asyncio.to_thread(write, tmp_path / name, f"the-next-{name}\n")
    look(router)
    assert shown(router, "vllm") == "the-next-vllm_api_key"
    assert router.fleet._control_tokens == ("the-next-control_token", "the-first-control_token")
    assert router.fleet._vllm_api_key == "the-next-vllm_api_key"
    assert shown(router, "mural") == "the-first-router_token", "servers take it for a while yet"
    await until(router, "the-next-router_token")


async def test_a_token_that_is_renewed_again_pushes_the_one_before_it_forward(
    router: Router, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "HANDOVER_S", 600.0)
    path = tmp_path / "router_token"
    for text, then in (("the-second", "the-first-router_token"), ("the-third", "the-second")):
        await asyncio.to_thread(write, path, text)
        look(router)
        assert shown(router, "mural") == then
    await asyncio.to_thread(write, path, "the-third\n")
    look(router)
    assert shown(router, "mural") == "the-second", "it is the same one"


async def test_changed_settings_keep_the_token_that_is_in_use(
    router: Router, tmp_path: Path
) -> None:
    await asyncio.to_thread(write, tmp_path / "router_token", "the-next")
    look(router)
    await until(router, "the-next")
    router.take_over(router.config.settings)
    assert shown(router, "mural") == "the-next"


@pytest.mark.parametrize("name", NAMES)
async def test_a_file_that_is_missing_or_empty_leaves_the_last_token_and_is_told(
    router: Router, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / name
    gauge = f'mural_router_file_stale{{file="{name}"}}'
    assert f"{gauge} 0.0" in metrics(router)
    before = shown(router, "mural"), shown(router, "vllm"), router.fleet._control_tokens
    for spoil in (Path.unlink, Path.touch, lambda path: write(path, "two words")):
        await asyncio.to_thread(spoil, path)
        for _ in range(3):
            look(router)
        now = shown(router, "mural"), shown(router, "vllm"), router.fleet._control_tokens
        assert now == before
        assert f"{gauge} 1.0" in metrics(router)
    said = [each for each in caplog.messages if "the old ones hold" in each]
    assert len(said) == 3, "once each"
    assert all(name.replace("_", " ") in each for each in said)
    await asyncio.to_thread(write, path, f"the-first-{name}")
    look(router)
    assert f"{gauge} 0.0" in metrics(router)


async def test_a_fifo_in_its_place_holds_nothing_up(router: Router, tmp_path: Path) -> None:
    path = tmp_path / "router_token"
    path.unlink()
    os.mkfifo(path)
    look(router)
    assert shown(router, "mural") == "the-first-router_token"


async def test_tokens_that_came_from_the_environment_are_not_looked_for() -> None:
    router = Router(Config(None, {}, Secrets(router_token="a-token")), LocalLimiter())
    assert router.file_watches() == {}
    await router.close()
