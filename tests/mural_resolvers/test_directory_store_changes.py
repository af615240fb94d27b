"""A directory as a store: what is deleted in it, and what aliases point at."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.directory_store import DirectoryStore
from mural_resolvers.errors import AdapterNotFound, Conflict, InvalidInput
from mural_resolvers.names import parse_name
from mural_resolvers.store import ALIASES_FILE, TOMBSTONE_FILE
from mural_resolvers.versions import AliasTarget
from tests.mural_resolvers import directory_stores
from tests.mural_resolvers.directory_stores import V1, V2, publish

root = directory_stores.root
store = directory_stores.store


# -- deleting -------------------------------------------------------------------------------------


async def test_a_deleted_version_is_absent_and_its_name_never_used_again(
    root: Path, store: DirectoryStore, adapter: Path, other: Path, tmp_path: Path
) -> None:
    resolver = DirectoryResolver(root)
    await publish(store, V1, other)
    await publish(store, V2, adapter)
    (tmp_path / "fetched").mkdir()

    assert await store.delete(V2)

    assert os.listdir(root / "acme" / "default" / "v2") == [TOMBSTONE_FILE]
    assert await store.manifest(V2) is None
    assert [found.name for found in await store.list("acme")] == [V1]
    assert [found.name for found in await resolver.list("acme")] == [V1]
    assert resolver.find(V2) is None
    latest = resolver.find(parse_name("acme"))
    assert latest is not None
    assert latest.name == V1
    with pytest.raises(AdapterNotFound):
        await store.fetch(V2, tmp_path / "fetched")
    for folder in (adapter, other):
        with pytest.raises(Conflict):
            await publish(store, V2, folder)
    await resolver.close()


async def test_deleting_again_finishes_what_a_crash_left(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    await publish(store, V1, adapter)
    folder = root / "acme" / "default" / "v1"
    (folder / TOMBSTONE_FILE).write_bytes(b"{}")

    assert await store.manifest(V1) is None
    assert await store.delete(V1)
    assert os.listdir(folder) == [TOMBSTONE_FILE]
    assert await store.delete(V1)


@pytest.mark.parametrize("name", ["acme:v9", "acme/sql:v1", "globex:v1"])
async def test_what_never_was_is_not_deleted(
    root: Path, store: DirectoryStore, adapter: Path, name: str
) -> None:
    await publish(store, V1, adapter)

    assert not await store.delete(parse_name(name))
    assert not (root / "globex").exists()


async def test_a_version_that_an_alias_points_at_stays(
    store: DirectoryStore, adapter: Path
) -> None:
    await publish(store, V1, adapter)
    await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])

    with pytest.raises(Conflict):
        await store.delete(V1)
    await store.set_alias("acme", "default", "stable", [])
    assert await store.delete(V1)


async def test_deleting_a_link_does_not_delete_what_it_leads_to(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    await publish(store, V1, adapter)
    (root / "acme" / "default" / "v2").symlink_to("v1")

    with pytest.raises(Conflict):
        await store.delete(V2)
    assert await store.manifest(V1) is not None


async def test_links_inside_a_version_are_not_followed_when_it_goes(
    root: Path, store: DirectoryStore, adapter: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    folder = root / "acme" / "default" / "v1"
    shutil.copytree(adapter, folder)
    (folder / "link").symlink_to(kept)
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "link").symlink_to(kept)

    assert await store.delete(V1)
    assert os.listdir(kept) == ["file"]
    assert os.listdir(folder) == [TOMBSTONE_FILE]


# -- aliases --------------------------------------------------------------------------------------


async def test_an_alias_is_what_the_resolver_resolves(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    resolver = DirectoryResolver(root)
    await publish(store, V1, adapter)
    await publish(store, V2, adapter)

    changed = await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])

    assert (
        changed == await store.aliases("acme", "default") == {"stable": (AliasTarget("v1", 1.0),)}
    )
    found = resolver.find(parse_name("acme:stable"))
    assert found is not None
    assert found.name == V1
    assert await store.set_alias("acme", "default", "stable", []) == {}
    assert json.loads((root / "acme" / "default" / ALIASES_FILE).read_bytes()) == {}
    assert await store.set_alias("acme", "sql", "stable", []) == {}
    assert await store.aliases("acme", "sql") == {}
    await resolver.close()


@pytest.mark.parametrize("version", ["v9", "deleted", "latest"])
async def test_an_alias_points_at_what_is_published(
    store: DirectoryStore, adapter: Path, version: str
) -> None:
    for name in (V1, V1.at("deleted")):
        await publish(store, name, adapter)
    await store.delete(V1.at("deleted"))

    with pytest.raises(AdapterNotFound):
        await store.set_alias("acme", "default", "stable", [AliasTarget(version, 1.0)])
    with pytest.raises(AdapterNotFound):
        await store.set_alias("acme", "sql", "stable", [AliasTarget(version, 1.0)])


@pytest.mark.parametrize("version", ["v1", "deleted"])
async def test_the_name_of_a_version_is_no_alias(
    store: DirectoryStore, adapter: Path, version: str
) -> None:
    for name in (V1, V2, V1.at("deleted")):
        await publish(store, name, adapter)
    await store.delete(V1.at("deleted"))

    with pytest.raises(Conflict):
        await store.set_alias("acme", "default", version, [AliasTarget("v2", 1.0)])


async def test_targets_that_a_record_cannot_hold_are_refused(
    store: DirectoryStore, adapter: Path
) -> None:
    await publish(store, V1, adapter)

    with pytest.raises(InvalidInput):
        await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 0.0)])
    assert await store.aliases("acme", "default") == {}
