"""A directory as a store: what is published in it and found there."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import shutil
from pathlib import Path

import pytest

from mural_resolvers import directory_store
from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.directory_store import DirectoryStore
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    InvalidInput,
    MalformedName,
    ManifestMismatch,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.manifest import MANIFEST_FILE, build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.open_store import open_store
from mural_resolvers.store import TOMBSTONE_FILE, StoredVersion
from mural_resolvers.tenants import Principal
from mural_resolvers.versions import AliasTarget
from tests.mural_resolvers import directory_stores
from tests.mural_resolvers.directory_stores import V1, V2, left_in_staging, publish

root = directory_stores.root
store = directory_stores.store


@pytest.mark.parametrize("prefix", ["", "file://"])
async def test_a_folder_is_opened_as_a_store(root: Path, prefix: str) -> None:
    store = open_store(f"{prefix}{root}")

    assert isinstance(store, DirectoryStore)
    assert store.location == str(root)
    await store.close()


@pytest.mark.parametrize("location", ["/no/such/folder", "ftp://host/folder", ""])
def test_what_is_no_store_is_not_opened(location: str) -> None:
    with pytest.raises(InvalidInput):
        open_store(location)


# -- publishing -----------------------------------------------------------------------------------


async def test_what_is_published_is_found_by_the_resolver(
    root: Path, store: DirectoryStore, adapter: Path, base_spec: BaseSpec
) -> None:
    manifest = build_manifest(adapter)
    resolver = DirectoryResolver(root)

    assert await publish(store, V1, adapter)

    found = await resolver.resolve(Principal("acme"), parse_name("acme"), base_spec)
    assert found is not None
    assert (found.name, found.manifest) == (V1, manifest)
    assert (root / "acme" / "default" / "v1" / MANIFEST_FILE).read_bytes() == manifest.to_json()
    assert await store.manifest(V1) == manifest
    assert left_in_staging(root) == []
    await resolver.close()


async def test_only_the_files_of_the_manifest_are_taken(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    (adapter / "optimizer.pt").write_bytes(b"large")

    await publish(store, V1, adapter)

    assert sorted(os.listdir(root / "acme" / "default" / "v1")) == [
        "adapter_config.json",
        "adapter_model.safetensors",
        MANIFEST_FILE,
    ]


async def test_the_same_content_again_changes_nothing(store: DirectoryStore, adapter: Path) -> None:
    assert await store.publish(
        V1, adapter, build_manifest(adapter), records={"_upload.json": b"first"}
    )
    assert not await store.publish(
        V1, adapter, build_manifest(adapter), records={"_upload.json": b"second"}
    )
    assert await store.read_record(V1, "_upload.json") == b"first"
    assert await store.read_record(V2, "_upload.json") is None
    assert await store.read_record(V1, "_other.json") is None


async def test_other_content_under_a_taken_name_is_a_conflict(
    store: DirectoryStore, adapter: Path, other: Path
) -> None:
    await publish(store, V1, adapter)

    with pytest.raises(Conflict):
        await publish(store, V1, other)
    assert await store.manifest(V1) == build_manifest(adapter)


@pytest.mark.parametrize("content", ["nothing whole", "a whole adapter"])
async def test_what_others_put_there_keeps_its_name(
    root: Path, store: DirectoryStore, adapter: Path, other: Path, content: str
) -> None:
    folder = root / "acme" / "default" / "v1"
    if content == "a whole adapter":
        shutil.copytree(other, folder)
    else:
        folder.mkdir(parents=True)
        (folder / "notes.txt").touch()

    with pytest.raises(Conflict):
        await publish(store, V1, adapter)


async def test_the_same_content_that_others_put_there_is_the_version(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    shutil.copytree(adapter, root / "acme" / "default" / "v1")

    assert not await publish(store, V1, adapter)


async def test_an_empty_folder_takes_no_name(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    (root / "acme" / "default" / "v1").mkdir(parents=True)

    assert await publish(store, V1, adapter)


@pytest.mark.parametrize("version", ["latest", "stable"])
async def test_the_name_of_an_alias_is_no_version(
    store: DirectoryStore, adapter: Path, version: str
) -> None:
    await publish(store, V1, adapter)
    await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])

    with pytest.raises(Conflict):
        await publish(store, V1.at(version), adapter)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
async def test_a_folder_that_is_not_its_manifest_is_refused(
    root: Path, store: DirectoryStore, adapter: Path, name: str
) -> None:
    manifest = build_manifest(adapter)
    with (adapter / name).open("ab") as file:
        file.write(b" ")

    with pytest.raises(ManifestMismatch):
        await store.publish(V1, adapter, manifest)

    assert left_in_staging(root) == []
    assert await store.manifest(V1) is None
    assert await store.list("acme") == ()


async def test_a_file_that_went_is_refused(store: DirectoryStore, adapter: Path) -> None:
    manifest = build_manifest(adapter)
    (adapter / "adapter_model.safetensors").unlink()

    with pytest.raises(UnusableAdapter):
        await store.publish(V1, adapter, manifest)


@pytest.mark.parametrize("fault", ["full", "read-only"])
async def test_a_store_that_cannot_be_written_is_down_and_left_as_it_was(
    root: Path,
    store: DirectoryStore,
    adapter: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
) -> None:
    number = errno.ENOSPC if fault == "full" else errno.EROFS

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(Unavailable) as caught:
            await publish(store, V1, adapter)

    assert str(root) not in caught.value.message
    assert left_in_staging(root) == []
    assert await publish(store, V1, adapter)


async def test_a_root_that_is_not_there_is_not_made(tmp_path: Path, adapter: Path) -> None:
    store = DirectoryStore(tmp_path / "not mounted")

    with pytest.raises(Unavailable):
        await publish(store, V1, adapter)
    with pytest.raises(Unavailable):
        await store.list("acme")
    assert not (tmp_path / "not mounted").exists()
    await store.close()


async def test_a_tenant_whose_folder_is_a_link_gets_nothing_published(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    (root / "globex").mkdir()
    (root / "acme").symlink_to("globex")

    with pytest.raises(UnusableAdapter):
        await publish(store, V1, adapter)
    assert os.listdir(root / "globex") == []


async def test_progress_tells_of_every_byte_before_the_end(
    store: DirectoryStore, adapter: Path, tmp_path: Path
) -> None:
    manifest = build_manifest(adapter)
    up: list[int] = []
    down: list[int] = []

    await store.publish(V1, adapter, manifest, up.append)
    assert sum(up) == manifest.num_bytes

    (tmp_path / "fetched").mkdir()
    await store.fetch(V1, tmp_path / "fetched", down.append)
    assert sum(down) == manifest.num_bytes


async def test_a_cancelled_publication_leaves_nothing(
    root: Path, store: DirectoryStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    plain = directory_store._next_chunk

    def held(reader, left):  # Stands in for a private function.
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return plain(reader, left)

    monkeypatch.setattr(directory_store, "_next_chunk", held)
    publishing = asyncio.create_task(publish(store, V1, adapter))
    await begun.wait()
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    go_on.set()
    monkeypatch.undo()
    await store.close()
    await asyncio.to_thread(store._threads.shutdown)

    assert left_in_staging(root) == []
    assert not (root / "acme").exists()


async def test_what_a_dead_writer_left_is_swept_and_what_lives_is_not(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    staging = root / "_staging"
    for name in ("dead", "alive"):
        (staging / name).mkdir(parents=True)
        (staging / f"{name}.lock").touch()
    with (staging / "alive.lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        await publish(store, V1, adapter)

        assert sorted(os.listdir(staging)) == ["alive", "alive.lock"]


# -- looking, fetching ----------------------------------------------------------------------------


async def test_a_tenants_versions_are_listed_in_order(
    root: Path, store: DirectoryStore, adapter: Path, other: Path
) -> None:
    for text in ("acme:v2", "acme/sql:v1", "globex:v1"):
        await publish(store, parse_name(text), adapter)
    shutil.copytree(other, root / "acme" / "default" / "by-hand")
    (root / "acme" / "default" / "empty").mkdir()
    manifest, size = build_manifest(adapter), build_manifest(other).num_bytes

    assert await store.list("acme") == (
        StoredVersion(parse_name("acme:by-hand"), None, size),
        StoredVersion(V2, manifest.digest, manifest.num_bytes),
        StoredVersion(parse_name("acme/sql:v1"), manifest.digest, manifest.num_bytes),
    )
    assert await store.tenants() == ("acme", "globex")
    assert await store.list("initech") == ()
    assert await store.versions("acme", "default") == ("by-hand", "v2")
    with pytest.raises(MalformedName):
        await store.list("../acme")


async def test_a_version_is_fetched_and_verified(
    root: Path, store: DirectoryStore, adapter: Path, tmp_path: Path
) -> None:
    await publish(store, V1, adapter)
    target = tmp_path / "fetched"
    target.mkdir()

    manifest = await store.fetch(V1, target)

    assert manifest == build_manifest(target) == build_manifest(adapter)
    assert MANIFEST_FILE not in os.listdir(target)


async def test_one_file_is_read_in_pieces(
    store: DirectoryStore, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_store, "_CHUNK_BYTES", 100)
    await publish(store, V1, adapter)
    manifest = build_manifest(adapter)

    for file in manifest.files:
        async with store.open(V1, file) as pieces:
            read = [piece async for piece in pieces]
        assert b"".join(read) == (adapter / file.path).read_bytes()
        assert max(map(len, read)) <= 100


async def test_a_file_that_is_gone_or_another_is_not_read(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    await publish(store, V1, adapter)
    manifest = build_manifest(adapter)
    file = manifest.files[0]

    with pytest.raises(AdapterNotFound):
        async with store.open(V2, file):
            pass
    (root / "acme/default/v1" / file.path).write_bytes(b"{}")
    with pytest.raises(ManifestMismatch):
        async with store.open(V1, file):
            pass


async def test_rotten_content_is_not_fetched(
    root: Path, store: DirectoryStore, adapter: Path, tmp_path: Path
) -> None:
    await publish(store, V1, adapter)
    with (root / "acme/default/v1/adapter_model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x07")
    target = tmp_path / "fetched"
    target.mkdir()

    with pytest.raises(ManifestMismatch):
        await store.fetch(V1, target)
    assert os.listdir(target) == []


async def test_a_folder_that_holds_something_is_left_alone(
    store: DirectoryStore, adapter: Path
) -> None:
    await publish(store, V1, adapter)

    with pytest.raises(InvalidInput):
        await store.fetch(V1, adapter)
    assert build_manifest(adapter) == await store.manifest(V1)


@pytest.mark.parametrize("name", ["acme:v9", "acme:latest", "acme/sql:v1", "globex:v1"])
async def test_what_is_not_published_is_not_found(
    store: DirectoryStore, adapter: Path, tmp_path: Path, name: str
) -> None:
    await publish(store, V1, adapter)
    target = tmp_path / "fetched"
    target.mkdir()

    assert await store.manifest(parse_name(name)) is None
    with pytest.raises(AdapterNotFound):
        await store.fetch(parse_name(name), target)


@pytest.mark.parametrize("record", ["upload.json", "_a/../../x", TOMBSTONE_FILE])
async def test_a_record_has_a_name_of_its_own(
    store: DirectoryStore, adapter: Path, record: str
) -> None:
    with pytest.raises(InvalidInput):
        await store.publish(V1, adapter, build_manifest(adapter), records={record: b""})
    with pytest.raises(InvalidInput):
        await store.read_record(V1, record)
