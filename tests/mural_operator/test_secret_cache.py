"""Secrets are read one by one, when they are wanted, suspected or a minute old."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable

import pytest

from mural_operator.credentials import CredentialsMissing, PoolCredentials, secret_names
from mural_operator.secret_cache import SecretCache
from mural_resolvers.kubernetes.client import KubeError
from mural_resolvers.kubernetes.objects import ControlTls, PoolSpec, SecretKey, Selector

WAIT_S = 20


class Api:
    """Stands for the API server."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, str]] = {}
        self.refusal: KubeError | None = None
        self.asked: list[str] = []

    async def get(self, path: str) -> bytes:
        name = path.rpartition("/")[2]
        self.asked.append(name)
        if self.refusal is not None:
            raise self.refusal
        if name not in self.secrets:
            raise KubeError(404, "NotFound", f"secrets {name} not found")
        data = {key: b64encode(text.encode()).decode() for key, text in self.secrets[name].items()}
        return json.dumps({"data": data}).encode()


class Kept:
    """A running cache."""

    def __init__(self) -> None:
        self.api = Api()
        self.changes = 0
        self.cache = SecretCache(self.api, "mural", self._take)
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(self.cache.run())

    def _take(self) -> None:
        self.changes += 1
        self._changed.set()

    async def until(self, holds: Callable[[SecretCache], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds(self.cache):
                await self._changed.wait()
                self._changed.clear()


@pytest.fixture
async def kept(monkeypatch) -> AsyncIterator[Kept]:
    monkeypatch.setattr("mural_operator.secret_cache.SUSPECT_AFTER_S", 0.0)
    kept = Kept()
    yield kept
    kept.task.cancel()
    await asyncio.gather(kept.task, return_exceptions=True)


async def test_only_what_is_wanted_is_read_and_what_is_not_any_more_is_forgotten(kept):
    kept.api.secrets = {"a": {"token": "1"}, "b": {"token": "2"}, "c": {"token": "3"}}
    kept.cache.want("pool", {"a"})
    kept.cache.want("tenants", {"a", "b"})
    await kept.until(lambda cache: cache.knows({"a", "b"}))
    assert kept.cache.contents == {"a": {"token": b"1"}, "b": {"token": b"2"}}
    assert sorted(kept.api.asked) == ["a", "b"]
    kept.cache.want("tenants", ())
    assert set(kept.cache.contents) == {"a"}
    assert not kept.cache.knows({"b"})


async def test_a_secret_that_a_pod_does_not_accept_is_read_again(kept):
    kept.api.secrets = {"a": {"token": "old"}}
    kept.cache.want("pool", {"a"})
    await kept.until(lambda cache: cache.knows({"a"}))
    kept.api.secrets["a"]["token"] = "new"
    kept.cache.suspect("a")
    await kept.until(lambda cache: cache.get("a") == {"token": b"new"})


async def test_what_is_deleted_is_gone_but_an_outage_forgets_nothing(kept):
    kept.api.secrets = {"a": {"token": "1"}}
    kept.cache.want("pool", {"a"})
    await kept.until(lambda cache: cache.knows({"a"}))
    kept.api.refusal = KubeError(0, "NoAnswer", "no answer")
    kept.cache.suspect("a")
    await kept.until(lambda cache: cache.trouble("a") == "no answer")
    assert kept.cache.get("a") == {"token": b"1"}
    kept.api.refusal = None
    kept.api.secrets.clear()
    kept.cache.suspect("a")
    await kept.until(lambda cache: cache.get("a") is None)
    assert kept.cache.knows({"a"})


@pytest.mark.parametrize(("status", "known"), [(0, False), (503, False), (403, True), (404, True)])
async def test_an_answer_is_known_and_an_outage_is_not(kept, status, known):
    kept.api.refusal = KubeError(status, "", "refused by the test")
    kept.cache.want("pool", {"a"})
    await kept.until(lambda cache: cache.trouble("a") == "refused by the test")
    assert kept.cache.knows({"a"}) == known


async def test_a_name_that_no_secret_has_keeps_nobody_waiting(kept):
    kept.api.secrets = {"a": {"token": "1"}}
    kept.cache.want("tenants", {"a", ".", ".."})
    await kept.until(lambda cache: cache.knows({"a", ".", ".."}))
    assert kept.cache.contents == {"a": {"token": b"1"}}
    assert "no name" in kept.cache.trouble("..")
    assert kept.api.asked == ["a"]


def a_spec(**more: object) -> PoolSpec:
    return PoolSpec(
        selector=Selector({"app": "server"}),
        control_token_secret=SecretKey("control", "token"),
        **more,
    )


async def test_credentials_name_the_secret_that_is_missing_and_never_what_is_in_one(kept):
    spec = a_spec(control_tls=ControlTls(SecretKey("ca", "ca.crt"), "server"))
    credentials = PoolCredentials(lambda: spec, kept.cache)
    assert secret_names(spec) == {"control", "ca"}
    kept.api.secrets = {"control": {"other": "s3cret"}, "ca": {"ca.crt": "s3cret"}}
    with pytest.raises(CredentialsMissing, match="Secret ca cannot be read"):
        credentials.now()
    kept.cache.want("pool", {"control", "ca"})
    await kept.until(lambda cache: cache.knows({"control", "ca"}))
    with pytest.raises(CredentialsMissing, match=r"ca\.crt of the Secret ca holds no certificate"):
        credentials.now()
    spec = a_spec()
    with pytest.raises(CredentialsMissing, match="Secret control has no text under token") as info:
        credentials.now()
    assert "s3cret" not in str(info.value)
    kept.api.secrets["control"]["token"] = " s3cret\n"
    credentials.suspect()
    await kept.until(lambda cache: "token" in cache.contents["control"])
    assert credentials.now().token == "s3cret"
