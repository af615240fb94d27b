"""The chain: sources that download, the cache in front of them, and what happens when they fail."""

from __future__ import annotations

import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.disk_cache import CacheSettings, DiskCache, Staging
from mural_resolvers.download import Downloader, DownloadSettings
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    ManifestMismatch,
    MuralError,
    RateLimited,
    TooLarge,
    Unavailable,
)
from mural_resolvers.fetcher import AdapterFetcher, FetcherSettings
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.registry import LoRAResolverRegistry, RegistrySettings
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, ResolvedAdapter, SourceFile
from mural_resolvers.tenants import ANYONE, Principal

ACME = Principal(tenant="acme")
GLOBEX = Principal(tenant="globex")
V1 = parse_name("acme:v1")


class Shelf(LoRAResolver):
    """A source in memory, which can be made to fail."""

    def __init__(self, name: str = "shelf", *, hashes: bool = True) -> None:
        self._name = name
        self._hashes = hashes
        self.versions: dict[AdapterName, dict[str, bytes]] = {}
        self.aliases: dict[AdapterName, AdapterName] = {}
        self.error: MuralError | None = None
        self.read_error: MuralError | None = None
        self.fails_for: AdapterName | None = None
        self.gate: asyncio.Event | None = None
        self.hang = False
        self.asked = 0
        self.reads: list[str] = []
        self.reading = asyncio.Event()

    @property
    def name(self) -> str:
        return self._name

    def put(self, name: AdapterName, folder: Path) -> None:
        self.versions[name] = {path.name: path.read_bytes() for path in folder.iterdir()}

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        self.asked += 1
        if self.hang:
            await asyncio.Event().wait()
        if self.error is not None:
            raise self.error
        name = self.aliases.get(name, name)
        files = self.versions.get(name)
        if files is None:
            return None
        described = [
            SourceFile(path, len(data), hashlib.sha256(data).hexdigest() if self._hashes else None)
            for path, data in files.items()
        ]
        return AdapterDescription(name, f"r{hash(tuple(files.items()))}", tuple(described))

    @asynccontextmanager
    async def _read(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async def pieces() -> AsyncIterator[bytes]:
            yield self.versions[adapter.name][file.path][start:stop]

        self.reads.append(file.path)
        self.reading.set()
        if self.gate is not None:
            await self.gate.wait()
        if self.read_error is not None and self.fails_for in (None, adapter.name):
            raise self.read_error
        yield pieces()

    open = _read


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


Make = Callable[..., LoRAResolverRegistry]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def make(tmp_path: Path, base_spec: BaseSpec, clock: Clock) -> AsyncIterator[Make]:
    made: list[LoRAResolverRegistry] = []

    def build(
        *resolvers: LoRAResolver,
        quota_bytes: int = 1 << 24,
        fetch: FetcherSettings | None = None,
        settings: RegistrySettings | None = None,
    ) -> LoRAResolverRegistry:
        cache = DiskCache(
            tmp_path / "cache", CacheSettings(quota_bytes=quota_bytes, min_free_bytes=0)
        )
        cache.open()
        downloader = Downloader(DownloadSettings(max_attempts=1))
        fetcher = AdapterFetcher(cache, downloader, fetch, clock=clock)
        registry = LoRAResolverRegistry(
            resolvers, base_spec, LoRAIdAllocator(), settings, fetcher=fetcher, clock=clock
        )
        made.append(registry)
        return registry

    yield build
    for registry in made:
        registry.check_integrity()
        await registry.close()


@pytest.fixture
def shelf(tmp_path: Path, write_adapter: Callable[..., Path]) -> Shelf:
    shelf = Shelf()
    shelf.put(V1, write_adapter(tmp_path / "v1"))
    shelf.put(V1.at("v2"), write_adapter(tmp_path / "v2", fill=b"\x02"))
    shelf.put(parse_name("globex:same"), tmp_path / "v1")
    return shelf


async def patiently(
    registry: LoRAResolverRegistry, principal: Principal, name: AdapterName
) -> ResolvedAdapter:
    """Come back until it is there: a busy disk may take longer than a caller waits."""
    async with asyncio.timeout(30):
        while True:
            try:
                return await registry.resolve(principal, name)
            except Unavailable:
                await asyncio.sleep(0)


async def test_what_is_described_is_fetched_once_and_lies_in_the_cache(
    make: Make, shelf: Shelf, tmp_path: Path
) -> None:
    registry = make(shelf)
    waiting = [registry.resolve(ACME, V1) for _ in range(5)]
    found = await asyncio.gather(*waiting, registry.resolve(ANYONE, V1))
    again = await registry.resolve(ACME, V1)

    assert {adapter.path for adapter in (*found, again)} == {again.path}
    assert again.cached
    assert again.manifest == build_manifest(tmp_path / "v1")
    assert build_manifest(again.path) == again.manifest
    assert sorted(shelf.reads) == ["adapter_config.json", "adapter_model.safetensors"]


async def test_one_content_under_two_tenants_names_is_fetched_once(
    make: Make, shelf: Shelf
) -> None:
    registry = make(shelf)
    shelf.gate = asyncio.Event()
    one = asyncio.create_task(registry.resolve(ACME, V1))
    await shelf.reading.wait()
    two = asyncio.create_task(registry.resolve(GLOBEX, parse_name("globex:same")))
    while shelf.asked < 2:  # noqa: ASYNC110 # until it waits for the flight of the first
        await asyncio.sleep(0)
    shelf.gate.set()

    assert (await one).path == (await two).path
    assert len(shelf.reads) == 2


@pytest.mark.parametrize("error", [AdapterNotFound("acme:v1 is gone"), Forbidden(), Conflict("x")])
async def test_what_another_tenant_s_download_fails_with_is_not_this_one_s(
    make: Make, shelf: Shelf, error: MuralError
) -> None:
    registry = make(shelf)
    shelf.gate, shelf.read_error = asyncio.Event(), error
    one = asyncio.create_task(registry.resolve(ACME, V1))
    await shelf.reading.wait()
    two = asyncio.create_task(registry.resolve(GLOBEX, parse_name("globex:same")))
    while shelf.asked < 2:  # noqa: ASYNC110 # until it waits for the flight of the first
        await asyncio.sleep(0)
    shelf.fails_for = V1
    shelf.gate.set()

    with pytest.raises(type(error)):
        await one
    assert (await two).name == parse_name("globex:same")


async def test_a_source_without_hashes_is_fetched_once_per_revision(
    make: Make, tmp_path: Path, write_adapter: Callable[..., Path]
) -> None:
    shelf = Shelf(hashes=False)
    shelf.put(V1, write_adapter(tmp_path / "v1"))
    registry = make(shelf)
    first = await registry.resolve(ACME, V1)
    assert (await registry.resolve(ACME, V1)).path == first.path
    assert len(shelf.reads) == 2


async def test_a_version_that_changed_at_its_source_is_refused_under_its_name(
    make: Make, shelf: Shelf, tmp_path: Path
) -> None:
    registry = make(shelf)
    await registry.resolve(ACME, V1)
    shelf.put(V1, tmp_path / "v2")

    with pytest.raises(Conflict):
        await registry.resolve(ACME, V1)
    assert (await registry.resolve(ACME, V1.at("v2"))).name.version == "v2"


@pytest.mark.parametrize("failure", ["error", "hang"])
async def test_what_is_cached_is_served_while_the_source_is_down(
    make: Make, shelf: Shelf, failure: str
) -> None:
    registry = make(shelf, settings=RegistrySettings(source_timeout_s=0.1))
    shelf.aliases[V1.at("latest")] = V1
    known = await registry.resolve(ACME, V1.at("latest"))
    if failure == "hang":
        shelf.hang = True
    else:
        shelf.error = Unavailable("down")

    assert await registry.resolve(ACME, V1) == known
    assert await registry.resolve(ACME, V1.at("latest")) == known
    with pytest.raises(Unavailable):
        await registry.resolve(ACME, V1.at("v2"))
    with pytest.raises(Forbidden):
        await registry.resolve(GLOBEX, V1)


async def test_a_source_that_hangs_keeps_nobody_waiting_twice(
    make: Make, shelf: Shelf, clock: Clock
) -> None:
    registry = make(shelf, settings=RegistrySettings(source_timeout_s=0.05))
    shelf.hang = True
    for version in ("v1", "v2", "v3"):
        with pytest.raises(Unavailable) as caught:
            await registry.resolve(ACME, V1.at(version))
        assert caught.value.retry_after_s
    assert shelf.asked == 1
    clock.now += 5
    shelf.hang = False
    assert (await registry.resolve(ACME, V1)).cached
    assert (await registry.resolve(ACME, V1.at("v2"))).cached


async def test_a_source_that_is_down_is_left_alone_for_what_is_cached(
    make: Make, shelf: Shelf, clock: Clock
) -> None:
    registry = make(shelf)
    await registry.resolve(ACME, V1)
    shelf.error = Unavailable("down")
    for _ in range(10):
        await registry.resolve(ACME, V1)
    assert shelf.asked == 2
    clock.now += 10
    shelf.error = None
    await registry.resolve(ACME, V1)
    assert shelf.asked == 3


@pytest.mark.parametrize("refusal", [Forbidden(), AdapterNotFound("gone")])
async def test_what_the_source_takes_back_is_not_served_when_it_goes_down(
    make: Make, shelf: Shelf, clock: Clock, refusal: MuralError
) -> None:
    registry = make(shelf)
    await registry.resolve(ACME, V1)
    shelf.error = refusal
    with pytest.raises(type(refusal)):
        await registry.resolve(ACME, V1)
    clock.now += 60
    shelf.error = Unavailable("down")
    with pytest.raises(Unavailable):
        await registry.resolve(ACME, V1)


async def test_another_tenant_is_refused_at_every_stage_without_a_look_up(
    make: Make, shelf: Shelf
) -> None:
    registry = make(shelf)
    shelf.gate = asyncio.Event()
    downloading = asyncio.create_task(registry.resolve(ACME, V1))
    await shelf.reading.wait()
    bodies = []

    async def ask_as_globex(name: AdapterName) -> None:
        asked = shelf.asked
        with pytest.raises(Forbidden) as caught:
            await registry.resolve(GLOBEX, name)
        bodies.append(caught.value.message)
        assert shelf.asked == asked

    await ask_as_globex(V1)  # while it is downloaded
    shelf.gate.set()
    await downloading
    await ask_as_globex(V1)  # from the cache
    with pytest.raises(AdapterNotFound):
        await registry.resolve(ACME, V1.at("v9"))
    await ask_as_globex(V1.at("v9"))  # from the negative answers
    await ask_as_globex(V1.at("v10"))  # what nobody ever asked for
    assert len(set(bodies)) == 1


async def test_a_waiter_s_bound_leaves_the_download_to_those_who_come_back(
    make: Make, shelf: Shelf
) -> None:
    registry = make(shelf, settings=RegistrySettings(timeout_s=0.1))
    shelf.gate = asyncio.Event()
    with pytest.raises(Unavailable) as caught:
        await registry.resolve(ACME, V1)
    assert caught.value.retry_after_s
    shelf.gate.set()
    assert (await patiently(registry, ACME, V1)).cached
    assert len(shelf.reads) == 2


async def test_a_tenant_s_cold_loads_have_a_rate(
    make: Make, tmp_path: Path, write_adapter: Callable[..., Path], clock: Clock
) -> None:
    shelf = Shelf()
    for number in range(6):
        folder = write_adapter(tmp_path / f"v{number}", fill=bytes([number + 1]))
        shelf.put(V1.at(f"v{number}"), folder)
        shelf.put(parse_name(f"globex:v{number}"), folder)
    registry = make(shelf, fetch=FetcherSettings(cold_loads_per_minute=6, cold_burst=3))
    for number in range(3):
        await registry.resolve(ACME, V1.at(f"v{number}"))
    with pytest.raises(RateLimited) as caught:
        await registry.resolve(ACME, V1.at("v3"))

    assert caught.value.retry_after_s == pytest.approx(10)
    await registry.resolve(ACME, V1)  # warm
    await registry.resolve(GLOBEX, parse_name("globex:v4"))
    clock.now += 10
    await registry.resolve(ACME, V1.at("v3"))


async def test_downloads_that_nobody_waits_for_any_more_do_not_pile_up(
    make: Make, shelf: Shelf
) -> None:
    settings = RegistrySettings(timeout_s=0.05)
    registry = make(shelf, settings=settings, fetch=FetcherSettings(max_pending_per_tenant=1))
    shelf.gate = asyncio.Event()
    with pytest.raises(Unavailable):
        await registry.resolve(ACME, V1)
    with pytest.raises(RateLimited):
        await registry.resolve(ACME, V1.at("v2"))
    shelf.versions[parse_name("globex:own")] = shelf.versions[V1.at("v2")]
    shelf.gate.set()
    assert (await patiently(registry, GLOBEX, parse_name("globex:own"))).cached


async def test_a_version_above_the_quota_is_refused_before_it_is_read(
    make: Make, shelf: Shelf
) -> None:
    registry = make(shelf, quota_bytes=100)
    with pytest.raises(TooLarge):
        await registry.resolve(ACME, V1)
    assert shelf.reads == []


async def test_a_version_that_lies_about_itself_is_not_kept(make: Make, shelf: Shelf) -> None:
    registry = make(shelf)
    described = await shelf.resolve(ACME, V1, None)  # type: ignore[arg-type] # it does not look
    assert described is not None

    async def lying(principal: Principal, name: AdapterName, base: BaseSpec) -> object:
        files = tuple(SourceFile(f.path, f.size, "0" * 64) for f in described.files)
        return AdapterDescription(name, "r", files)

    shelf.resolve = lying  # type: ignore[method-assign,assignment]
    with pytest.raises(ManifestMismatch):
        await registry.resolve(ACME, V1)


async def test_a_read_that_breaks_is_503_and_may_be_asked_for_again(
    make: Make, shelf: Shelf
) -> None:
    registry = make(shelf)
    shelf.read_error = Unavailable("cut")
    with pytest.raises(Unavailable):
        await registry.resolve(ACME, V1)
    shelf.read_error = None
    assert (await registry.resolve(ACME, V1)).cached


async def test_a_lease_fetches_again_what_was_evicted(
    make: Make, shelf: Shelf, tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in (tmp_path / "v1").iterdir())
    registry = make(shelf, quota_bytes=int(size * 1.5))
    request = await registry.get(ACME, V1)
    await registry.resolve(ACME, V1.at("v2"))
    assert not await asyncio.to_thread(os.path.lexists, request.lora_path)

    async with registry.lease(ACME, request) as path:
        assert build_manifest(path).digest == request.digest
        with pytest.raises(Unavailable):
            await registry.resolve(ACME, V1.at("v2"))


async def test_a_grant_of_an_alias_is_enough_to_fetch_again_what_was_evicted(
    make: Make, shelf: Shelf, tmp_path: Path
) -> None:
    size = sum(path.stat().st_size for path in (tmp_path / "v1").iterdir())
    registry = make(shelf, quota_bytes=int(size * 1.5))
    shelf.aliases[V1.at("stable")] = V1
    guest = Principal(tenant="globex", grants=("acme:stable",))
    request = await registry.get(guest, V1.at("stable"))
    await registry.resolve(ACME, V1.at("v2"))

    async with registry.lease(guest, request) as path:
        assert build_manifest(path).digest == request.digest
    with pytest.raises(Forbidden):
        await registry.get(guest, V1)


async def test_what_is_asked_for_again_is_evicted_last(
    make: Make, shelf: Shelf, tmp_path: Path, write_adapter: Callable[..., Path]
) -> None:
    size = sum(path.stat().st_size for path in (tmp_path / "v1").iterdir())
    shelf.put(V1.at("v3"), write_adapter(tmp_path / "v3", fill=b"\x03"))
    registry = make(shelf, quota_bytes=int(size * 2.5))
    hot = await registry.resolve(ACME, V1)
    cold = await registry.resolve(ACME, V1.at("v2"))
    await registry.resolve(ACME, V1)
    await registry.resolve(ACME, V1.at("v3"))

    assert await asyncio.to_thread(os.path.lexists, hot.path)
    assert not await asyncio.to_thread(os.path.lexists, cold.path)


async def test_bits_that_rot_in_the_cache_are_found_and_fetched_again(
    make: Make, shelf: Shelf
) -> None:
    registry = make(shelf)
    request = await registry.get(ACME, V1)
    assert not await registry.repair(request)
    weights = Path(request.lora_path) / "adapter_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.chmod(0o600)
    weights.write_bytes(data)

    assert await registry.repair(request)
    async with registry.lease(ACME, request) as path:
        assert build_manifest(path).digest == request.digest


async def test_a_source_that_a_tenant_may_not_use_is_not_asked(make: Make, shelf: Shelf) -> None:
    registry = make(shelf)
    with pytest.raises(AdapterNotFound):
        await registry.resolve(Principal(tenant="acme", sources=frozenset({"other"})), V1)
    assert shelf.asked == 0
    assert await registry.resolve(Principal(tenant="acme", sources=frozenset({"shelf"})), V1)


async def test_a_no_from_the_sources_that_one_key_may_use_takes_nothing_from_the_others(
    make: Make, shelf: Shelf, clock: Clock
) -> None:
    registry = make(shelf)
    known = await registry.resolve(ACME, V1)
    with pytest.raises(AdapterNotFound):
        await registry.resolve(Principal(tenant="acme", sources=frozenset({"other"})), V1)
    shelf.error = Unavailable("down")
    assert await registry.resolve(ACME, V1) == known


async def test_closing_takes_back_what_a_thread_was_about_to_get(
    make: Make, shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, begun, go_on = DiskCache.stage, threading.Event(), threading.Event()

    def slow(cache: DiskCache, num_bytes: int, tenant: str) -> Staging:
        begun.set()
        assert go_on.wait(30)
        return stage(cache, num_bytes, tenant)

    monkeypatch.setattr(DiskCache, "stage", slow)
    registry = make(shelf)
    waiting = asyncio.create_task(registry.resolve(ACME, V1))
    await asyncio.to_thread(begun.wait, 30)
    closing = asyncio.create_task(registry.close())
    while not waiting.done():  # noqa: ASYNC110 # its flight has been cancelled then
        await asyncio.sleep(0)
    go_on.set()
    await closing

    with pytest.raises(Unavailable):
        await waiting
    assert not await asyncio.to_thread(os.listdir, tmp_path / "cache" / "staging")


async def test_a_lease_may_end_after_the_end(make: Make, shelf: Shelf) -> None:
    registry = make(shelf)
    request = await registry.get(ACME, V1)
    async with registry.lease(ACME, request):
        await registry.close()
    with pytest.raises(Unavailable):
        async with registry.lease(ACME, request):
            raise AssertionError("nothing is leased any more")
