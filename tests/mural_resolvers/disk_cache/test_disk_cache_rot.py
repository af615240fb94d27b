"""Files that changed on the disk."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.digest import CONFIG_FILE, WEIGHTS_FILE
from mural_resolvers.disk_cache import DiskCache, NotCached
from mural_resolvers.names import parse_name

OpenCache = Callable[..., DiskCache]
Make = Callable[..., Any]
V1, V2, V3 = parse_name("acme:v1"), parse_name("acme:v2"), parse_name("acme:v3")


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(bytes([data[0] ^ 1]) + data[1:])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lose(path: Path) -> None:
    path.unlink()


def test_what_is_whole_is_verified(cache: DiskCache, make: Make) -> None:
    assert cache.verify(make(1).put(cache, V1).manifest.digest)
    assert not cache.verify("0" * 64)
    assert not cache.verify("../x")


@pytest.mark.parametrize("harm", [flip, cut, lose])
def test_rot_is_dropped_and_can_be_fetched_again(
    cache: DiskCache, make: Make, harm: Callable[[Path], None]
) -> None:
    found = make(1).put(cache, V1)
    harm(found.path / WEIGHTS_FILE)

    assert not cache.verify(found.manifest.digest)

    assert cache.find(V1) is None
    cache.check_integrity(deep=True)
    again = make(1).put(cache, V1)
    assert cache.verify(again.manifest.digest)


def test_a_rotten_file_takes_along_every_version_that_has_it(cache: DiskCache, make: Make) -> None:
    found = make(1).put(cache, V1)
    make(2).put(cache, V2)
    flip(found.path / CONFIG_FILE)

    assert not cache.verify(found.manifest.digest)

    assert cache.find(V2) is None
    assert cache.usage().bytes == 0
    cache.check_integrity(deep=True)


def test_rot_in_weights_leaves_the_versions_that_share_a_sound_file(
    cache: DiskCache, make: Make
) -> None:
    found = make(1).put(cache, V1)
    make(2).put(cache, V2)
    flip(found.path / WEIGHTS_FILE)

    assert not cache.verify(found.manifest.digest)

    assert cache.verify(make(2).digest)


def test_what_rots_under_a_lease_goes_and_open_files_stay_readable(
    open_cache: OpenCache, make: Make
) -> None:
    cache, version = open_cache(quota_bytes=150), make(1)
    found = version.put(cache, V1)
    lease = cache.lease(version.digest)
    with (lease.path / CONFIG_FILE).open("rb") as opened:
        flip(found.path / WEIGHTS_FILE)

        assert not cache.verify(version.digest)

        assert opened.read() == b"{}"
    with pytest.raises(NotCached):
        cache.lease(version.digest)
    # The lease that was taken before protects what is fetched again.
    version.put(cache, V1)
    cache.stage(50, "acme").discard()
    assert cache.content(version.digest) is not None
    lease.release()
    cache.stage(60, "acme").discard()
    assert cache.content(version.digest) is None


def test_leases_hash_where_they_are_told_to(open_cache: OpenCache, make: Make) -> None:
    cache = open_cache(verify_on_lease=True)
    found = make(1).put(cache, V1)
    cache.lease(found.manifest.digest).release()
    flip(found.path / WEIGHTS_FILE)

    with pytest.raises(NotCached):
        cache.lease(found.manifest.digest)

    assert cache.find(V1) is None


def test_cached_files_are_not_for_writing(cache: DiskCache, make: Make) -> None:
    found = make(1).put(cache, V1)

    assert not any(os.stat(found.path / path).st_mode & 0o222 for path in make(1).files)


def test_more_links_than_a_file_may_have_make_a_second_copy(
    open_cache: OpenCache, make: Make, monkeypatch: Any
) -> None:
    cache = open_cache()
    link = os.link

    def bounded(source: Any, target: Any) -> None:
        if os.stat(source).st_nlink >= 4:
            raise OSError(errno.EMLINK, "Too many links")
        link(source, target)

    monkeypatch.setattr(os, "link", bounded)
    for i in range(8):
        make(i).put(cache, f"acme:v{i}")

    cache.check_integrity(deep=True)
    assert cache.usage().bytes > 8 * 98 + 2

    evicting = open_cache(quota_bytes=1)
    assert (evicting.usage().bytes, evicting.usage().versions) == (0, 0)
    evicting.check_integrity()
