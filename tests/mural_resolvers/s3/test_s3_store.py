"""The store over S3: on moto's server, and (marker ``stores``) on real ones."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    InvalidInput,
    MalformedName,
    ManifestMismatch,
    MuralError,
    TooLarge,
    UnusableAdapter,
)
from mural_resolvers.manifest import Manifest, build_manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.s3 import S3Settings, S3Store
from mural_resolvers.s3 import client as s3_client
from mural_resolvers.s3.client import ObjectStat
from mural_resolvers.store import StoredVersion
from mural_resolvers.versions import AliasTarget

WriteAdapter = Callable[..., Path]
NAME = AdapterName("acme", "default", "v1")


def writers(bucket: Any) -> int:
    """Moto is slow, and has no races to speak of."""
    return 6 if bucket.server.kind == "moto" else 16


@pytest.fixture
async def store(bucket: Any) -> AsyncIterator[S3Store]:
    opened = S3Store(bucket.settings())
    yield opened
    await opened.close()


async def publish(store: S3Store, folder: Path, name: AdapterName = NAME, **more: Any) -> bool:
    return await store.publish(name, folder, build_manifest(folder), **more)


def large(folder: Path, write_adapter: WriteAdapter, num_bytes: int) -> Path:
    """An adapter whose weights fill so many bytes, all different."""
    write_adapter(folder)
    rows = num_bytes // 32
    tensors = {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": ("F32", [rows, 8]),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": ("F32", [8, rows]),
    }
    write_adapter(folder, tensors=tensors)
    path = folder / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:400] + random.Random(num_bytes).randbytes(len(data) - 400))
    return folder


class TestPublishing:
    async def test_what_is_published_is_what_boto3_reads(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        sent: list[int] = []
        assert await publish(store, adapter, progress=sent.append)
        manifest = build_manifest(adapter)
        assert bucket.listing() == [
            "acme/default/v1/adapter_config.json",
            "acme/default/v1/adapter_model.safetensors",
            "acme/default/v1/manifest.json",
        ]
        for file in manifest.files:
            assert bucket.get(f"acme/default/v1/{file.path}") == (adapter / file.path).read_bytes()
        assert Manifest.from_json(bucket.get("acme/default/v1/manifest.json")) == manifest
        assert sum(sent) == manifest.num_bytes
        assert await store.manifest(NAME) == manifest

    async def test_the_same_content_again_changes_nothing(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        await publish(store, adapter)
        assert not await publish(store, adapter)
        assert len(bucket.listing()) == 3

    async def test_other_content_under_a_taken_name_is_a_conflict(
        self, store: S3Store, adapter: Path, other: Path
    ) -> None:
        await publish(store, adapter)
        with pytest.raises(Conflict, match="other content"):
            await publish(store, other)
        assert await store.manifest(NAME) == build_manifest(adapter)

    async def test_a_file_that_changed_since_it_was_described_is_not_published(
        self, bucket: Any, store: S3Store, adapter: Path, other: Path
    ) -> None:
        with pytest.raises(ManifestMismatch):
            await store.publish(NAME, other, build_manifest(adapter))
        assert await store.manifest(NAME) is None
        assert "acme/default/v1/manifest.json" not in bucket.listing()

    async def test_a_file_that_is_gone_is_told(
        self, store: S3Store, adapter: Path, tmp_path: Path
    ) -> None:
        with pytest.raises(UnusableAdapter):
            await store.publish(NAME, tmp_path / "nowhere", build_manifest(adapter))

    async def test_what_a_broken_upload_left_is_invisible_and_gone_over_again(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        config = adapter / "adapter_config.json"
        bucket.put("acme/default/v1/adapter_config.json", config.read_bytes())
        assert await store.manifest(NAME) is None
        assert await store.list("acme") == ()
        sent: list[int] = []
        assert await publish(store, adapter, progress=sent.append)
        assert sum(sent) == build_manifest(adapter).num_bytes

    async def test_what_another_publisher_has_begun_is_not_overwritten(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        bucket.put("acme/default/v1/adapter_config.json", b"{}")
        with pytest.raises(Conflict):
            await publish(store, adapter)
        assert bucket.get("acme/default/v1/adapter_config.json") == b"{}"

    @pytest.mark.parametrize("with_weights", [False, True])
    async def test_what_a_publisher_has_given_up_is_replaced_unless_it_is_whole(
        self, bucket: Any, store: S3Store, adapter: Path, with_weights: bool
    ) -> None:
        bucket.put("acme/default/v1/adapter_config.json", b"{}")
        if with_weights:
            bucket.put("acme/default/v1/adapter_model.safetensors", b"of another tool")
        old = await store._client.stat("adapters/acme/default/v1/adapter_config.json")
        assert old is not None
        assert old.age_s is not None
        assert -5 <= old.age_s < 600

        async def stat(key: str) -> ObjectStat | None:
            found = await real_stat(key)
            return found and replace(found, age_s=3 * store._settings.transfer_timeout_s)

        real_stat = store._client.stat
        store._client.stat = stat  # type: ignore[method-assign]  # a store's clock cannot be set
        if with_weights:
            with pytest.raises(Conflict):
                await publish(store, adapter)
        else:
            assert await publish(store, adapter)
            assert await store.manifest(NAME) == build_manifest(adapter)

    async def test_records_stand_beside_the_version_before_it_is_there(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        assert await publish(store, adapter, records={"_upload.json": b'{"key_id":"k"}'})
        assert await store.read_record(NAME, "_upload.json") == b'{"key_id":"k"}'
        assert bucket.get("acme/default/v1/_upload.json") == b'{"key_id":"k"}'
        assert await store.read_record(NAME, "_other.json") is None
        assert not await publish(store, adapter, records={"_upload.json": b"{}"})
        assert await store.read_record(NAME, "_upload.json") == b'{"key_id":"k"}'

    @pytest.mark.parametrize(
        ("record", "data"),
        [
            ("upload.json", b""),
            ("_deleted.json", b""),
            ("_a/../b", b""),
            ("_upload.json", bytes(1 << 17)),
        ],
    )
    async def test_a_record_keeps_to_its_place_and_size(
        self, bucket: Any, store: S3Store, adapter: Path, record: str, data: bytes
    ) -> None:
        with pytest.raises(InvalidInput):
            await publish(store, adapter, records={record: data})
        assert bucket.listing() == []

    async def test_large_files_go_up_in_parts_and_come_back_whole(
        self, bucket: Any, tmp_path: Path, write_adapter: WriteAdapter
    ) -> None:
        folder = large(tmp_path / "large", write_adapter, 6 << 20)
        for checksums in ("when_supported", "when_required"):
            settings = bucket.settings(
                multipart_bytes=1 << 20, upload_part_bytes=5 << 20, checksums=checksums
            )
            store, sent = S3Store(settings), list[int]()
            name = NAME.at(checksums)
            assert await publish(store, folder, name, progress=sent.append)
            manifest = build_manifest(folder)
            assert sum(sent) == manifest.num_bytes
            weights = bucket.get(f"acme/default/{checksums}/adapter_model.safetensors")
            assert hashlib.sha256(weights).hexdigest() == manifest.files[1].sha256
            target = tmp_path / checksums
            target.mkdir()
            assert await store.fetch(name, target) == manifest
            await store.close()
        assert bucket.uploads() == []

    async def test_parts_of_a_file_that_is_not_as_stated_are_dropped(
        self, bucket: Any, tmp_path: Path, write_adapter: WriteAdapter
    ) -> None:
        folder = large(tmp_path / "large", write_adapter, 6 << 20)
        manifest = build_manifest(folder)
        path = folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes() + b"more")
        store = S3Store(bucket.settings(multipart_bytes=1 << 20, upload_part_bytes=5 << 20))
        with pytest.raises(ManifestMismatch):
            await store.publish(NAME, folder, manifest)
        await store.close()
        assert bucket.uploads() == []
        assert bucket.listing() == ["acme/default/v1/adapter_config.json"]

    async def test_a_cancelled_upload_drops_its_parts(
        self, bucket: Any, tmp_path: Path, write_adapter: WriteAdapter
    ) -> None:
        folder = large(tmp_path / "large", write_adapter, 16 << 20)
        store = S3Store(bucket.settings(multipart_bytes=1 << 20, upload_part_bytes=5 << 20))
        sent, some = 0, asyncio.Event()

        def progress(num_bytes: int) -> None:
            nonlocal sent
            sent += num_bytes
            if sent > 5 << 20:
                some.set()

        task = asyncio.create_task(publish(store, folder, progress=progress))
        await some.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.close()
        assert bucket.uploads() == []
        assert not any(key.endswith(("safetensors", "manifest.json")) for key in bucket.listing())

    async def test_of_many_publishers_of_different_content_one_wins_whole(
        self, bucket: Any, tmp_path: Path, write_adapter: WriteAdapter
    ) -> None:
        folders = [
            write_adapter(tmp_path / str(number), fill=bytes([number])) for number in range(1, 17)
        ]
        stores = [S3Store(bucket.settings()) for _ in range(4)]
        outcomes = await asyncio.gather(
            *(publish(stores[n % 4], folder) for n, folder in enumerate(folders)),
            return_exceptions=True,
        )
        won = [number for number, outcome in enumerate(outcomes) if outcome is True]
        assert len(won) == 1, outcomes
        assert all(isinstance(o, Conflict) for o in outcomes if o is not True), outcomes
        target = tmp_path / "back"
        target.mkdir()
        assert await stores[0].fetch(NAME, target) == build_manifest(folders[won[0]])
        for store in stores:
            await store.close()

    async def test_of_many_publishers_of_one_content_all_are_content(
        self, bucket: Any, adapter: Path
    ) -> None:
        stores = [S3Store(bucket.settings()) for _ in range(4)]
        outcomes = await asyncio.gather(
            *(publish(stores[n % 4], adapter) for n in range(writers(bucket)))
        )
        assert outcomes.count(True) == 1
        assert await stores[0].manifest(NAME) == build_manifest(adapter)
        for store in stores:
            await store.close()


class TestFetching:
    async def test_what_boto3_published_is_fetched(
        self, bucket: Any, store: S3Store, adapter: Path, tmp_path: Path
    ) -> None:
        manifest = build_manifest(adapter)
        for file in manifest.files:
            bucket.put(f"acme/default/v1/{file.path}", (adapter / file.path).read_bytes())
        bucket.put("acme/default/v1/manifest.json", manifest.to_json())
        target, got = tmp_path / "back", list[int]()
        target.mkdir()
        assert await store.fetch(NAME, target, got.append) == manifest
        assert sum(got) == manifest.num_bytes
        assert sorted(os.listdir(target)) == [file.path for file in manifest.files]

    async def test_one_file_is_read_as_it_comes(self, store: S3Store, adapter: Path) -> None:
        manifest = build_manifest(adapter)
        await store.publish(NAME, adapter, manifest)

        for file in manifest.files:
            async with store.open(NAME, file) as pieces:
                read = b"".join([piece async for piece in pieces])
            assert read == (adapter / file.path).read_bytes()
        with pytest.raises(AdapterNotFound):
            async with store.open(NAME.at("v999"), manifest.files[0]):
                pass

    async def test_what_is_not_what_its_manifest_states_leaves_nothing(
        self, bucket: Any, store: S3Store, adapter: Path, other: Path, tmp_path: Path
    ) -> None:
        await publish(store, adapter)
        weights = "adapter_model.safetensors"
        bucket.put(f"acme/default/v1/{weights}", (other / weights).read_bytes())
        target = tmp_path / "back"
        target.mkdir()
        with pytest.raises(ManifestMismatch):
            await store.fetch(NAME, target)
        assert os.listdir(target) == []

    async def test_a_version_that_is_not_there_is_not_found(
        self, store: S3Store, tmp_path: Path
    ) -> None:
        with pytest.raises(AdapterNotFound):
            await store.fetch(NAME, tmp_path)

    async def test_only_an_empty_folder_is_filled(self, store: S3Store, adapter: Path) -> None:
        with pytest.raises(InvalidInput):
            await store.fetch(NAME, adapter)

    @pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"files":[]}', b"[" * 10_000])
    async def test_a_manifest_that_is_none_is_unusable(
        self, bucket: Any, store: S3Store, data: bytes
    ) -> None:
        bucket.put("acme/default/v1/manifest.json", data)
        with pytest.raises(UnusableAdapter):
            await store.manifest(NAME)
        assert await store.list("acme") == ()

    async def test_a_manifest_beyond_its_limit_is_not_read(
        self, bucket: Any, store: S3Store
    ) -> None:
        bucket.put("acme/default/v1/manifest.json", bytes(2 << 20))
        with pytest.raises(TooLarge):
            await store.manifest(NAME)


class TestDeleting:
    async def test_a_deleted_version_is_gone_and_its_name_is_not_used_again(
        self, bucket: Any, store: S3Store, adapter: Path, other: Path, tmp_path: Path
    ) -> None:
        await publish(store, adapter, records={"_upload.json": b"{}"})
        assert await store.delete(NAME)
        assert bucket.listing() == ["acme/default/v1/_deleted.json"]
        assert await store.manifest(NAME) is None
        assert await store.read_record(NAME, "_upload.json") is None
        assert await store.list("acme") == ()
        (tmp_path / "back").mkdir()
        with pytest.raises(AdapterNotFound):
            await store.fetch(NAME, tmp_path / "back")
        for folder in (adapter, other):
            with pytest.raises(Conflict, match="deleted"):
                await publish(store, folder)
        assert await store.delete(NAME)

    async def test_what_never_was_cannot_be_deleted(self, bucket: Any, store: S3Store) -> None:
        assert not await store.delete(NAME)
        assert bucket.listing() == []

    async def test_what_an_alias_points_at_is_not_deleted(
        self, store: S3Store, adapter: Path
    ) -> None:
        await publish(store, adapter)
        await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])
        with pytest.raises(Conflict, match="stable"):
            await store.delete(NAME)
        await store.set_alias("acme", "default", "stable", [])
        assert await store.delete(NAME)

    async def test_a_tombstone_hides_what_is_still_being_removed(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        await publish(store, adapter)
        bucket.put("acme/default/v1/_deleted.json", b"{}")
        assert await store.manifest(NAME) is None
        assert await store.list("acme") == ()
        assert await store.delete(NAME)
        assert bucket.listing() == ["acme/default/v1/_deleted.json"]


class TestAliases:
    async def test_an_alias_is_set_changed_and_removed(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        await publish(store, adapter)
        await publish(store, adapter, NAME.at("v2"))
        one, two = AliasTarget("v1", 9.0), AliasTarget("v2", 1.0)
        assert await store.aliases("acme", "default") == {}
        await store.set_alias("acme", "default", "stable", [one])
        after = await store.set_alias("acme", "default", "canary", [one, two])
        assert after == {"stable": (one,), "canary": (one, two)}
        assert await store.aliases("acme", "default") == after
        assert json.loads(bucket.get("acme/default/_aliases.json")) == {
            "stable": [{"version": "v1", "weight": 9.0}],
            "canary": [{"version": "v1", "weight": 9.0}, {"version": "v2", "weight": 1.0}],
        }
        assert await store.set_alias("acme", "default", "canary", []) == {"stable": (one,)}

    async def test_names_of_aliases_and_versions_are_disjoint(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        await publish(store, adapter)
        await store.set_alias("acme", "default", "v9", [AliasTarget("v1", 1.0)])
        with pytest.raises(Conflict, match="alias"):
            await publish(store, adapter, NAME.at("v9"))
        with pytest.raises(Conflict, match="alias"):
            await publish(store, adapter, NAME.at("latest"))
        with pytest.raises(Conflict, match="version"):
            await store.set_alias("acme", "default", "v1", [AliasTarget("v1", 1.0)])
        assert not any("/v9/" in key or "/latest/" in key for key in bucket.listing())

    async def test_an_alias_of_what_is_not_there_is_refused(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        with pytest.raises(AdapterNotFound):
            await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])
        await publish(store, adapter)
        await store.delete(NAME)
        with pytest.raises(AdapterNotFound):
            await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])
        assert bucket.listing() == ["acme/default/v1/_deleted.json"]

    async def test_of_many_writers_none_is_lost(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        await publish(store, adapter)
        stores = [S3Store(bucket.settings()) for _ in range(4)]
        target = [AliasTarget("v1", 1.0)]
        outcomes = await asyncio.gather(
            *(
                stores[n % 4].set_alias("acme", "default", f"a{n}", target)
                for n in range(writers(bucket))
            ),
            return_exceptions=True,
        )
        assert all(isinstance(o, dict | Conflict) for o in outcomes), outcomes
        done = {f"a{n}" for n, outcome in enumerate(outcomes) if isinstance(outcome, dict)}
        assert set(await store.aliases("acme", "default")) == done
        assert len(done) >= 4
        for opened in stores:
            await opened.close()

    async def test_an_alias_and_a_version_of_one_name_never_both_stay(
        self, bucket: Any, store: S3Store, adapter: Path
    ) -> None:
        """Published and pointed at the same moment, again and again."""
        await publish(store, adapter)
        other = S3Store(bucket.settings())
        for number in range(writers(bucket) // 2):
            outcomes = await asyncio.gather(
                publish(store, adapter, NAME.at(f"x{number}")),
                other.set_alias("acme", "default", f"x{number}", [AliasTarget("v1", 1.0)]),
                return_exceptions=True,
            )
            unexpected = [o for o in outcomes if isinstance(o, Exception)]
            assert all(isinstance(error, Conflict) for error in unexpected), outcomes
            version = await store.manifest(NAME.at(f"x{number}"))
            aliases = await store.aliases("acme", "default")
            assert version is None or f"x{number}" not in aliases
        await other.close()


class TestListing:
    async def test_versions_are_listed_in_order_with_digest_and_size(
        self, bucket: Any, store: S3Store, adapter: Path, other: Path
    ) -> None:
        await publish(store, adapter, NAME.at("v10"))
        await publish(store, other, AdapterName("acme", "sql", "v1"))
        await publish(store, adapter, AdapterName("globex", "default", "v1"))
        bucket.put("acme/default/v11/adapter_config.json", b"{}")
        bucket.put("acme/default/_aliases.json", b"{}")
        bucket.put("acme/README.md", b"x")
        bucket.put("acme/default/v10/sub/manifest.json", b"x")
        bucket.put("_reserved/default/v1/manifest.json", b"x")
        manifest, second = build_manifest(adapter), build_manifest(other)
        for _ in range(2):
            assert await store.list("acme") == (
                StoredVersion(NAME.at("v10"), manifest.digest, manifest.num_bytes),
                StoredVersion(AdapterName("acme", "sql", "v1"), second.digest, second.num_bytes),
            )
        assert await store.tenants() == ("acme", "globex")
        assert await store.list("nobody") == ()
        assert await store.versions("acme", "default") == ("v10",)
        assert await store.versions("acme", "none") == ()
        for listing in (store.list("../acme"), store.versions("acme", "../sql")):
            with pytest.raises(MalformedName):
                await listing

    async def test_more_than_a_page_is_listed(
        self, bucket: Any, store: S3Store, adapter: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(s3_client, "_PAGE", 7)
        data = build_manifest(adapter).to_json()
        for number in range(30):
            bucket.put(f"acme/default/v{number}/manifest.json", data)
        listed = await store.list("acme")
        assert len(listed) == 30
        assert listed == tuple(sorted(listed))

    async def test_folders_without_a_manifest_are_versions_where_that_is_accepted(
        self, bucket: Any, adapter: Path, tmp_path: Path
    ) -> None:
        manifest = build_manifest(adapter)
        for file in manifest.files:
            bucket.put(f"acme/default/v1/{file.path}", (adapter / file.path).read_bytes())
        store = S3Store(bucket.settings(accept_unpublished=True))
        assert await store.list("acme") == (StoredVersion(NAME, None, manifest.num_bytes),)
        (tmp_path / "back").mkdir()
        assert await store.fetch(NAME, tmp_path / "back") == manifest
        await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])
        await store.close()


def test_the_location_is_for_people(bucket: Any) -> None:
    store = S3Store(S3Settings(bucket=bucket.name, prefix="a"))
    assert store.location == f"s3://{bucket.name}/a"


async def test_a_missing_bucket_is_told(moto_bucket: Any) -> None:
    settings = moto_bucket.settings()
    store = S3Store(S3Settings(bucket="no-such-bucket", endpoint_url=settings.endpoint_url))
    with pytest.raises(MuralError, match="bucket"):
        await store.manifest(NAME)
    await store.close()
