"""The client and the watch against a real API server (``make test-cluster``)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes import watch as watch_module
from mural_resolvers.kubernetes.client import KubeClient, KubeError
from mural_resolvers.kubernetes.config import cluster_config
from mural_resolvers.kubernetes.paths import LEASES, Resource
from mural_resolvers.kubernetes.watch import Watch, from_json

pytestmark = pytest.mark.cluster

CONFIG_MAPS = Resource("", "v1", "configmaps")
WAIT_S = 90.0


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"test": "yes"}}, "data": data}


def read(fields: Any) -> dict[str, str]:
    data: dict[str, str] = fields["data"]
    if "bad" in data:
        raise InvalidInput("This one is bad.")
    return data


@pytest.fixture
async def client(cluster: Any) -> AsyncIterator[KubeClient]:
    async with KubeClient(cluster_config()) as client:
        yield client


class Kept:
    """A running watch of the test's config maps, on a client of its own."""

    def __init__(self, namespace: str) -> None:
        self.client = KubeClient(cluster_config())
        self.watch = Watch(
            self.client,
            CONFIG_MAPS.of(namespace),
            from_json(read),
            label_selector="test=yes",
            what="config maps",
        )
        self.keys: list[str | None] = []
        self._more = asyncio.Event()
        self.task = asyncio.create_task(self.watch.run(self._changed))

    def _changed(self, key: str | None) -> None:
        self.keys.append(key)
        self._more.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._more.clear()
                await self._more.wait()

    async def close(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.client.__aexit__(None, None, None)


@pytest.fixture
async def kept(cluster: Any) -> AsyncIterator[Kept]:
    kept = Kept(cluster.namespace)
    yield kept
    await kept.close()


async def test_every_change_is_heard_over_one_list_and_one_watch(cluster, client, kept):
    await kept.until(lambda: kept.watch.fresh)
    of = CONFIG_MAPS.of(cluster.namespace)
    key, path = f"{cluster.namespace}/a", f"{of}/a"
    # U+0085 ends a line for some; the API server sends it as it is.
    await client.create(of, config_map("a", text="one\u0085two\u2028three"))
    await kept.until(lambda: key in kept.watch.objects)
    assert kept.watch.objects[key] == {"text": "one\u0085two\u2028three"}
    await client.patch(path, {"data": {"bad": "yes"}})
    await kept.until(lambda: key in kept.watch.invalid)
    assert not kept.watch.objects
    await client.patch(path, [{"op": "remove", "path": "/data/bad"}], kind="json")
    await kept.until(lambda: key in kept.watch.objects)
    await client.patch(
        path,
        {"apiVersion": "v1", "kind": "ConfigMap", "data": {"more": "1"}},
        kind="apply",
        params={"fieldManager": "mural-test"},
    )
    await kept.until(lambda: "more" in kept.watch.objects[key])
    # Without the label it is out of the selection, and so of the watch.
    await client.patch(path, {"metadata": {"labels": {"test": "no"}}})
    await kept.until(lambda: not kept.watch.objects)
    await client.patch(path, {"metadata": {"labels": {"test": "yes"}}})
    await kept.until(lambda: key in kept.watch.objects)
    await client.delete(path)
    await client.delete(path)
    await kept.until(lambda: not kept.watch.objects)
    assert kept.client.calls == {"list": 1, "watch": 1}
    assert client.calls == {"create": 1, "patch": 5, "delete": 2}


async def test_refusals_have_the_apis_own_words(cluster, client):
    of = CONFIG_MAPS.of(cluster.namespace)
    first = json.loads(await client.create(of, config_map("a", n="1")))
    await client.patch(f"{of}/a", {"data": {"n": "2"}})
    cases = [
        (client.replace(f"{of}/a", first | {"data": {"n": "3"}}), 409, "Conflict"),
        (client.create(of, config_map("a")), 409, "AlreadyExists"),
        (client.get(f"{of}/absent"), 404, "NotFound"),
        (client.create(of, config_map("A_B")), 422, "Invalid"),
        (client.get("/apis/mural.dev/v0/nothing"), 404, "Not Found"),
    ]
    for call, status, reason in cases:
        with pytest.raises(KubeError) as caught:
            await call
        assert (caught.value.status, caught.value.reason) == (status, reason)


async def test_of_two_that_replace_one_object_one_wins(cluster, client):
    of = LEASES.of(cluster.namespace)
    lease = {"metadata": {"name": "leader"}, "spec": {"holderIdentity": "nobody"}}
    made = json.loads(await client.create(of, lease))
    path = LEASES.named(cluster.namespace, "leader")

    async def take(who: str) -> bool:
        try:
            await client.replace(path, made | {"spec": {"holderIdentity": who}})
        except KubeError as error:
            if error.status != 409:
                raise
            return False
        return True

    won = await asyncio.gather(*(take(f"candidate-{number}") for number in range(8)))
    assert sum(won) == 1
    holder = json.loads(await client.get(path))["spec"]["holderIdentity"]
    assert holder == f"candidate-{won.index(True)}"


async def test_the_real_servers_pages_make_one_list(cluster, client, monkeypatch):
    of = CONFIG_MAPS.of(cluster.namespace)
    for number in range(7):
        await client.create(of, config_map(f"m{number}", n=str(number)))
    monkeypatch.setattr(watch_module, "PAGE", 2)
    kept = Kept(cluster.namespace)
    try:
        await kept.until(lambda: kept.watch.fresh)
        names = {f"{cluster.namespace}/m{number}" for number in range(7)}
        assert set(kept.watch.objects) == names
        assert kept.client.calls == {"list": 4, "watch": 1}
    finally:
        await kept.close()


async def test_a_killed_api_server_costs_no_event_and_no_storm_of_lists(
    cluster, client, kept, caplog
):
    caplog.set_level(logging.INFO)
    of = CONFIG_MAPS.of(cluster.namespace)
    await kept.until(lambda: kept.watch.fresh)
    written: dict[str, dict[str, str]] = {}
    ended = asyncio.Event()

    async def write() -> None:
        """One after the other, each until it is taken."""
        number = 0
        while not ended.is_set():
            number += 1
            name = f"w{number % 20}"
            while True:
                try:
                    await client.delete(f"{of}/{name}")
                    await client.create(of, config_map(name, n=str(number)))
                    break
                except KubeError as error:
                    # Killed in the middle of a write: it may have been done.
                    if error.status not in (0, 403, 409, 429, 500, 503):
                        raise
                    await asyncio.sleep(0.05)
            written[f"{cluster.namespace}/{name}"] = {"n": str(number)}

    writing = asyncio.create_task(write())
    await kept.until(lambda: len(kept.watch.objects) >= 10)
    await asyncio.to_thread(cluster.kill_api_server)
    await kept.until(lambda: not kept.watch.fresh)
    assert kept.watch.objects
    await asyncio.to_thread(cluster.start)
    await kept.until(lambda: kept.watch.fresh)
    heard = len(kept.keys)
    await kept.until(lambda: len(kept.keys) > heard + 20)
    ended.set()
    await writing
    await kept.until(lambda: dict(kept.watch.objects) == written)
    # One to begin with; one more if the new server does not know what the old one had told.
    assert kept.client.calls["list"] <= 3
    assert kept.client.calls["watch"] <= 40
    said = [each.message for each in caplog.records if each.name == watch_module.log.name]
    assert sum("cannot be watched" in each for each in said) == 1
    assert sum("watched again" in each for each in said) == 1
