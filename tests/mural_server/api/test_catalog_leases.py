"""The disk leases of a server's catalog: what is in use stays in the cache, and only that."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.disk_cache import CacheFull, CacheSettings, DiskCache
from mural_resolvers.disk_cache.layout import Layout
from mural_resolvers.disk_cache.locks import FileLock
from mural_resolvers.download import Downloader
from mural_resolvers.errors import Unavailable, UnusableAdapter
from mural_resolvers.fetcher import AdapterFetcher, FetcherSettings
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator
from mural_resolvers.resolver import AdapterDescription, LoRAResolver, SourceFile
from mural_resolvers.tenants import Principal
from mural_server.catalog import OPERATOR, AdapterCatalog, leases


class RemoteFolder(LoRAResolver):
    """A source whose content has to be downloaded."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.downloads_of: list[str] = []

    @property
    def name(self) -> str:
        return "remote"

    def folder(self, name: AdapterName) -> Path:
        return self.root / name.tenant / name.adapter / name.version

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        if not self.folder(name).is_dir():
            return None
        manifest = build_manifest(self.folder(name))
        files = tuple(SourceFile(file.path, file.size, file.sha256) for file in manifest.files)
        return AdapterDescription(name, manifest.digest, files, manifest)

    @asynccontextmanager
    async def _read(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async def pieces() -> AsyncIterator[bytes]:
            yield (self.folder(adapter.name) / file.path).read_bytes()[start:stop]

        if file.path.endswith("safetensors"):
            self.downloads_of.append(adapter.name.short)
        yield pieces()

    open = _read


class Setup:
    """A catalog over a cache with room for so many of the test's adapters."""

    def __init__(self, engine, root: Path, cache: Path, room: int) -> None:
        self.source = RemoteFolder(root)
        self.engine = engine
        self.ids = LoRAIdAllocator()
        self.layout = Layout(cache)
        self.sizes = {
            version: build_manifest(root / "acme/default" / version).num_bytes
            for version in ("v1", "v2", "v3", "v4")
        }
        quota = room * max(self.sizes.values())
        disk = DiskCache(cache, CacheSettings(quota_bytes=quota, min_free_bytes=0))
        disk.open()
        bounds = FetcherSettings(cold_loads_per_minute=1e6, cold_burst=10**6)
        fetcher = AdapterFetcher(disk, Downloader(), bounds)
        self.registry = LoRAResolverRegistry(
            [self.source], engine.info.base_spec, self.ids, fetcher=fetcher
        )
        self.catalog = AdapterCatalog(
            engine, self.registry, self.ids, served=("tiny",), adapter_wait_s=20
        )

    def is_leased(self, digest: str) -> bool:
        """Whether an eviction, by whatever process, would leave it alone."""
        lock = FileLock.try_acquire(self.layout.lock(digest))
        if lock is not None:
            lock.release()
        return lock is None

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 # a file's lock tells nobody
                await asyncio.sleep(0)

    async def close(self) -> None:
        await self.catalog.close()
        await self.registry.close()
        self.catalog.check_integrity()


MakeSetup = Callable[[int], Setup]


@pytest.fixture
async def make(engine, tmp_path: Path, make_adapter) -> AsyncIterator[MakeSetup]:
    for number in range(1, 5):
        make_adapter(tmp_path / f"source/acme/default/v{number}", number)
    async with AsyncExitStack() as held:

        def build(room: int) -> Setup:
            made = Setup(engine, tmp_path / "source", tmp_path / "cache", room)
            held.push_async_callback(made.close)
            return made

        yield build


async def test_what_a_request_uses_is_not_evicted_and_another_is_told_to_come_back(make):
    setup = make(1)
    async with setup.catalog.use(OPERATOR, "acme:v1") as served:
        assert setup.is_leased(served.lora.digest)
        with pytest.raises(CacheFull) as caught:
            async with setup.catalog.use(OPERATOR, "acme:v2"):
                pass
        assert (caught.value.status, caught.value.retry_after_s) == (503, 5.0)
        async with setup.catalog.files(served.lora) as folder:
            assert build_manifest(folder).digest == served.lora.digest
    # Its lease lingers, and gives way to whoever needs the room.
    async with setup.catalog.use(OPERATOR, "acme:v2") as other:
        assert setup.is_leased(other.lora.digest)
    assert setup.source.downloads_of == ["acme:v1", "acme:v2"]


async def test_a_lease_outlives_the_last_request_by_a_while(make, monkeypatch):
    setup = make(4)
    monkeypatch.setattr(leases, "LINGER_S", 3600.0)
    async with setup.catalog.use(OPERATOR, "acme:v1") as served:
        pass
    assert setup.is_leased(served.lora.digest)
    async with (
        setup.catalog.use(OPERATOR, "acme:v1"),
        setup.catalog.use(OPERATOR, "acme:v1"),
    ):
        assert setup.is_leased(served.lora.digest)
    await setup.catalog.close()
    assert not setup.is_leased(served.lora.digest)


async def test_what_is_merely_resident_has_no_lease_until_it_is_used_again(make, monkeypatch):
    setup = make(4)
    monkeypatch.setattr(leases, "LINGER_S", 0.0)
    async with setup.catalog.use(OPERATOR, "acme:v1") as served:
        pass
    await setup.until(lambda: not setup.is_leased(served.lora.digest))
    assert served.lora.lora_int_id in setup.engine.resident
    async with setup.catalog.use(OPERATOR, "acme:v1"):
        await setup.until(lambda: setup.is_leased(served.lora.digest))
    await setup.until(lambda: not setup.is_leased(served.lora.digest))
    assert len(setup.engine.loads) == 1


async def test_resident_weights_whose_files_were_evicted_serve_without_a_download(
    make, monkeypatch
):
    setup = make(1)
    monkeypatch.setattr(leases, "LINGER_S", 0.0)
    for name in ("acme:v1", "acme:v2"):
        async with setup.catalog.use(OPERATOR, name) as served:
            pass
        await setup.until(lambda digest=served.lora.digest: not setup.is_leased(digest))
    async with setup.catalog.use(OPERATOR, "acme:v1") as served:
        assert not setup.layout.version(served.lora.digest).exists()
        assert setup.source.downloads_of == ["acme:v1", "acme:v2"]
        # A file of it is read all the same, for its own price.
        async with setup.catalog.files(served.lora) as folder:
            assert folder.is_dir()
    assert setup.source.downloads_of == ["acme:v1", "acme:v2", "acme:v1"]


async def test_an_unload_lets_go_of_the_lease_and_says_of_how_many_bytes(make):
    setup = make(4)
    async with setup.catalog.use(OPERATOR, "acme:v1") as served:
        unloading = asyncio.create_task(setup.catalog.admin.unload("acme:v1"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert setup.is_leased(served.lora.digest)
    freed = await unloading
    assert (freed.host, freed.disk) == (100, setup.sizes["v1"])
    assert not setup.is_leased(served.lora.digest)


async def test_two_names_of_one_content_share_a_lease_until_the_last_goes(make):
    setup = make(4)
    source = setup.source.root / "acme/default"
    (source / "twin").mkdir()
    for file in (source / "v1").iterdir():
        (source / "twin" / file.name).write_bytes(file.read_bytes())
    async with setup.catalog.use(OPERATOR, "acme:v1") as served:
        pass
    async with setup.catalog.use(OPERATOR, "acme:twin") as twin:
        assert twin.lora.digest == served.lora.digest
    assert (await setup.catalog.admin.unload("acme:v1")).disk == 0
    assert setup.is_leased(served.lora.digest)
    assert (await setup.catalog.admin.unload("acme:twin")).disk == setup.sizes["v1"]
    assert not setup.is_leased(served.lora.digest)


async def test_a_load_that_is_refused_keeps_no_lease(make, monkeypatch):
    setup = make(4)
    monkeypatch.setattr(leases, "LINGER_S", 0.0)
    setup.engine.refusals["acme:v1"] = UnusableAdapter("rank 64 is above 8")
    with pytest.raises(UnusableAdapter):
        async with setup.catalog.use(OPERATOR, "acme:v1"):
            pass
    digest = build_manifest(setup.source.root / "acme/default/v1").digest
    await setup.until(lambda: not setup.is_leased(digest))


async def test_rotten_files_are_fetched_again_under_a_new_lease(make):
    setup = make(4)
    digest = build_manifest(setup.source.root / "acme/default/v1").digest
    found = await setup.registry.resolve(OPERATOR, AdapterName("acme", "default", "v1"))
    weights = found.path / "adapter_model.safetensors"
    weights.chmod(0o644)
    weights.write_bytes(b"\0" * weights.stat().st_size)
    add_lora = setup.engine.add_lora

    async def checking(lora, **options):
        if build_manifest(Path(lora.lora_path)).digest != digest:
            raise UnusableAdapter("no header")
        return await add_lora(lora, **options)

    setup.engine.add_lora = checking
    async with setup.catalog.use(OPERATOR, "acme:v1"):
        assert setup.is_leased(digest)
    assert setup.source.downloads_of == ["acme:v1", "acme:v1"]


@pytest.mark.parametrize("seed", range(4))
async def test_under_pressure_files_in_use_stay_and_who_finds_no_room_is_told_so(make, seed):
    setup = make(2)
    rng = random.Random(seed)
    leased = 0
    refusals: list[Unavailable] = []

    async def one(name: str, steps: int) -> None:
        nonlocal leased
        try:
            async with setup.catalog.use(OPERATOR, name) as model:
                # Unless its weights were resident and its files have gone before.
                is_leased = setup.is_leased(model.lora.digest)
                leased += is_leased
                for _ in range(steps):
                    await asyncio.sleep(0)
                    assert setup.layout.version(model.lora.digest).is_dir() or not is_leased
        except Unavailable as error:
            refusals.append(error)

    for _ in range(12):
        setup.engine.resident.clear()
        names = [f"acme:{rng.choice(list(setup.sizes))}" for _ in range(8)]
        await asyncio.gather(*(one(name, rng.randrange(30)) for name in names))
    assert leased > 12
    assert all(error.retry_after_s is not None for error in refusals)
    assert setup.registry.fetcher is not None
    usage = await setup.registry.fetcher.usage()
    assert usage is not None
    assert usage.bytes <= usage.quota
