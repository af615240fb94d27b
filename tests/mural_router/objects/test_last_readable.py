"""The last readable state of objects that a real watch tells of, through its breaks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mural_resolvers.kubernetes.client import KubeClient
from mural_resolvers.kubernetes.objects import Tenant, read_tenant
from mural_resolvers.kubernetes.paths import TENANTS
from mural_resolvers.kubernetes.watch import Watch
from mural_router.objects.readable import LastReadable, or_spoilt

WAIT_S = 20.0


class Followed:
    def __init__(self, client: KubeClient) -> None:
        watch = Watch(client, TENANTS.of("prod"), or_spoilt(read_tenant), what="tenants")
        self.tenants: LastReadable[Tenant] = LastReadable(watch, what="tenants")
        self.task = asyncio.create_task(watch.run(self._changed))
        self._more = asyncio.Event()

    def _changed(self, key: str | None) -> None:
        self.tenants.look(key)
        self._more.set()

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._more.clear()
                await self._more.wait()

    def weight(self, name: str) -> float | None:
        found = self.tenants.objects.get(f"prod/{name}")
        return None if found is None else found.spec.weight


@pytest.fixture
async def followed(kube_api: Any) -> AsyncIterator[Followed]:
    async with KubeClient(kube_api.config()) as client:
        followed = Followed(client)
        yield followed
        followed.task.cancel()
        await asyncio.gather(followed.task, return_exceptions=True)


def tenant(name: str, weight: object, uid: str = "one") -> dict[str, Any]:
    metadata = {"name": name, "namespace": "prod", "uid": uid}
    return {"metadata": metadata, "spec": {"weight": weight}}


async def test_what_is_spoilt_stays_through_another_list_and_goes_with_its_object(
    kube_api: Any, followed: Followed
) -> None:
    kube_api.put(tenant("acme", 2))
    kube_api.put(tenant("globex", 3))
    await followed.until(lambda: followed.weight("acme") == 2 and followed.weight("globex") == 3)
    kube_api.put(tenant("acme", "much"))
    await followed.until(lambda: "prod/acme" in followed.tenants.kept)
    assert followed.weight("acme") == 2
    # Meanwhile the other one is made anew, and the watch hears of none of it.
    kube_api.down()
    kube_api.put(tenant("globex", "much", uid="two"))
    kube_api.forget()
    await kube_api.up()
    await followed.until(lambda: "prod/globex" in followed.tenants.unknown)
    assert followed.weight("acme") == 2
    assert followed.weight("globex") is None
    assert [each.id for each in followed.tenants.spoilt()] == ["globex"]
    kube_api.remove("acme")
    await followed.until(lambda: followed.weight("acme") is None)
    assert "prod/acme" not in {**followed.tenants.kept, **followed.tenants.unknown}


async def test_an_object_whose_metadata_cannot_be_read_either_stays_as_it_was(
    kube_api: Any, followed: Followed
) -> None:
    kube_api.put(tenant("acme", 2))
    await followed.until(lambda: followed.weight("acme") == 2)
    bad = tenant("acme", 2)
    kube_api.put(bad | {"metadata": bad["metadata"] | {"generation": "none"}})
    await followed.until(lambda: "prod/acme" in followed.tenants.kept)
    assert followed.weight("acme") == 2
    kube_api.put(tenant("acme", 4))
    await followed.until(lambda: followed.weight("acme") == 4)
    assert not followed.tenants.kept
