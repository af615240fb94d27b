"""What S3 stores do on bad days, injected in front of moto's server."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.download import Downloader, DownloadSettings
from mural_resolvers.errors import Conflict, Forbidden, MuralError, Unavailable
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.resolver import AdapterDescription
from mural_resolvers.s3 import CredentialsRefused, S3Resolver, S3Store
from mural_resolvers.tenants import Principal
from mural_resolvers.versions import AliasTarget

NAME = AdapterName("acme", "default", "v1")
SECRET = "muralsecret"


@pytest.fixture
async def store(moto_bucket: Any, fault_proxy: Any) -> AsyncIterator[S3Store]:
    """A store behind the proxy, that does not try again by itself."""
    opened = S3Store(moto_bucket.settings(endpoint_url=fault_proxy.url, max_attempts=1))
    yield opened
    await opened.close()


@pytest.fixture
async def resolver(moto_bucket: Any, fault_proxy: Any) -> AsyncIterator[S3Resolver]:
    opened = S3Resolver(
        moto_bucket.settings(endpoint_url=fault_proxy.url, max_attempts=1, read_timeout_s=5)
    )
    yield opened
    await opened.close()


async def resolved(resolver: S3Resolver, base: BaseSpec) -> AdapterDescription:
    found = await resolver.resolve(Principal("acme"), NAME, base)
    assert found is not None
    return found


class TestDownload:
    """Breaks of all kinds, over the real client."""

    @pytest.fixture
    async def published(self, moto_bucket: Any, adapter: Path) -> None:
        store = S3Store(moto_bucket.settings())
        await store.publish(NAME, adapter, build_manifest(adapter))
        await store.close()

    async def fetch(
        self, resolver: S3Resolver, base: BaseSpec, folder: Path, **settings: Any
    ) -> None:
        found = await resolved(resolver, base)
        os.mkdir(folder)
        bounds: dict[str, Any] = {"part_bytes": 400, "backoff_s": 0.01, "max_backoff_s": 0.02}
        downloader = Downloader(DownloadSettings(**(bounds | settings)))
        try:
            await downloader.download(resolver, found, folder, lambda _: None)
        finally:
            await downloader.close()

    @pytest.mark.parametrize(
        "fault",
        [
            {"cut": 100},
            {"cut": 0},
            {"lose": True},
            {"status": 503, "code": "SlowDown", "headers": {"Retry-After": "1"}},
            {"status": 500, "code": "InternalError"},
            {"status": 429, "code": "TooManyRequests"},
        ],
    )
    async def test_each_range_that_breaks_once_is_read_on(
        self,
        published: None,
        resolver: S3Resolver,
        fault_proxy: Any,
        faults: Any,
        base_spec: BaseSpec,
        adapter: Path,
        tmp_path: Path,
        fault: dict[str, Any],
    ) -> None:
        broken: set[str] = set()

        def once(method: str, path: str, headers: dict[str, str]) -> Any:
            if "adapter_" in path and headers.get("range", "") not in broken:
                broken.add(headers.get("range", ""))
                return faults(**fault) if len(broken) < 8 else None
            return None

        fault_proxy.script = once
        await self.fetch(resolver, base_spec, tmp_path / "back")
        assert build_manifest(tmp_path / "back") == build_manifest(adapter)
        assert len(broken) > 3

    async def test_a_body_that_stops_coming_is_read_on(
        self,
        published: None,
        resolver: S3Resolver,
        fault_proxy: Any,
        faults: Any,
        base_spec: BaseSpec,
        adapter: Path,
        tmp_path: Path,
    ) -> None:
        stalls = iter([True])

        def once(method: str, path: str, headers: dict[str, str]) -> Any:
            if "safetensors" in path and next(stalls, False):
                return faults(cut=100, pause=True)
            return None

        fault_proxy.script = once
        await self.fetch(resolver, base_spec, tmp_path / "back", stall_s=0.3)
        assert build_manifest(tmp_path / "back") == build_manifest(adapter)

    @pytest.mark.parametrize(
        "fault", [{"status": 503, "code": "SlowDown"}, {"cut": 0}, {"lose": True}]
    )
    async def test_a_store_that_goes_on_breaking_off_is_unavailable(
        self,
        published: None,
        resolver: S3Resolver,
        fault_proxy: Any,
        faults: Any,
        base_spec: BaseSpec,
        tmp_path: Path,
        fault: dict[str, Any],
    ) -> None:
        fault_proxy.script = lambda method, path, headers: (
            faults(**fault) if "safetensors" in path else None
        )
        with pytest.raises(Unavailable) as caught:
            await self.fetch(resolver, base_spec, tmp_path / "back", max_attempts=2)
        assert caught.value.retry_after_s

    async def test_a_store_that_ignores_ranges_is_not_believed(
        self,
        published: None,
        resolver: S3Resolver,
        fault_proxy: Any,
        faults: Any,
        base_spec: BaseSpec,
        tmp_path: Path,
    ) -> None:
        fault_proxy.script = lambda method, path, headers: faults(ignore="range")
        with pytest.raises(Unavailable, match="ignores ranges"):
            await self.fetch(resolver, base_spec, tmp_path / "back", max_attempts=1)


class TestRefusals:
    @pytest.mark.parametrize(
        "code",
        ["InvalidAccessKeyId", "SignatureDoesNotMatch", "RequestTimeTooSkewed", "ExpiredToken"],
    )
    async def test_refused_credentials_are_the_sources_trouble_and_the_stores_users(
        self,
        resolver: S3Resolver,
        store: S3Store,
        fault_proxy: Any,
        faults: Any,
        base_spec: BaseSpec,
        caplog: pytest.LogCaptureFixture,
        code: str,
    ) -> None:
        fault_proxy.script = lambda *request: faults(status=403, code=code)
        with caplog.at_level(logging.WARNING), pytest.raises(Unavailable) as caught:
            await resolver.resolve(Principal("acme"), NAME, base_spec)
        assert code in caplog.text
        assert code not in caught.value.message
        with pytest.raises(CredentialsRefused, match=code):
            await store.manifest(NAME)

    async def test_an_object_refused_in_a_store_that_lists_is_forbidden(
        self, resolver: S3Resolver, fault_proxy: Any, faults: Any, base_spec: BaseSpec
    ) -> None:
        fault_proxy.script = lambda method, path, headers: (
            faults(status=403, code="AccessDenied") if "manifest.json" in path else None
        )
        with pytest.raises(Forbidden) as caught:
            await resolver.resolve(Principal("acme"), NAME, base_spec)
        assert caught.value.message == Forbidden().message

    async def test_a_store_that_refuses_everything_is_unavailable(
        self, resolver: S3Resolver, fault_proxy: Any, faults: Any, base_spec: BaseSpec
    ) -> None:
        """Else a policy that is wrong for a minute would make every tenant's adapter 403."""
        fault_proxy.script = lambda *request: faults(status=403, code="AccessDenied")
        with pytest.raises(Unavailable):
            await resolver.resolve(Principal("acme"), NAME, base_spec)

    async def test_a_range_that_is_refused_is_forbidden(
        self,
        moto_bucket: Any,
        resolver: S3Resolver,
        fault_proxy: Any,
        faults: Any,
        base_spec: BaseSpec,
        adapter: Path,
        tmp_path: Path,
    ) -> None:
        store = S3Store(moto_bucket.settings())
        await store.publish(NAME, adapter, build_manifest(adapter))
        await store.close()
        fault_proxy.script = lambda method, path, headers: (
            faults(status=403, code="AccessDenied") if "safetensors" in path else None
        )
        found = await resolved(resolver, base_spec)
        downloader = Downloader()
        with pytest.raises(Forbidden):
            await downloader.download(resolver, found, tmp_path, lambda _: None)
        await downloader.close()

    async def test_nothing_that_a_store_says_is_repeated(
        self, store: S3Store, fault_proxy: Any, faults: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG, logger="mural")
        for status, code in [(403, SECRET + " <x>"), (500, "a b"), (400, "x" * 500)]:
            fault_proxy.script = lambda *request, s=status, c=code: faults(status=s, code=c)
            with pytest.raises(MuralError) as caught:
                await store.manifest(NAME)
            assert SECRET not in caught.value.message
            assert "xxx" not in caught.value.message
            assert caught.value.__cause__ is None
        assert SECRET not in caplog.text

    @pytest.mark.parametrize(
        ("headers", "asked"), [({"Retry-After": "7"}, 7.0), ({"Retry-After": "soon"}, 1.0)]
    )
    async def test_an_overloaded_store_says_when_to_come_back(
        self,
        store: S3Store,
        fault_proxy: Any,
        faults: Any,
        headers: dict[str, str],
        asked: float,
    ) -> None:
        fault_proxy.script = lambda *request: faults(503, "SlowDown", headers)
        with pytest.raises(Unavailable) as caught:
            await store.manifest(NAME)
        assert caught.value.retry_after_s == asked

    async def test_an_answer_that_drips_is_bounded(
        self, moto_bucket: Any, fault_proxy: Any, faults: Any
    ) -> None:
        moto_bucket.put("acme/default/v1/manifest.json", b"{}" * 100)
        fault_proxy.script = lambda method, path, headers: faults(cut=1, pause=True)
        store = S3Store(
            moto_bucket.settings(
                endpoint_url=fault_proxy.url, max_attempts=1, call_timeout_s=2, read_timeout_s=60
            )
        )
        with pytest.raises(Unavailable, match="in time"):
            await store.manifest(NAME)
        await store.close()


async def test_a_proxy_of_the_environment_is_used(
    moto_bucket: Any,
    fault_proxy: Any,
    faults: Any,
    base_spec: BaseSpec,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", fault_proxy.url)
    fault_proxy.script = lambda *request: faults(status=404, code="NoSuchKey")
    settings = moto_bucket.settings(endpoint_url="http://store.example:9000")
    resolver = S3Resolver(settings)
    assert await resolver.resolve(Principal("acme"), NAME, base_spec) is None
    await resolver.close()
    assert all(path.startswith("http://store.example:9000/") for _, path in fault_proxy.requests)
    assert fault_proxy.requests


class TestPublishing:
    async def test_a_client_that_tries_again_gets_over_a_slow_down(
        self, moto_bucket: Any, fault_proxy: Any, faults: Any, adapter: Path
    ) -> None:
        refused: set[tuple[str, str]] = set()

        def once(method: str, path: str, headers: dict[str, str]) -> Any:
            if (method, path) not in refused and len(refused) < 3:
                refused.add((method, path))
                return faults(status=503, code="SlowDown")
            return None

        fault_proxy.script = once
        store = S3Store(moto_bucket.settings(endpoint_url=fault_proxy.url, max_attempts=3))
        assert await store.publish(NAME, adapter, build_manifest(adapter))
        await store.close()
        assert len(refused) == 3

    async def test_a_lost_answer_to_a_conditional_write_is_found_to_be_ours(
        self, moto_bucket: Any, fault_proxy: Any, faults: Any, adapter: Path
    ) -> None:
        """The store did it, the client asks again and hears that the condition fails."""
        lost: set[str] = set()

        def once(method: str, path: str, headers: dict[str, str]) -> Any:
            if method == "PUT" and path not in lost:
                lost.add(path)
                return faults(lose=True)
            return None

        fault_proxy.script = once
        store = S3Store(moto_bucket.settings(endpoint_url=fault_proxy.url, max_attempts=3))
        await store.publish(NAME, adapter, build_manifest(adapter))
        assert await store.manifest(NAME) == build_manifest(adapter)
        target = [AliasTarget("v1", 1.0)]
        await store.set_alias("acme", "default", "stable", target)
        assert await store.aliases("acme", "default") == {"stable": tuple(target)}
        await store.close()
        assert len(lost) == 4

    @pytest.mark.parametrize(
        ("status", "code"), [(409, "ConditionalRequestConflict"), (412, "PreconditionFailed")]
    )
    async def test_a_conflict_of_conditional_writes_is_tried_again(
        self, store: S3Store, fault_proxy: Any, faults: Any, adapter: Path, status: int, code: str
    ) -> None:
        refused: set[str] = set()

        def once(method: str, path: str, headers: dict[str, str]) -> Any:
            if method == "PUT" and path not in refused and "manifest" not in path:
                refused.add(path)
                return faults(status=status, code=code)
            return None

        fault_proxy.script = once
        assert await store.publish(NAME, adapter, build_manifest(adapter))
        await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])
        assert await store.aliases("acme", "default") == {"stable": (AliasTarget("v1", 1.0),)}
        assert len(refused) == 3

    async def test_conflicts_without_end_are_told(
        self, moto_bucket: Any, fault_proxy: Any, faults: Any, adapter: Path
    ) -> None:
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        settings = moto_bucket.settings(endpoint_url=fault_proxy.url, max_attempts=1)
        store = S3Store(settings, sleep=sleep, random=lambda: 1.0)
        await store.publish(NAME, adapter, build_manifest(adapter))
        fault_proxy.script = lambda method, path, headers: (
            faults(status=409, code="ConditionalRequestConflict") if method == "PUT" else None
        )
        with pytest.raises(Conflict, match="try again"):
            await store.set_alias("acme", "default", "stable", [AliasTarget("v1", 1.0)])
        with pytest.raises(Conflict, match="try again"):
            await store.publish(NAME.at("v2"), adapter, build_manifest(adapter))
        assert waits[:7] == [0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0]
        await store.close()

    async def test_a_failed_part_aborts_the_upload(
        self, moto_bucket: Any, fault_proxy: Any, faults: Any, adapter: Path
    ) -> None:
        weights = adapter / "adapter_model.safetensors"
        manifest = build_manifest(adapter)
        weights.write_bytes(weights.read_bytes() + bytes(12 << 20))
        fault_proxy.script = lambda method, path, headers: (
            faults(status=500, code="InternalError") if "partNumber=2" in path else None
        )
        settings = moto_bucket.settings(
            endpoint_url=fault_proxy.url,
            max_attempts=1,
            multipart_bytes=100,
            upload_part_bytes=5 << 20,
        )
        store = S3Store(settings)
        manifest = with_size(manifest, weights)
        with pytest.raises(Unavailable):
            await store.publish(NAME, adapter, manifest)
        await store.close()
        assert moto_bucket.uploads() == []
        assert not any("safetensors" in key for key in moto_bucket.listing())

    async def test_an_abort_that_fails_beside_a_part_on_its_way_is_made_again(
        self, moto_bucket: Any, fault_proxy: Any, faults: Any, adapter: Path
    ) -> None:
        refused = iter([True, False])

        def script(method: str, path: str, headers: Any) -> Any:
            if "partNumber=1" in path or (method == "DELETE" and next(refused)):
                return faults(status=500, code="InternalError")
            return None

        fault_proxy.script = script
        settings = moto_bucket.settings(
            endpoint_url=fault_proxy.url, max_attempts=1, multipart_bytes=100
        )
        store = S3Store(settings)
        with pytest.raises(Unavailable):
            await store.publish(NAME, adapter, build_manifest(adapter))
        await store.close()
        assert next(refused, None) is None
        assert moto_bucket.uploads() == []

    async def test_the_whole_of_a_publication_is_bounded(
        self, moto_bucket: Any, fault_proxy: Any, faults: Any, adapter: Path
    ) -> None:
        fault_proxy.script = lambda method, path, headers: (
            faults(hang=True) if method == "PUT" else None
        )
        settings = moto_bucket.settings(
            endpoint_url=fault_proxy.url, transfer_timeout_s=1.5, read_timeout_s=60
        )
        store = S3Store(settings)
        with pytest.raises(Unavailable, match="in time"):
            await asyncio.wait_for(store.publish(NAME, adapter, build_manifest(adapter)), 30)
        await store.close()


def with_size(manifest: Any, weights: Path) -> Any:
    """The manifest with the size that the weights have now; its hash is not looked at."""
    config, old = manifest.files
    new = msgspec.structs.replace(old, size=weights.stat().st_size)
    return msgspec.structs.replace(manifest, files=(config, new))


class TestBrokenOffAtEveryStep:
    """The store stops answering after so many requests; then another process goes on."""

    MOST_REQUESTS = 14

    def stop_after(self, fault_proxy: Any, faults: Any, requests: int) -> None:
        left = iter(range(requests))

        def script(method: str, path: str, headers: dict[str, str]) -> Any:
            done = next(left, None) is None
            return faults(status=500, code="InternalError") if done else None

        fault_proxy.script = script

    async def test_a_version_is_whole_or_not_there_and_can_be_published_again(
        self, moto_bucket: Any, store: S3Store, fault_proxy: Any, faults: Any, adapter: Path
    ) -> None:
        healthy = S3Store(moto_bucket.settings())
        manifest = build_manifest(adapter)
        ended = []
        for requests in range(self.MOST_REQUESTS):
            name = NAME.at(f"v{requests}")
            self.stop_after(fault_proxy, faults, requests)
            try:
                ended.append(await store.publish(name, adapter, manifest))
            except Unavailable:
                ended.append(False)
            there = f"acme/default/{name.version}/manifest.json" in moto_bucket.listing()
            assert await healthy.manifest(name) == (manifest if there else None)
            assert await healthy.publish(name, adapter, manifest) is not there
            assert await healthy.manifest(name) == manifest
        assert ended[-1]
        assert not ended[0]
        await healthy.close()

    async def test_a_deletion_that_has_begun_hides_and_can_be_ended(
        self, moto_bucket: Any, store: S3Store, fault_proxy: Any, faults: Any, adapter: Path
    ) -> None:
        healthy = S3Store(moto_bucket.settings())
        manifest = build_manifest(adapter)
        for requests in range(8):
            name = NAME.at(f"v{requests}")
            await healthy.publish(name, adapter, manifest)
            self.stop_after(fault_proxy, faults, requests)
            with suppress(Unavailable):
                await store.delete(name)
            begun = f"acme/default/{name.version}/_deleted.json" in moto_bucket.listing()
            assert await healthy.manifest(name) == (None if begun else manifest)
            assert await healthy.delete(name)
            left = [key for key in moto_bucket.listing() if f"/{name.version}/" in key]
            assert left == [f"acme/default/{name.version}/_deleted.json"]
        await healthy.close()
