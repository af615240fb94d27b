"""From a name with an alias to an exact version."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest

from mural_resolvers.directory_store import DirectoryStore
from mural_resolvers.errors import AdapterNotFound, Unavailable
from mural_resolvers.manifest import MANIFEST_FILE, Manifest, build_manifest
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.open_store import open_store
from mural_resolvers.store import Aliases
from mural_resolvers.versions import AliasTarget
from mural_router.routing.versions import (
    Exact,
    KnownVersions,
    StoreVersions,
    Versions,
    VersionSettings,
    VersionSource,
)

ADAPTER = Path(__file__).parents[3] / "examples/adapters/globex/default/v1"
SETTINGS = VersionSettings(ttl_s=5.0, timeout_s=0.05)
CANARY = {"stable": (AliasTarget("v3", 90), AliasTarget("v4", 10))}


class Source(VersionSource):
    """Answers from memory; ``hold`` keeps it from answering, ``error`` makes it fail."""

    def __init__(self, aliases: Aliases, *versions: str) -> None:
        self.said = KnownVersions(aliases, {version: version * 2 for version in versions})
        self.reads = 0
        self.error: Exception | None = None
        self.hold = asyncio.Event()
        self.hold.set()

    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        self.reads += 1
        await self.hold.wait()
        if self.error is not None:
            raise self.error
        return self.said


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_an_alias_is_split_by_weight_and_sticky_by_user() -> None:
    versions = Versions(Source(CANARY, "v3", "v4"), SETTINGS)
    name = parse_name("acme:stable")
    picked = [str((await versions.resolve(name, f"user-{at}")).name) for at in range(2_000)]
    again = [str((await versions.resolve(name, f"user-{at}")).name) for at in range(2_000)]
    assert picked == again
    assert 150 <= Counter(picked)["acme:v4"] <= 250
    elsewhere = Versions(Source(CANARY, "v3", "v4"), SETTINGS)
    assert picked[0] == str((await elsewhere.resolve(name, "user-0")).name)


async def test_a_canary_that_grows_takes_users_and_gives_none_back() -> None:
    small = Versions(Source(CANARY), SETTINGS)
    grown = {"stable": (AliasTarget("v3", 70), AliasTarget("v4", 30))}
    large = Versions(Source(grown), SETTINGS)
    name = parse_name("acme:stable")
    for at in range(300):
        before = (await small.resolve(name, str(at))).name.version
        after = (await large.resolve(name, str(at))).name.version
        assert (before, after) != ("v4", "v3")


async def test_latest_is_the_highest_version_unless_an_alias_says_otherwise() -> None:
    found = await Versions(Source({}, "v9", "v10"), SETTINGS).resolve(parse_name("acme"))
    assert (found.name.exact, found.digest) == ("acme/default:v10", "v10v10")
    assert found.alias == parse_name("acme:latest")
    pointed = Source({"latest": (AliasTarget("v9", 1),)}, "v9", "v10")
    assert (await Versions(pointed, SETTINGS).resolve(parse_name("acme"))).name.version == "v9"
    with pytest.raises(AdapterNotFound):
        await Versions(Source({}), SETTINGS).resolve(parse_name("acme"))


async def test_an_exact_version_stays_as_it_is_known_or_not() -> None:
    versions = Versions(Source(CANARY, "v3"), SETTINGS)
    known = await versions.resolve(parse_name("acme:v3"))
    assert (known.digest, known.alias) == ("v3v3", None)
    assert (await versions.resolve(parse_name("acme:v77"))).digest is None


async def test_without_a_source_names_are_exact_and_latest_is_not_found() -> None:
    versions = Versions(None)
    assert (await versions.resolve(parse_name("acme:v1"))).name.exact == "acme/default:v1"
    with pytest.raises(AdapterNotFound):
        await versions.resolve(parse_name("acme"))


async def test_an_alias_that_is_pointed_elsewhere_holds_after_the_time_to_live() -> None:
    source, clock = Source({"stable": (AliasTarget("v1", 1),)}), Clock()
    versions = Versions(source, SETTINGS, clock=clock)
    name = parse_name("acme:stable")
    assert (await versions.resolve(name)).name.version == "v1"
    source.said = KnownVersions({"stable": (AliasTarget("v2", 1),)})
    clock.now = 4.9
    assert (await versions.resolve(name)).name.version == "v1"
    clock.now = 11.0
    assert (await versions.resolve(name)).name.version == "v2"


async def test_a_name_in_use_is_looked_up_again_while_the_old_answer_serves() -> None:
    source, clock = Source({"stable": (AliasTarget("v1", 1),)}), Clock()
    versions = Versions(source, SETTINGS, clock=clock)
    name = parse_name("acme:stable")
    await versions.resolve(name)
    clock.now = 6.0
    source.hold.clear()
    for _ in range(10):
        assert (await versions.resolve(name)).name.version == "v1"
    await asyncio.sleep(0)
    assert source.reads == 2
    source.hold.set()
    await versions.close()


async def test_a_look_up_that_began_before_a_change_is_not_the_last_word() -> None:
    reads: list[asyncio.Future[KnownVersions]] = []
    began = asyncio.Semaphore(0)

    class Slow(VersionSource):
        async def read(self, tenant: str, adapter: str) -> KnownVersions:
            reads.append(answer := asyncio.get_running_loop().create_future())
            began.release()
            return await answer

    async def begin() -> asyncio.Task[Exact]:
        asked = asyncio.create_task(versions.resolve(name))
        await asyncio.wait_for(began.acquire(), 20)
        return asked

    old, new = (KnownVersions({"stable": (AliasTarget(each, 1),)}) for each in ("v1", "v2"))
    versions = Versions(Slow(), VersionSettings(timeout_s=20.0), clock=Clock())
    name = parse_name("acme:stable")
    early = await begin()
    versions.changed("acme")
    reads[0].set_result(old)
    assert (await early).name.version == "v1", "asked before the change"
    late = await begin()
    reads[1].set_result(new)
    assert (await late).name.version == "v2"

    versions.changed("acme")
    early = await begin()
    versions.changed("acme")
    late = await begin()
    reads[3].set_result(new)
    assert (await late).name.version == "v2"
    reads[2].set_result(old)
    await early
    assert (await versions.resolve(name)).name.version == "v2", "which was kept"
    await versions.close()


async def test_after_a_change_a_source_that_is_down_leaves_what_is_known_in_force() -> None:
    source = Source({"stable": (AliasTarget("v1", 1),)})
    versions = Versions(source, SETTINGS)
    name = parse_name("acme:stable")
    await versions.resolve(name)
    source.error = Unavailable("down")
    versions.changed("acme")
    assert (await versions.resolve(name)).name.version == "v1"
    assert versions.failed == 1


async def test_a_source_that_is_down_leaves_what_is_known_in_force_and_is_left_alone() -> None:
    source, clock = Source({"stable": (AliasTarget("v1", 1),)}), Clock()
    versions = Versions(source, SETTINGS, clock=clock)
    name = parse_name("acme:stable")
    await versions.resolve(name)
    source.error, clock.now = Unavailable("down"), 100.0
    for _ in range(10):
        assert (await versions.resolve(name)).name.version == "v1"
    assert source.reads == 2
    with pytest.raises(Unavailable):
        await versions.resolve(parse_name("globex:v1"))
    source.error, clock.now = None, 102.0
    assert (await versions.resolve(parse_name("globex:v1"))).name.version == "v1"


async def test_an_adapter_whose_own_record_is_none_is_left_alone_and_nobody_else(
    tmp_path: Path,
) -> None:
    for tenant in ("acme", "globex"):
        shutil.copytree(ADAPTER, tmp_path / tenant / "default" / "v1")
    (tmp_path / "acme/default/_aliases.json").write_text("{")
    clock = Clock()
    store = StoreVersions(DirectoryStore(tmp_path))
    versions = Versions(store, VersionSettings(ttl_s=5.0, timeout_s=10.0), clock=clock)
    for _ in range(3):
        with pytest.raises(Unavailable):
            await versions.resolve(parse_name("acme:stable"))
    assert versions.failed == 1
    assert (await versions.resolve(parse_name("globex"))).name.version == "v1"

    # Put right through the router it is asked for at once, and else soon.
    (tmp_path / "acme/default/_aliases.json").unlink()
    with pytest.raises(Unavailable):
        await versions.resolve(parse_name("acme"))
    versions.changed("acme")
    assert (await versions.resolve(parse_name("acme"))).name.version == "v1"
    await versions.close()


async def test_a_source_that_never_answers_is_waited_for_within_a_bound() -> None:
    source = Source({})
    source.hold.clear()
    versions = Versions(source, SETTINGS)
    with pytest.raises(Unavailable):
        await versions.resolve(parse_name("acme:v1"))
    await versions.close()


async def test_a_store_that_raises_something_odd_is_a_503_not_a_500() -> None:
    source = Source({})
    source.error = ZeroDivisionError()
    with pytest.raises(Unavailable):
        await Versions(source, SETTINGS).resolve(parse_name("acme:v1"))


async def test_what_is_remembered_is_bounded() -> None:
    source = Source({}, "v1")
    versions = Versions(source, VersionSettings(max_adapters=10))
    for at in range(50):
        await versions.resolve(parse_name(f"t{at}:v1"))
    await versions.resolve(parse_name("t49:v1"))
    assert source.reads == 50
    await versions.resolve(parse_name("t0:v1"))
    assert source.reads == 51


async def test_a_directory_store_gives_its_aliases_and_digests(tmp_path: Path) -> None:
    # A disk that others use, too, may take longer than SETTINGS allow.
    versions = Versions(StoreVersions(open_store(str(tmp_path))))
    with pytest.raises(AdapterNotFound):
        await versions.resolve(parse_name("acme"))
    await versions.close()


async def test_a_versions_manifest_is_read_once_and_again_when_it_went_and_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version in ("v1", "v2"):
        shutil.copytree(ADAPTER, tmp_path / "acme" / "default" / version)
        manifest = build_manifest(ADAPTER)
        (tmp_path / "acme" / "default" / version / MANIFEST_FILE).write_bytes(manifest.to_json())
    store = open_store(str(tmp_path))
    assert isinstance(store, DirectoryStore)
    read: list[str] = []

    async def counted(name: AdapterName) -> Manifest | None:
        read.append(name.version)
        return await DirectoryStore.manifest(store, name)

    monkeypatch.setattr(store, "manifest", counted)
    source = StoreVersions(store)
    for _ in range(3):
        said = await source.read("acme", "default")
        assert said.digests == {"v1": manifest.digest, "v2": manifest.digest}
    assert sorted(read) == ["v1", "v2"]

    (tmp_path / "acme" / "default" / "v2").rename(tmp_path / "away")
    assert (await source.read("acme", "default")).digests == {"v1": manifest.digest}
    (tmp_path / "away").rename(tmp_path / "acme" / "default" / "v2")
    await source.read("acme", "default")
    assert sorted(read) == ["v1", "v2", "v2"]
    await source.close()


async def test_a_spoilt_manifest_hides_no_other_version(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        shutil.copytree(ADAPTER, tmp_path / "acme" / "default" / version)
    manifest = build_manifest(ADAPTER)
    (tmp_path / "acme" / "default" / "v1" / MANIFEST_FILE).write_bytes(manifest.to_json())
    (tmp_path / "acme" / "default" / "v2" / MANIFEST_FILE).write_bytes(b"{")
    source = StoreVersions(open_store(str(tmp_path)))
    said = await source.read("acme", "default")
    assert said.digests is not None
    assert said.digests["v1"] == manifest.digest
    await source.close()
