"""Names to weights: look-up order, sharing by digest, reload in place, unload under load."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    Forbidden,
    InvalidInput,
    MalformedName,
    ManifestMismatch,
    RateLimited,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.manifest import build_manifest
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.resolver import LoRAResolver
from mural_resolvers.tenants import Principal
from mural_server.catalog import OPERATOR, AdapterCatalog, AlreadyLoaded

ACME = Principal(tenant="acme")


@pytest.fixture
async def catalog(engine, adapter_dir: Path) -> AsyncIterator[AdapterCatalog]:
    ids = LoRAIdAllocator()
    registry = LoRAResolverRegistry([DirectoryResolver(adapter_dir)], engine.info.base_spec, ids)
    made = AdapterCatalog(
        engine, registry, ids, served=("tiny",), adapter_wait_s=20, roots=[adapter_dir]
    )
    yield made
    await made.close()
    await registry.close()
    made.check_integrity()


class Clock:
    """Seconds, as a test sets them."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def timed(engine, adapter_dir: Path, clock: Clock) -> AsyncIterator[AdapterCatalog]:
    """A catalog under the test's own clock."""
    ids = LoRAIdAllocator()
    registry = LoRAResolverRegistry([DirectoryResolver(adapter_dir)], engine.info.base_spec, ids)
    made = AdapterCatalog(engine, registry, ids, served=("tiny",), adapter_wait_s=20, clock=clock)
    yield made
    await made.close()
    await registry.close()


async def lora_of(catalog: AdapterCatalog, model: str, principal: Principal = OPERATOR):
    async with catalog.use(principal, model) as served:
        return served.lora


async def test_the_base_names_come_first(catalog):
    assert await lora_of(catalog, "tiny") is None


async def test_a_registered_name_comes_before_the_grammar(catalog, adapter_dir):
    await catalog.admin.load("acme", str(adapter_dir / "globex/default/v1"))
    async with catalog.use(OPERATOR, "acme") as served:
        assert served.name == "acme"
    globex = await lora_of(catalog, "globex:v1")
    assert served.lora.lora_int_id == globex.lora_int_id


async def test_two_names_of_one_content_share_weights_until_the_last_goes(
    catalog, engine, adapter_dir
):
    path = str(adapter_dir / "acme/default/v1")
    await catalog.admin.load("one", path)
    await catalog.admin.load("two", path)
    first, second = await lora_of(catalog, "one"), await lora_of(catalog, "two")
    assert first.lora_int_id == second.lora_int_id
    assert (await catalog.admin.unload("one")).host == 0
    assert first.lora_int_id in engine.resident
    assert (await catalog.admin.unload("two")).host == 100
    assert engine.resident == {}


async def test_a_reload_in_place_of_other_content_gets_a_new_id(catalog, engine, adapter_dir):
    await catalog.admin.load("sql", str(adapter_dir / "acme/default/v1"))
    old = await lora_of(catalog, "sql")
    await catalog.admin.load("sql", str(adapter_dir / "acme/default/v2"), inplace=True)
    new = await lora_of(catalog, "sql")
    assert new.lora_int_id != old.lora_int_id
    await asyncio.wait_for(engine.removed.wait(), 10)
    assert set(engine.resident) == {new.lora_int_id}


async def test_a_reload_in_place_lets_the_old_content_drain(catalog, engine, adapter_dir):
    await catalog.admin.load("sql", str(adapter_dir / "acme/default/v1"))
    async with catalog.use(OPERATOR, "sql") as old:
        await catalog.admin.load("sql", str(adapter_dir / "acme/default/v2"), inplace=True)
        for _ in range(20):
            await asyncio.sleep(0)
        assert old.lora.lora_int_id in engine.resident
    await asyncio.wait_for(engine.removed.wait(), 10)
    assert old.lora.lora_int_id not in engine.resident


async def test_a_reload_in_place_of_the_same_content_changes_nothing(catalog, engine, adapter_dir):
    path = str(adapter_dir / "acme/default/v1")
    await catalog.admin.load("sql", path)
    old = await lora_of(catalog, "sql")
    await catalog.admin.load("sql", path, inplace=True)
    assert await lora_of(catalog, "sql") == old
    assert old.lora_int_id in engine.resident


async def test_an_unload_waits_for_the_requests_that_hold_the_id(catalog, engine):
    async with catalog.use(OPERATOR, "acme:v1") as served:
        unloading = asyncio.create_task(catalog.admin.unload("acme:v1"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not unloading.done()
        assert served.lora.lora_int_id in engine.resident
    assert (await unloading).host == 100


async def test_a_request_during_an_unload_of_its_content_loads_it_again(catalog, engine):
    async with catalog.use(OPERATOR, "acme:v1"):
        unloading = asyncio.create_task(catalog.admin.unload("acme:v1"))
        await asyncio.sleep(0)
        again = asyncio.create_task(lora_of(catalog, "acme:v1"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not again.done()
    await unloading
    lora = await again
    assert lora.lora_int_id in engine.resident
    assert len(engine.loads) == 2


async def test_one_load_serves_everybody_who_waits_for_it(catalog, engine):
    engine.load_gate = asyncio.Event()
    waiting = [asyncio.create_task(lora_of(catalog, "acme:v1")) for _ in range(10)]
    await asyncio.wait_for(engine.loading.wait(), 10)
    waiting[0].cancel()
    engine.load_gate.set()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    loras = [lora for lora in results[1:] if isinstance(lora, LoRARequest)]
    assert len(loras) == 9
    assert len({lora.lora_int_id for lora in loras}) == 1
    assert len(engine.loads) == 1


async def test_a_load_that_takes_too_long_is_503_and_may_be_asked_for_again(
    engine, adapter_dir: Path
):
    ids = LoRAIdAllocator()
    registry = LoRAResolverRegistry([DirectoryResolver(adapter_dir)], engine.info.base_spec, ids)
    catalog = AdapterCatalog(engine, registry, ids, served=("tiny",), adapter_wait_s=0.2)
    engine.load_gate = asyncio.Event()
    with pytest.raises(Unavailable) as caught:
        await lora_of(catalog, "acme:v1")
    assert caught.value.retry_after_s
    engine.load_gate.set()
    assert await lora_of(catalog, "acme:v1")
    assert len(engine.loads) == 1
    await catalog.close()
    await registry.close()
    catalog.check_integrity()


async def test_an_unusable_adapter_is_told_and_holds_nothing(catalog, engine, caplog):
    caplog.set_level("INFO", "mural.catalog")
    engine.refusals["acme:v1"] = UnusableAdapter("rank 64 is above 8")
    with pytest.raises(UnusableAdapter, match="rank 64"):
        await lora_of(catalog, "acme:v1")
    assert engine.resident == {}
    assert "adapter acme:v1 is not loaded: rank 64 is above 8" in caplog.messages


async def test_an_adapter_refused_at_its_look_up_is_logged(catalog, adapter_dir, caplog):
    caplog.set_level("INFO", "mural.catalog")
    (adapter_dir / "acme/default/v1/adapter_config.json").write_bytes(b"{")
    with pytest.raises(UnusableAdapter) as caught:
        await lora_of(catalog, "acme:v1")
    assert f"adapter acme:v1 is not loaded: {caught.value.message}" in caplog.messages


@pytest.mark.parametrize("name", ["globex:v1", "globex:v9", "sql", "Unregistered", "secret"])
async def test_what_is_not_the_callers_is_forbidden_before_any_look_up(catalog, adapter_dir, name):
    await catalog.admin.load("secret", str(adapter_dir / "globex/default/v1"))
    with pytest.raises(Forbidden) as caught:
        await lora_of(catalog, name, ACME)
    assert caught.value.message == Forbidden().message


@pytest.mark.parametrize("name", ["a:b:c", "..", "", "-a", "a\n", "a/b/c:d", "acme:", "acme:v\0"])
async def test_a_malformed_name_is_400(catalog, name):
    with pytest.raises(MalformedName):
        await lora_of(catalog, name, ACME)


async def test_load_takes_only_folders_inside_the_allowed_ones(catalog, adapter_dir, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (adapter_dir / "link").symlink_to(outside)
    for path in (
        str(outside),
        str(adapter_dir / "link"),
        "../outside",
        "/",
        str(adapter_dir),
        "/x",
    ):
        with pytest.raises(Forbidden):
            await catalog.admin.load("sql", path)
    with pytest.raises(InvalidInput):
        await catalog.admin.load("sql", "a\0b")
    with pytest.raises(AdapterNotFound):
        await catalog.admin.load("sql", "acme/default/v9")
    await catalog.admin.load("sql", "acme/default/v1")


async def test_names_that_are_taken_are_refused(catalog, adapter_dir):
    path = str(adapter_dir / "acme/default/v1")
    with pytest.raises(AlreadyLoaded):
        await catalog.admin.load("tiny", path)
    await catalog.admin.load("sql", path)
    with pytest.raises(AlreadyLoaded, match="has already been loaded"):
        await catalog.admin.load("sql", path)
    with pytest.raises(MalformedName):
        await catalog.admin.load("a b", path)


async def test_a_failed_load_registers_nothing(catalog, engine, adapter_dir):
    engine.refusals["sql"] = UnusableAdapter("no")
    with pytest.raises(UnusableAdapter):
        await catalog.admin.load("sql", str(adapter_dir / "acme/default/v1"))
    with pytest.raises(AdapterNotFound):
        await catalog.admin.unload("sql")


async def test_a_pinned_load_that_is_given_up_is_freed_again(engine, adapter_dir):
    ids = LoRAIdAllocator()
    registry = LoRAResolverRegistry([], engine.info.base_spec, ids)
    catalog = AdapterCatalog(
        engine, registry, ids, served=("tiny",), adapter_wait_s=0.05, roots=[adapter_dir]
    )
    engine.load_gate = asyncio.Event()
    with pytest.raises(Unavailable):
        await catalog.admin.load("late", str(adapter_dir / "acme/default/v1"), pinned=True)
    # The core cannot be told to stop a load, only to remove what comes of it.
    await asyncio.wait_for(engine.removed.wait(), 20)
    await catalog.close()
    await registry.close()
    catalog.check_integrity()


async def test_an_unload_of_the_same_content_meanwhile_leaves_a_new_name_loaded(
    catalog, engine, adapter_dir
):
    folder = str(adapter_dir / "acme/default/v1")
    await catalog.admin.load("old", folder)
    engine.loading.clear()
    engine.load_gate = asyncio.Event()
    loading = asyncio.create_task(catalog.admin.load("new", folder))
    await asyncio.wait_for(engine.loading.wait(), 20)
    unloading = asyncio.create_task(catalog.admin.unload("old"))
    await asyncio.sleep(0)
    engine.load_gate.set()
    info = await asyncio.wait_for(loading, 20)
    await asyncio.wait_for(unloading, 20)
    assert [view.name for view in catalog.view()] == ["new"]
    assert info.lora_int_id in engine.resident


async def test_make_resident_is_idempotent_and_knows_another_content(catalog, engine):
    view = await catalog.admin.make_resident("acme:v1", digest=None, level="slot", pinned=True)
    again = await catalog.admin.make_resident(
        "acme:v1", digest=view.digest, level="slot", pinned=True
    )
    assert (again.state, again.pinned) == ("slot", True)
    unpinned = await catalog.admin.make_resident("acme:v1", digest=None, level="host", pinned=False)
    assert not unpinned.pinned
    with pytest.raises(Conflict):
        await catalog.admin.make_resident("acme:v1", digest="0" * 64, level="host", pinned=False)


async def test_a_deleted_version_is_gone_once_it_is_looked_up_again(
    timed, clock, engine, adapter_dir: Path
):
    lora = await lora_of(timed, "acme:v1")
    (adapter_dir / "acme/default/v1").rename(adapter_dir / "acme/default/_gone")
    assert await lora_of(timed, "acme:v1") == lora
    clock.now = 60.0
    with pytest.raises(AdapterNotFound):
        await lora_of(timed, "acme:v1")
    await asyncio.wait_for(engine.removed.wait(), 10)
    assert engine.resident == {}


async def test_a_recheck_happens_beside_the_requests_and_takes_away_what_is_gone(
    timed, clock, engine, adapter_dir: Path
):
    lora = await lora_of(timed, "acme:v1")
    (adapter_dir / "acme/default/v1").rename(adapter_dir / "acme/default/_gone")
    clock.now = 15.0
    assert await lora_of(timed, "acme:v1") == lora
    await asyncio.wait_for(engine.removed.wait(), 10)
    with pytest.raises(AdapterNotFound):
        await lora_of(timed, "acme:v1")


async def test_what_is_known_is_served_while_its_source_is_down(
    timed, clock, engine, adapter_dir: Path
):
    lora = await lora_of(timed, "acme:v1")
    os.rename(adapter_dir, f"{adapter_dir}.away")
    for clock.now in (15.0, 70.0, 75.0, 1000.0):
        assert await lora_of(timed, "acme:v1") == lora
    with pytest.raises(Unavailable):
        await lora_of(timed, "acme:v2")


async def test_unusable_content_is_not_read_again_for_a_while(
    timed, clock, engine, adapter_dir: Path
):
    engine.refusals["acme:v1"] = UnusableAdapter("rank 64 is above 8")
    for _ in range(3):
        with pytest.raises(UnusableAdapter, match="rank 64"):
            await lora_of(timed, "acme:v1")
    assert len(engine.loads) == 1
    engine.refusals.clear()
    clock.now = 301.0
    assert await lora_of(timed, "acme:v1")


@pytest.mark.parametrize(
    "error",
    [
        ManifestMismatch("the files are others by now"),
        AdapterNotFound("The adapter globex:copy does not exist."),
        Forbidden(),
        RateLimited("Too many of this tenant's adapters are being fetched."),
    ],
)
async def test_what_another_tenant_s_load_fails_with_does_not_refuse_the_same_content(
    catalog, engine, adapter_dir, error
):
    shutil.copytree(adapter_dir / "acme/default/v1", adapter_dir / "globex/default/copy")
    engine.refusals["globex:copy"] = error
    engine.load_gate = asyncio.Event()
    spoilt = asyncio.create_task(lora_of(catalog, "globex:copy"))
    await asyncio.wait_for(engine.loading.wait(), 10)
    sound = asyncio.create_task(lora_of(catalog, "acme:v1"))
    async with asyncio.timeout(10):
        # Known, and so waiting for the load that is under way.
        while catalog.view()[-1].name != "acme:v1":  # noqa: ASYNC110 # no event tells of it
            await asyncio.sleep(0)
    engine.load_gate.set()
    with pytest.raises(type(error)):
        await spoilt
    assert (await sound).lora_int_id in engine.resident


async def test_a_key_s_sources_decide_what_it_sees_and_what_its_no_takes_away(
    engine, adapter_dir, tmp_path, make_adapter
):
    make_adapter(tmp_path / "other/acme/default/v9", 9)
    now = 0.0
    ids = LoRAIdAllocator()
    sources = [DirectoryResolver(adapter_dir), DirectoryResolver(tmp_path / "other", name="other")]
    registry = LoRAResolverRegistry(sources, engine.info.base_spec, ids)
    catalog = AdapterCatalog(
        engine, registry, ids, served=("tiny",), adapter_wait_s=20, clock=lambda: now
    )
    limited = Principal(tenant="acme", sources=frozenset({"other"}))
    await lora_of(catalog, "acme:v1", ACME)
    shutil.copytree(adapter_dir / "acme/default/v2", tmp_path / "other/acme/default/v2")
    await lora_of(catalog, "acme:v2", ACME)
    lora = await lora_of(catalog, "acme:v2", limited)
    await lora_of(catalog, "acme:v9", limited)
    assert [view.name for view in catalog.visible(ACME)] == ["acme:v1", "acme:v2", "acme:v9"]
    assert [view.name for view in catalog.visible(limited)] == ["acme:v2", "acme:v9"]

    shutil.rmtree(tmp_path / "other/acme/default/v2")
    now = 60.0
    with pytest.raises(AdapterNotFound):
        await lora_of(catalog, "acme:v2", limited)
    assert lora.lora_int_id in engine.resident
    assert await lora_of(catalog, "acme:v2", ACME) == lora
    await catalog.close()
    await registry.close()


async def test_a_server_without_adapters_knows_none(adapter_dir, engine):
    engine.info.max_loras = 0
    ids = LoRAIdAllocator()
    registry = LoRAResolverRegistry([DirectoryResolver(adapter_dir)], engine.info.base_spec, ids)
    catalog = AdapterCatalog(engine, registry, ids, served=("tiny",), adapter_wait_s=20)
    with pytest.raises(AdapterNotFound, match="off"):
        await lora_of(catalog, "acme:v1")
    await registry.close()


async def turns(random: Random) -> None:
    for _ in range(random.randrange(6)):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(12))
async def test_under_random_loads_and_unloads_every_use_is_of_resident_weights(
    engine, adapter_dir: Path, seed: int
):
    random = Random(seed)
    engine.pause = lambda: turns(random)
    ids = LoRAIdAllocator()
    registry = LoRAResolverRegistry([DirectoryResolver(adapter_dir)], engine.info.base_spec, ids)
    catalog = AdapterCatalog(
        engine, registry, ids, served=("tiny",), adapter_wait_s=60, roots=[adapter_dir]
    )
    folders = ["acme/default/v1", "acme/default/v2", "globex/default/v1"]
    digests = {folder: build_manifest(adapter_dir / folder).digest for folder in folders}
    fixed = {"acme:v1": digests[folders[0]], "globex:v1": digests[folders[2]]}
    served = 0

    async def one() -> None:
        nonlocal served
        name = random.choice(["one", "two", *fixed])
        await turns(random)
        try:
            match random.randrange(6):
                case 0 if name not in fixed:
                    await catalog.admin.load(name, random.choice(folders), inplace=True)
                case 1:
                    await catalog.admin.unload(name)
                case _:
                    async with catalog.use(OPERATOR, name) as model:
                        assert model.lora is not None
                        for _ in range(random.randrange(8)):
                            assert model.lora.lora_int_id in engine.resident
                            await asyncio.sleep(0)
                    assert model.name == name
                    assert model.lora.digest == fixed.get(name, model.lora.digest)
                    assert ids.id_for(model.lora.digest) == model.lora.lora_int_id
                    served += 1
        except AdapterNotFound:
            return

    for _ in range(8):
        await asyncio.gather(*(one() for _ in range(12)))
    assert served
    for view in catalog.view():
        await catalog.admin.unload(view.name)
    await asyncio.gather(*catalog._residency._removals.values())
    assert engine.resident == {}
    await catalog.close()
    await registry.close()
    catalog.check_integrity()
    registry.check_integrity()


class Branch(LoRAResolver):
    """``latest`` is whatever version it is told, and may be taken for that for five seconds."""

    name = "branch"

    def __init__(self, inner: DirectoryResolver) -> None:
        self.inner = inner
        self.head = "v1"
        self.asked: list[str] = []

    async def resolve(self, principal, name, base):
        self.asked.append(name.short)
        if name.version != "latest":
            return await self.inner.resolve(principal, name, base)
        found = await self.inner.resolve(principal, name.at(self.head), base)
        return None if found is None else dataclasses.replace(found, alias_ttl_s=5.0)


async def test_an_alias_is_asked_for_again_as_often_as_its_source_wants(
    engine, adapter_dir, clock: Clock
):
    ids = LoRAIdAllocator()
    source = Branch(DirectoryResolver(adapter_dir))
    registry = LoRAResolverRegistry([source], engine.info.base_spec, ids, clock=clock)
    catalog = AdapterCatalog(
        engine, registry, ids, served=("tiny",), adapter_wait_s=20, clock=clock
    )
    first = await lora_of(catalog, "acme", ACME)
    source.head = "v2"
    clock.now = 4.9
    assert await lora_of(catalog, "acme:latest", ACME) == first
    assert len(source.asked) == 1
    # Another caller's answer is none to this one.
    assert (await lora_of(catalog, "acme")).lora_name == "acme:v2"
    clock.now = 5.0
    assert (await lora_of(catalog, "acme", ACME)).lora_name == "acme:v2"
    # What is unloaded is not brought back by a memory of its alias.
    await catalog.admin.unload("acme:v2")
    asked = len(source.asked)
    assert (await lora_of(catalog, "acme", ACME)).lora_name == "acme:v2"
    assert len(source.asked) == asked + 1
    await catalog.close()
    await registry.close()
    await source.inner.close()
    catalog.check_integrity()


async def test_an_adapter_that_left_the_memory_is_told_by_what_it_took_there(catalog, engine):
    def told() -> tuple[str, int]:
        [view] = catalog.view()
        return view.state, view.bytes

    await catalog.find(ACME, "acme:v1")
    # Two halves of rank 4 on a width of 8, in the server's float32.
    assert told() == ("disk", 2 * 4 * 8 * 4)
    served = await lora_of(catalog, "acme:v1")
    assert told() == ("host", 100)
    del engine.resident[served.lora_int_id]
    assert told() == ("disk", 100)
