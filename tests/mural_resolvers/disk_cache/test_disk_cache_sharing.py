"""Threads and processes that share a cache, and what a look-up costs."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.disk_cache import DiskCache, NotCached
from mural_resolvers.disk_cache.locks import FileLock, Mutex
from mural_resolvers.errors import Unavailable
from mural_resolvers.names import parse_name

OpenCache = Callable[..., DiskCache]
Make = Callable[..., Any]
V1 = parse_name("acme:v1")


def test_threads_on_two_views_of_one_cache_keep_it_whole(open_cache: OpenCache, make: Make) -> None:
    caches = [open_cache(quota_bytes=1000) for _ in range(2)]
    versions = [make(i) for i in range(20)]

    def work(seed: int) -> int:
        draw, done = random.Random(seed), 0
        for _ in range(30):
            number = draw.randrange(len(versions))
            version, cache = versions[number], draw.choice(caches)
            try:
                version.put(cache, f"t{number % 3}:v{number}")
                with cache.lease(version.digest) as lease:
                    for path, data in version.files.items():
                        assert (lease.path / path).read_bytes() == data
                done += 1
            except NotCached:
                pass  # another thread's version came after it
            except Unavailable as error:
                if "in use" not in error.message:
                    raise
        return done

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, range(6))) > 0

    assert caches[0].usage().bytes <= 1000
    caches[1].check_integrity(deep=True)


def test_looking_and_leasing_wait_for_no_one(
    open_cache: OpenCache, folder: Path, make: Make
) -> None:
    cache = open_cache(lock_timeout_s=0.02)
    digest = make(1).put(cache, V1).manifest.digest

    with Mutex(folder / "cache" / "locks" / "mutex", 1.0).held():
        assert cache.find(V1) is not None
        assert cache.content(digest) is not None
        cache.lease(digest).release()
        assert cache.verify(digest)
        assert cache.usage().versions == 1
        with pytest.raises(Unavailable, match="busy"):
            cache.stage(1, "acme")

    cache.stage(1, "acme").discard()


def test_looking_leasing_and_staging_read_no_folder_that_grows(
    open_cache: OpenCache, make: Make, monkeypatch: Any
) -> None:
    cache = open_cache()
    for i in range(5):
        make(i).put(cache, f"acme:v{i}")
    scandir, listed = os.scandir, []

    def noted(path: Any) -> Any:
        listed.append(Path(path).name)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", noted)
    monkeypatch.setattr(os, "listdir", noted)

    found = cache.find(V1)
    assert found is not None
    cache.lease(found.manifest.digest).release()
    cache.link(V1.at("again"), found.manifest.digest, source="hub", revision="x", tenant="acme")
    cache.usage()
    assert listed == []
    make(9).put(cache, "acme:v9")
    assert not {"versions", "locks", "blobs", "names"} & set(listed)


def test_a_lock_counts_between_threads_and_goes_with_its_last_reference(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock.try_acquire(path, create=True)
    assert lock is not None
    assert FileLock.try_acquire(path) is None
    assert FileLock.try_acquire(path, shared=True) is None

    del lock

    shared = FileLock.try_acquire(path, shared=True), FileLock.try_acquire(path, shared=True)
    assert None not in shared
    assert FileLock.try_acquire(path) is None


def test_a_lock_knows_that_its_file_is_another_now(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock.try_acquire(path, create=True)
    assert lock is not None
    assert lock.is_at(path)

    path.unlink()
    assert not lock.is_at(path)
    path.touch()
    assert not lock.is_at(path)
    lock.release()
    lock.release()
    with pytest.raises(ValueError, match="released"):
        _ = lock.descriptor
