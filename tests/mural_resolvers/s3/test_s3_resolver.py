"""The source over S3: what it describes, and that it reads what it described."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.download import Downloader, DownloadSettings
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    TooLarge,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.resolver import AdapterDescription, SourceFile
from mural_resolvers.s3 import S3Resolver, S3Settings, S3Store
from mural_resolvers.tenants import Principal

NAME = AdapterName("acme", "default", "v1")
WEIGHTS = "adapter_model.safetensors"


class Sources:
    """Makes resolvers over a bucket, and closes them."""

    def __init__(self, bucket: Any, base: BaseSpec) -> None:
        self.bucket = bucket
        self.base = base
        self.opened: list[S3Resolver] = []

    def make(self, settings: S3Settings | None = None, **more: Any) -> S3Resolver:
        self.opened.append(S3Resolver(settings or self.bucket.settings(), **more))
        return self.opened[-1]

    async def ask(
        self, resolver: S3Resolver, name: AdapterName = NAME
    ) -> AdapterDescription | None:
        return await resolver.resolve(Principal("acme"), name, self.base)

    def put(self, folder: Path, name: AdapterName = NAME, *, published: bool = True) -> None:
        place = f"{name.tenant}/{name.adapter}/{name.version}"
        manifest = build_manifest(folder)
        for file in manifest.files:
            self.bucket.put(f"{place}/{file.path}", (folder / file.path).read_bytes())
        if published:
            self.bucket.put(f"{place}/manifest.json", manifest.to_json())

    def alias(self, **aliases: str) -> None:
        record = {alias: [{"version": version}] for alias, version in aliases.items()}
        self.bucket.put("acme/default/_aliases.json", json.dumps(record).encode())


async def opened(bucket: Any, base: BaseSpec) -> AsyncIterator[Sources]:
    made = Sources(bucket, base)
    yield made
    for resolver in made.opened:
        await resolver.close()


@pytest.fixture
async def sources(bucket: Any, base_spec: BaseSpec) -> AsyncIterator[Sources]:
    """Over each server."""
    async for made in opened(bucket, base_spec):
        yield made


@pytest.fixture
async def moto_sources(moto_bucket: Any, base_spec: BaseSpec) -> AsyncIterator[Sources]:
    """Over moto's server alone."""
    async for made in opened(moto_bucket, base_spec):
        yield made


async def download(resolver: S3Resolver, found: AdapterDescription, folder: Path) -> None:
    os.mkdir(folder)
    downloader = Downloader(DownloadSettings(part_bytes=300, max_attempts=2, backoff_s=0))
    try:
        await downloader.download(resolver, found, folder, lambda _: None)
    finally:
        await downloader.close()


class TestPublished:
    async def test_a_version_is_described_by_its_manifest(
        self, sources: Sources, adapter: Path, tmp_path: Path
    ) -> None:
        sources.put(adapter)
        resolver, manifest = sources.make(), build_manifest(adapter)
        found = await sources.ask(resolver)
        assert found == AdapterDescription(
            NAME,
            manifest.digest,
            tuple(SourceFile(file.path, file.size, file.sha256) for file in manifest.files),
            manifest,
        )
        await download(resolver, found, tmp_path / "back")
        assert build_manifest(tmp_path / "back") == manifest

    async def test_what_a_store_published_is_described(
        self, sources: Sources, adapter: Path
    ) -> None:
        store = S3Store(sources.bucket.settings())
        await store.publish(NAME, adapter, build_manifest(adapter))
        found = await sources.ask(sources.make())
        assert found is not None
        assert found.digest == build_manifest(adapter).digest
        await store.delete(NAME)
        assert await sources.ask(sources.make()) is None
        await store.close()

    async def test_what_is_not_there_is_none(self, sources: Sources) -> None:
        resolver = sources.make()
        assert await sources.ask(resolver) is None
        assert await sources.ask(resolver, NAME.at("latest")) is None

    async def test_a_half_upload_is_never_seen(self, sources: Sources, adapter: Path) -> None:
        sources.put(adapter, published=False)
        assert await sources.ask(sources.make()) is None
        assert await sources.ask(sources.make(), NAME.at("latest")) is None

    async def test_a_tombstone_hides_a_version(self, sources: Sources, adapter: Path) -> None:
        sources.put(adapter)
        sources.bucket.put("acme/default/v1/_deleted.json", b"{}")
        everything = sources.make(sources.bucket.settings(accept_unpublished=True))
        for resolver in (sources.make(), everything):
            assert await sources.ask(resolver) is None
            assert await sources.ask(resolver, NAME.at("latest")) is None

    async def test_a_file_that_is_gone_is_told(
        self, sources: Sources, adapter: Path, tmp_path: Path
    ) -> None:
        sources.put(adapter)
        resolver = sources.make()
        found = await sources.ask(resolver)
        assert found is not None
        sources.bucket.boto.delete_object(
            Bucket=sources.bucket.name, Key=f"adapters/acme/default/v1/{WEIGHTS}"
        )
        with pytest.raises(AdapterNotFound):
            await download(resolver, found, tmp_path / "back")

    async def test_a_file_of_another_size_is_a_conflict(
        self, sources: Sources, adapter: Path, tmp_path: Path
    ) -> None:
        sources.put(adapter)
        resolver = sources.make()
        found = await sources.ask(resolver)
        assert found is not None
        for data in (b"short", bytes(100_000)):
            sources.bucket.put(f"acme/default/v1/{WEIGHTS}", data)
            with pytest.raises(Conflict, match="immutable"):
                await download(resolver, found, tmp_path / f"back{len(data)}")

    async def test_a_manifest_that_is_none_is_unusable(self, moto_sources: Sources) -> None:
        moto_sources.bucket.put("acme/default/v1/manifest.json", b"{}")
        with pytest.raises(UnusableAdapter):
            await moto_sources.ask(moto_sources.make())

    async def test_a_manifest_beyond_its_limit_is_too_large(self, moto_sources: Sources) -> None:
        moto_sources.bucket.put("acme/default/v1/manifest.json", bytes(2 << 20))
        with pytest.raises(TooLarge):
            await moto_sources.ask(moto_sources.make())


class TestUnpublished:
    def settings(self, sources: Sources) -> S3Settings:
        settings: S3Settings = sources.bucket.settings(accept_unpublished=True)
        return settings

    async def test_a_folder_is_described_by_its_objects_where_that_is_accepted(
        self, sources: Sources, adapter: Path, tmp_path: Path
    ) -> None:
        sources.put(adapter, published=False)
        sources.bucket.put("acme/default/v1/README.md", b"not read")
        resolver = sources.make(self.settings(sources))
        found = await sources.ask(resolver)
        assert found is not None
        assert found.manifest is None
        assert found.digest is None
        assert [(file.path, file.size) for file in found.files] == [
            (file.path, file.size) for file in build_manifest(adapter).files
        ]
        assert all(file.tag and file.sha256 is None for file in found.files)
        await download(resolver, found, tmp_path / "back")
        assert build_manifest(tmp_path / "back") == build_manifest(adapter)

    async def test_the_revision_is_the_same_until_an_object_is_another(
        self, sources: Sources, adapter: Path, other: Path
    ) -> None:
        sources.put(adapter, published=False)
        first = await sources.ask(sources.make(self.settings(sources)))
        again = await sources.ask(sources.make(self.settings(sources)))
        sources.put(other, published=False)
        changed = await sources.ask(sources.make(self.settings(sources)))
        assert first is not None
        assert changed is not None
        assert first == again
        assert first.revision != changed.revision

    async def test_a_change_behind_our_back_is_noticed_while_it_is_read(
        self, sources: Sources, adapter: Path, other: Path, tmp_path: Path
    ) -> None:
        sources.put(adapter, published=False)
        resolver = sources.make(self.settings(sources))
        found = await sources.ask(resolver)
        sources.put(other, published=False)
        assert found is not None
        with pytest.raises(Conflict, match="immutable"):
            await download(resolver, found, tmp_path / "back")

    async def test_a_manifest_that_comes_later_gives_the_digest_as_revision(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        moto_sources.put(adapter)
        found = await moto_sources.ask(moto_sources.make(self.settings(moto_sources)))
        assert found is not None
        assert found.revision == build_manifest(adapter).digest

    async def test_what_has_no_weights_yet_is_none(self, moto_sources: Sources) -> None:
        moto_sources.bucket.put("acme/default/v1/adapter_config.json", b"{}")
        resolver = moto_sources.make(self.settings(moto_sources))
        assert await moto_sources.ask(resolver) is None

    async def test_a_pickle_alone_is_refused_and_beside_safetensors_left_out(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        resolver = moto_sources.make(self.settings(moto_sources))
        moto_sources.bucket.put("acme/default/v1/adapter_config.json", b"{}")
        moto_sources.bucket.put("acme/default/v1/adapter_model.bin", b"pickle")
        with pytest.raises(UnusableAdapter, match="pickle"):
            await moto_sources.ask(resolver)
        moto_sources.bucket.put(f"acme/default/v1/{WEIGHTS}", b"weights")
        found = await moto_sources.ask(resolver)
        assert found is not None
        assert [file.path for file in found.files] == ["adapter_config.json", WEIGHTS]

    async def test_the_highest_version_may_be_one(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        moto_sources.put(adapter, NAME.at("v2"), published=False)
        moto_sources.put(adapter)
        latest = NAME.at("latest")
        strict = await moto_sources.ask(moto_sources.make(), latest)
        lenient = await moto_sources.ask(moto_sources.make(self.settings(moto_sources)), latest)
        assert strict is not None
        assert lenient is not None
        assert (strict.name.version, lenient.name.version) == ("v1", "v2")


class TestAliases:
    async def test_latest_is_the_highest_version(self, sources: Sources, adapter: Path) -> None:
        for version in ("v9", "v10", "v2", "alpha"):
            sources.put(adapter, NAME.at(version))
        sources.put(adapter, AdapterName("acme", "other", "v99"))
        found = await sources.ask(sources.make(), NAME.at("latest"))
        assert found is not None
        assert found.name == NAME.at("v10")

    async def test_latest_goes_on_to_the_next_when_it_was_deleted(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        settings = moto_sources.bucket.settings(alias_cache_s=3600)
        resolver = moto_sources.make(settings)
        for version in ("v1", "v2"):
            moto_sources.put(adapter, NAME.at(version))
        first = await moto_sources.ask(resolver, NAME.at("latest"))
        moto_sources.bucket.put("acme/default/v2/_deleted.json", b"{}")
        then = await moto_sources.ask(resolver, NAME.at("latest"))
        assert first is not None
        assert then is not None
        assert (first.name.version, then.name.version) == ("v2", "v1")

    async def test_an_alias_leads_to_its_version(self, sources: Sources, adapter: Path) -> None:
        for version in ("v1", "v2"):
            sources.put(adapter, NAME.at(version))
        sources.alias(stable="v1", latest="v1")
        resolver = sources.make()
        for alias in ("stable", "latest"):
            found = await sources.ask(resolver, NAME.at(alias))
            assert found is not None
            assert found.name == NAME

    async def test_weights_are_shares_of_the_requests(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        for version in ("v1", "v2"):
            moto_sources.put(adapter, NAME.at(version))
        record = {"canary": [{"version": "v1", "weight": 3}, {"version": "v2", "weight": 1}]}
        moto_sources.bucket.put("acme/default/_aliases.json", json.dumps(record).encode())
        draws = iter([0.0, 0.74, 0.75, 0.99])
        resolver = moto_sources.make(draw=lambda: next(draws))
        picked = [await moto_sources.ask(resolver, NAME.at("canary")) for _ in range(4)]
        assert [p and p.name.version for p in picked] == ["v1", "v1", "v2", "v2"]

    async def test_an_alias_of_an_absent_version_is_told(self, moto_sources: Sources) -> None:
        moto_sources.alias(stable="v7")
        with pytest.raises(AdapterNotFound, match="v7"):
            await moto_sources.ask(moto_sources.make(), NAME.at("stable"))

    async def test_a_name_that_is_alias_and_version_is_a_conflict(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        moto_sources.put(adapter)
        moto_sources.put(adapter, AdapterName("globex", "default", "latest"))
        moto_sources.alias(v1="v1")
        with pytest.raises(Conflict):
            await moto_sources.ask(moto_sources.make())
        with pytest.raises(Conflict):
            await moto_sources.ask(moto_sources.make(), AdapterName("globex", "default", "latest"))

    async def test_aliases_are_believed_for_their_time(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        now = 0.0
        for version in ("v1", "v2"):
            moto_sources.put(adapter, NAME.at(version))
        moto_sources.alias(stable="v1")
        settings = moto_sources.bucket.settings(alias_cache_s=5.0)
        resolver = moto_sources.make(settings, clock=lambda: now)

        async def stable() -> str | None:
            found = await moto_sources.ask(resolver, NAME.at("stable"))
            assert found is not None
            return found.name.version

        assert await stable() == "v1"
        moto_sources.alias(stable="v2")
        now = 4.9
        assert await stable() == "v1"
        now = 5.0
        assert await stable() == "v2"

    async def test_a_record_of_aliases_that_is_none_is_unusable(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        moto_sources.put(adapter)
        moto_sources.bucket.put("acme/default/_aliases.json", b"[]")
        with pytest.raises(UnusableAdapter):
            await moto_sources.ask(moto_sources.make())


class TestWhatIsUnavailable:
    async def test_a_store_that_is_down(self, moto_sources: Sources) -> None:
        settings = moto_sources.bucket.settings(
            endpoint_url="http://127.0.0.1:9", max_attempts=1, connect_timeout_s=0.5
        )
        with pytest.raises(Unavailable) as caught:
            await moto_sources.ask(moto_sources.make(settings))
        assert caught.value.retry_after_s

    async def test_no_bucket_and_no_credentials_and_no_profile(
        self,
        moto_sources: Sources,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        settings = moto_sources.bucket.settings(bucket="no-such-bucket")
        with pytest.raises(Unavailable, match="bucket"):
            await moto_sources.ask(moto_sources.make(settings))
        with pytest.raises(Unavailable, match="present"):
            await moto_sources.ask(
                moto_sources.make(moto_sources.bucket.settings(profile="none-such"))
            )
        monkeypatch.delenv("AWS_ACCESS_KEY_ID")
        monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
        with pytest.raises(Unavailable, match="present"):
            await moto_sources.ask(moto_sources.make())
        assert "No credentials" in caplog.text

    async def test_a_hundred_names_at_once_are_answered(
        self, moto_sources: Sources, adapter: Path
    ) -> None:
        moto_sources.put(adapter)
        resolver = moto_sources.make()
        names = [NAME, *(NAME.at(f"w{number}") for number in range(30))]
        found = await asyncio.gather(*(moto_sources.ask(resolver, name) for name in names))
        assert [f is not None for f in found] == [True] + 30 * [False]
