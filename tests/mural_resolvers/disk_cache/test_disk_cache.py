"""Finding, staging, linking, leasing and forgetting in a disk cache."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.digest import WEIGHTS_FILE
from mural_resolvers.disk_cache import CacheSettings, DiskCache, NotCached
from mural_resolvers.errors import (
    Conflict,
    InvalidInput,
    ManifestMismatch,
    TooLarge,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.names import parse_name

OpenCache = Callable[..., DiskCache]
Make = Callable[..., Any]
V1, V2 = parse_name("acme:v1"), parse_name("acme:v2")


def test_committed_content_is_found_by_its_name_and_by_its_digest(
    cache: DiskCache, make: Make
) -> None:
    version = make(1)

    version.put(cache, V1, revision="etag-1")

    found = cache.find(V1)
    assert found is not None
    assert (found.name, found.source, found.revision) == (V1, "s3", "etag-1")
    assert found.manifest == version.manifest
    assert {path: (found.path / path).read_bytes() for path in version.files} == version.files
    assert cache.content(found.manifest.digest) == found.manifest
    assert cache.find(V2) is None
    cache.check_integrity(deep=True)


def test_two_versions_share_the_file_that_both_have(cache: DiskCache, make: Make) -> None:
    one, two = make(1).put(cache, V1), make(2).put(cache, V2)

    config = "adapter_config.json"
    assert os.path.samefile(one.path / config, two.path / config)
    assert cache.usage().bytes == 2 + 98 + 98
    assert cache.usage().by_tenant == {"acme": 200}


def test_what_is_staged_is_not_seen_until_it_is_committed(cache: DiskCache, make: Make) -> None:
    version = make(1)
    staging = version.stage(cache)

    assert cache.content(version.digest) is None
    staging.discard()
    staging.discard()

    assert not staging.folder.exists()
    assert cache.content(version.digest) is None
    assert cache.usage().bytes == 0


def test_a_name_keeps_its_content_even_when_that_has_gone(
    open_cache: OpenCache, make: Make
) -> None:
    cache = open_cache(quota_bytes=150)
    make(1).put(cache, V1)
    make(2).put(cache, V2)
    assert cache.find(V1) is None

    with pytest.raises(Conflict):
        make(3).put(cache, V1)

    assert cache.find(V1) is None
    make(1).put(cache, V1)
    assert cache.find(V1) is not None


def test_a_forgotten_name_may_have_other_content(cache: DiskCache, make: Make) -> None:
    found = make(1).put(cache, V1)

    cache.forget(V1)
    cache.forget(V1)

    assert cache.find(V1) is None
    assert cache.content(found.manifest.digest) is not None
    make(2).put(cache, V1)


def test_a_further_name_is_linked_to_cached_content(cache: DiskCache, make: Make) -> None:
    digest = make(1).put(cache, V1).manifest.digest
    other = make(3).put(cache, parse_name("acme:v3")).manifest.digest

    linked = cache.link(V2, digest, source="hub", revision="c0ffee", tenant="acme")

    assert linked == cache.find(V2)
    assert cache.link(V2, "0" * 64, source="hub", revision="x", tenant="acme") is None
    assert cache.link(V2, "../../etc", source="hub", revision="x", tenant="acme") is None
    with pytest.raises(Conflict):
        cache.link(V2, other, source="hub", revision="x", tenant="acme")


def test_a_name_takes_over_what_a_source_says_of_the_same_content(
    cache: DiskCache, make: Make
) -> None:
    digest = make(1).put(cache, V1, revision="old").manifest.digest

    cache.link(V1, digest, source="hub", revision="new", tenant="acme")

    found = cache.find(V1)
    assert found is not None
    assert (found.source, found.revision) == ("hub", "new")


def test_content_that_two_bring_at_once_is_there_once(cache: DiskCache, make: Make) -> None:
    version = make(1)
    first, second = version.stage(cache), version.stage(cache)

    first.commit(version.manifest, V1, "s3", "r")
    second.commit(version.manifest, V2, "s3", "r")

    assert cache.usage().versions == 1
    assert cache.find(V1) is not None
    assert cache.find(V2) is not None
    cache.check_integrity(deep=True)


def test_more_than_the_whole_quota_is_refused_before_it_is_staged(open_cache: OpenCache) -> None:
    cache = open_cache(quota_bytes=100)

    with pytest.raises(TooLarge):
        cache.stage(101, "acme")

    cache.stage(100, "acme").discard()


def test_reservations_count_and_are_seen_by_other_processes(open_cache: OpenCache) -> None:
    one, other = open_cache(quota_bytes=100), open_cache(quota_bytes=100)
    staging = one.stage(60, "acme")

    with pytest.raises(Unavailable):
        other.stage(60, "acme")

    staging.discard()
    other.stage(60, "acme").discard()


def test_a_dropped_staging_gives_its_bytes_back(open_cache: OpenCache) -> None:
    cache = open_cache(quota_bytes=100)
    cache.stage(60, "acme")

    cache.stage(60, "acme").discard()


def test_closing_discards_and_releases(open_cache: OpenCache, make: Make) -> None:
    cache, other = open_cache(quota_bytes=300), open_cache(quota_bytes=300)
    digest = make(1).put(cache, V1).manifest.digest
    lease, staging = cache.lease(digest), cache.stage(150, "acme")

    cache.close()

    assert not staging.folder.exists()
    other.stage(300, "acme").discard()
    lease.release()
    assert other.content(digest) is None


def test_content_that_is_not_what_the_manifest_states_is_not_committed(
    cache: DiskCache, make: Make
) -> None:
    version = make(1)
    short, missing, more = (version.stage(cache) for _ in range(3))
    (short.folder / WEIGHTS_FILE).write_bytes(b"short")
    (missing.folder / WEIGHTS_FILE).unlink()

    with pytest.raises(ManifestMismatch):
        short.commit(version.manifest, V1, "s3", "r")
    with pytest.raises(UnusableAdapter):
        missing.commit(version.manifest, V1, "s3", "r")
    larger = make(1, 200)
    larger.write(more.folder)
    with pytest.raises(TooLarge):
        more.commit(larger.manifest, V1, "s3", "r")

    assert cache.usage().versions == 0
    with pytest.raises(Unavailable):
        short.commit(version.manifest, V1, "s3", "r")


def test_what_else_was_staged_does_not_get_into_the_version(cache: DiskCache, make: Make) -> None:
    version = make(1)
    staging = version.stage(cache)
    (staging.folder / "weights.part").write_bytes(b"x")
    (staging.folder / "nested").mkdir()

    found = staging.commit(version.manifest, V1, "s3", "r")

    assert sorted(os.listdir(found.path)) == sorted([*version.files, "manifest.json"])


def test_a_leased_version_is_not_evicted_and_goes_once_released(
    open_cache: OpenCache, make: Make
) -> None:
    cache, other = open_cache(quota_bytes=250), open_cache(quota_bytes=250)
    digest = make(1).put(cache, V1).manifest.digest
    lease = cache.lease(digest)
    make(2).put(other, V2)

    with pytest.raises(Unavailable):
        other.stage(200, "acme")

    assert other.find(V2) is not None, "nothing is evicted in vain"
    lease.release()
    lease.release()
    other.stage(200, "acme")
    assert cache.content(digest) is None


def test_what_was_leased_longest_ago_is_evicted_first(open_cache: OpenCache, make: Make) -> None:
    cache = open_cache(quota_bytes=350)
    digests = [make(i).put(cache, f"acme:v{i}").manifest.digest for i in range(3)]
    with cache.lease(digests[0]):
        pass

    make(4).put(cache, "acme:v4")

    assert [cache.content(digest) is not None for digest in digests] == [True, False, True]


def test_what_is_not_cached_cannot_be_leased(cache: DiskCache) -> None:
    for digest in ("0" * 64, "", "../x", "mutex"):
        with pytest.raises(NotCached):
            cache.lease(digest)


def test_settings_that_mean_nothing_are_refused() -> None:
    with pytest.raises(InvalidInput):
        CacheSettings(quota_bytes=0)
    with pytest.raises(InvalidInput):
        CacheSettings(min_free_bytes=-1)


def test_a_cache_opened_again_has_what_it_had(
    open_cache: OpenCache, folder: Path, make: Make
) -> None:
    make(1).put(open_cache(), V1)

    cache = DiskCache(folder / "cache", CacheSettings(quota_bytes=1000, min_free_bytes=0))
    report = cache.open()

    assert (report.versions, report.bytes, report.unfinished) == (1, 100, 0)
    assert cache.find(V1) is not None
    cache.check_integrity()
