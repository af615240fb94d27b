"""The routers' Secret holds what it shall, whoever deletes or edits it."""

from __future__ import annotations

import json
from base64 import b64decode
from typing import Any

import pytest

from mural_operator.router_keys import CHECK_S, RouterKeys
from mural_resolvers.kubernetes.client import JsonObject, KubeError

CONTENT = b'{"acme":[]}'


class Api:
    """One Secret, as the API server keeps it."""

    def __init__(self) -> None:
        self.secret: dict[str, Any] | None = None
        self.asked: list[str] = []

    async def get(self, path: str) -> bytes:
        self.asked.append("get")
        if self.secret is None:
            raise KubeError(404, "NotFound", "gone")
        return json.dumps(self.secret).encode()

    async def create(self, path: str, body: JsonObject) -> bytes:
        self.asked.append("create")
        self.secret = dict(body)
        return b""

    async def patch(self, path: str, body: JsonObject) -> bytes:
        self.asked.append("patch")
        assert self.secret is not None
        self.secret = {**self.secret, "data": (self.secret.get("data") or {}) | body["data"]}  # type: ignore[operator]  # a Secret's
        return b""

    @property
    def content(self) -> bytes:
        assert self.secret is not None
        return b64decode(self.secret["data"]["keys.json"])


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def keys(api: Api, clock: Clock) -> RouterKeys:
    return RouterKeys(api, "mural", "keys", clock)  # type: ignore[arg-type]  # stands for one


async def test_it_is_made_once_and_what_it_holds_already_is_not_written(api, keys, clock):
    await keys.write(CONTENT)
    assert api.content == CONTENT
    assert api.asked == ["get", "create"]
    await keys.write(CONTENT)
    clock.now += 2 * CHECK_S
    await keys.write(CONTENT)
    assert api.asked == ["get", "create", "get"]


@pytest.mark.parametrize(
    "found",
    [None, {}, {"data": None}, {"data": {"keys.json": "e30="}}, {"data": {"keys.json": "%"}}],
)
async def test_what_someone_has_done_to_it_is_undone_within_seconds(api, keys, clock, found):
    await keys.write(CONTENT)
    api.secret = found
    clock.now += CHECK_S
    await keys.write(CONTENT)
    assert api.content == CONTENT
    assert CHECK_S <= 10, "until then tenants are locked out"


async def test_entries_of_others_are_left_alone(api, keys):
    api.secret = {"data": {"mine": "e30="}}
    await keys.write(CONTENT)
    assert api.secret["data"]["mine"] == "e30="
