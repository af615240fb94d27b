"""Secrets are read one by one, when they are wanted, suspected or too old."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from typing import Any

import pytest

from mural_operator.credentials import CredentialsMissing, PoolCredentials, secret_names
from mural_operator.secret_cache import SecretCache
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.objects import ControlTls, PoolSpec, SecretKey, Selector
from tests.mural_operator.virtual_time import in_virtual_time

WAIT_S = 20
REST_S = 550
"""Of virtual time."""


class Api(KubeClient):
    """Stands for the API server."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, str]] = {}
        self.refusal: KubeError | None = None
        self.asked: list[str] = []

    async def get(self, path: str, params: object = None) -> bytes:
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


class Timed(Api):
    """Knows when each was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, list[float]] = {}

    async def get(self, path: str, params: object = None) -> bytes:
        self.at.setdefault(path.rpartition("/")[2], []).append(asyncio.get_running_loop().time())
        return await super().get(path, params)


def at_rest(api: Timed, names: set[str], *, suspect: str = "") -> float:
    """Reads a second, after the first of each."""

    async def main() -> float:
        cache = SecretCache(api, "mural", lambda: None)
        running = asyncio.create_task(cache.run())
        cache.want("tenants", names)
        await asyncio.sleep(2.0)
        cache.suspect(suspect)
        first = len(api.asked)
        await asyncio.sleep(REST_S)
        running.cancel()
        await asyncio.wait({running})
        return (len(api.asked) - first) / REST_S

    return in_virtual_time(main())


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def test_a_thousand_secrets_at_rest_cost_a_few_reads_a_second_and_none_is_older_than_said():
    api = Timed()
    api.secrets = {f"s{at}": {"key": "k"} for at in range(1000)}
    assert at_rest(api, set(api.secrets)) < 5.0
    assert max(gap for times in api.at.values() for gap in gaps(times)) < 251


def test_some_secrets_are_read_each_minute():
    api = Timed()
    api.secrets = {f"s{at}": {"key": "k"} for at in range(200)}
    at_rest(api, set(api.secrets))
    assert max(gap for times in api.at.values() for gap in gaps(times)) < 61


def test_what_is_missing_is_looked_for_soon_unless_a_thousand_are():
    api = Timed()
    api.secrets = {f"s{at}": {"key": "k"} for at in range(50)}
    at_rest(api, {*api.secrets, "missing"})
    assert max(gaps(api.at["missing"])) < 6
    assert at_rest(Timed(), {f"s{at}" for at in range(1000)}) < 6.0


def test_a_suspicion_of_what_was_just_read_is_looked_into_soon():
    api = Timed()
    api.secrets = {"a": {"key": "k"}}
    at_rest(api, {"a"}, suspect="a")
    assert 2.0 < api.at["a"][1] - api.at["a"][0] < 5.1


async def test_many_that_cannot_be_read_are_one_line_of_the_log(kept, caplog):
    caplog.set_level("INFO")
    kept.api.refusal = KubeError(403, "Forbidden", "you may not")
    names = {f"s{at}" for at in range(100)}
    kept.cache.want("tenants", names)
    await kept.until(lambda cache: cache.knows(names))
    kept.api.refusal = None
    kept.api.secrets = {name: {"key": "k"} for name in names}
    for name in names:
        kept.cache.suspect(name)
    await kept.until(lambda cache: len(cache.contents) == 100)
    async with asyncio.timeout(WAIT_S):
        while len(caplog.records) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "and 95 more cannot be read: you may not" in said[0]
    assert "and 95 more can be read again" in said[1]


def a_spec(**more: Any) -> PoolSpec:
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
