"""A disk that is full, read-only, or no place for a cache; and a folder with other things in it."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.disk_cache import CacheSettings, DiskCache, NotCached
from mural_resolvers.errors import InvalidInput, MuralError, Unavailable
from mural_resolvers.names import parse_name

OpenCache = Callable[..., DiskCache]
Make = Callable[..., Any]
V1, V2, V3 = parse_name("acme:v1"), parse_name("acme:v2"), parse_name("acme:v3")
MIB = 1 << 20


def mount(*arguments: object) -> None:
    done = subprocess.run(
        ["mount", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"NOT RUN: cannot mount: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: only root may mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "tmpfs", disk)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, leave: int) -> Path:
    """Take the disk's free bytes, but for so many."""
    found = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(max(0, found.f_bavail * found.f_frsize - leave)))
    return filler


# -- full ------------------------------------------------------------------------------------------


def test_room_is_made_for_what_the_disk_has_not_even_below_the_quota(
    small_disk: Path, open_cache: OpenCache, make: Make
) -> None:
    cache = open_cache(small_disk / "cache", quota_bytes=100 * MIB, min_free_bytes=MIB // 8)
    for i in range(10):
        make(i, MIB // 2).put(cache, f"acme:v{i}")

    assert 2 <= cache.usage().versions <= 3
    assert cache.find(parse_name("acme:v9")) is not None
    cache.check_integrity(deep=True)


def test_a_disk_that_others_fill_is_unavailable_and_evicts_nothing_in_vain(
    small_disk: Path, open_cache: OpenCache, make: Make
) -> None:
    cache = open_cache(small_disk / "cache", min_free_bytes=MIB // 8)
    make(1).put(cache, V1)
    fill(small_disk, 0)

    with pytest.raises(Unavailable, match="full"):
        cache.stage(1000, "acme")

    with cache.lease(make(1).digest):
        assert cache.find(V1) is not None


def test_a_disk_that_fills_while_content_is_staged_is_cleaned_up(
    small_disk: Path, open_cache: OpenCache, make: Make
) -> None:
    cache, version = open_cache(small_disk / "cache", min_free_bytes=0), make(1)
    make(2).put(cache, V2)
    before = cache.usage()
    staging = version.stage(cache)
    filler = fill(small_disk, 0)

    with pytest.raises(Unavailable, match="full"):
        staging.commit(version.manifest, V1, "s3", "r")

    assert os.listdir(small_disk / "cache" / "staging") == []
    filler.unlink()
    assert cache.usage() == before
    cache.check_integrity(deep=True)
    version.put(cache, V1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["link", "rename", "replace", "mkdir", "fsync", "utime"])
def test_whatever_call_the_disk_refuses_nothing_is_left_behind(
    open_cache: OpenCache, folder: Path, make: Make, monkeypatch: Any, call: str, code: int
) -> None:
    cache, version = open_cache(), make(1)
    make(2).put(cache, V2)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), "/secret/path")

    with monkeypatch.context() as patched:
        try:
            staging = version.stage(cache)
            patched.setattr(os, call, refuse)
            if call == "mkdir":
                staging.discard()
                cache.stage(100, "acme")
            staging.commit(version.manifest, V1, "s3", "r")
        except Unavailable as error:
            refused = error
        else:
            pytest.fail("it was not refused")

    assert "/secret" not in refused.message
    assert os.listdir(folder / "cache" / "staging") == []
    blobs = list((folder / "cache" / "blobs").glob("*/*"))
    assert all(blob.stat().st_nlink > 1 for blob in blobs), "a blob without a version"
    assert cache.find(V1) is None
    assert cache.find(V2) is not None
    assert cache.usage().versions == 1
    cache.check_integrity(deep=True)
    version.put(cache, V1)


# -- read-only -------------------------------------------------------------------------------------


@pytest.fixture
def read_only(small_disk: Path, open_cache: OpenCache, make: Make) -> Path:
    """A folder with one version, on a disk that has become read-only."""
    cache = open_cache(small_disk / "cache", min_free_bytes=0)
    make(1).put(cache, V1)
    mount("-o", "remount,ro", small_disk)
    return small_disk / "cache"


def test_a_read_only_cache_goes_on_being_found_and_leased(
    read_only: Path, open_cache: OpenCache, make: Make
) -> None:
    cache = open_cache(read_only)

    assert DiskCache(read_only).open().read_only
    found = cache.find(V1)
    assert found is not None
    with cache.lease(found.manifest.digest) as lease:
        assert (lease.path / "adapter_config.json").read_bytes() == b"{}"
    assert cache.verify(found.manifest.digest)
    assert cache.usage().versions == 1


def test_a_read_only_cache_says_why_it_takes_nothing(
    read_only: Path, open_cache: OpenCache, make: Make
) -> None:
    cache, digest = open_cache(read_only), make(1).digest

    for refused in (
        lambda: cache.stage(10, "acme"),
        lambda: cache.link(V2, digest, source="s3", revision="r", tenant="acme"),
        lambda: cache.forget(V1),
    ):
        with pytest.raises(Unavailable, match="read-only"):
            refused()
    cache.forget(V2)


def test_a_read_only_cache_that_nobody_closed_well_is_counted(
    small_disk: Path, open_cache: OpenCache, make: Make
) -> None:
    make(1).put(open_cache(small_disk / "cache"), V1)
    (small_disk / "cache" / "usage.json").unlink()
    (small_disk / "cache" / "locks" / make(1).digest).unlink()
    mount("-o", "remount,ro", small_disk)

    cache = open_cache(small_disk / "cache")

    assert cache.usage().bytes == 100
    assert cache.find(V1) is not None
    with pytest.raises(Unavailable, match="read-only"):
        cache.lease(make(1).digest)


# -- no place for a cache --------------------------------------------------------------------------


def refusal(root: Path) -> str:
    with pytest.raises(InvalidInput) as refused:
        DiskCache(root).open()
    assert str(root) not in refused.value.message
    return refused.value.message


def test_what_cannot_be_a_cache_is_refused_with_a_sentence(folder: Path) -> None:
    (folder / "file").touch()
    assert "cannot be used" in refusal(folder / "file")
    assert "cannot be used" in refusal(folder / "file" / "inside")

    (folder / "mine" / "names").mkdir(parents=True)
    (folder / "mine" / "names" / "precious").touch()
    assert "holds other things" in refusal(folder / "mine")
    assert (folder / "mine" / "names" / "precious").exists()

    (folder / "other").mkdir()
    (folder / "other" / "CACHEDIR.TAG").write_text("Signature: another's")
    assert "another" in refusal(folder / "other")


def test_a_link_in_place_of_one_of_its_folders_is_refused(
    open_cache: OpenCache, folder: Path
) -> None:
    open_cache()
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "precious").touch()
    (folder / "cache" / "blobs").rmdir()
    (folder / "cache" / "blobs").symlink_to(folder / "elsewhere")

    assert "link" in refusal(folder / "cache")
    assert (folder / "elsewhere" / "precious").exists()


def test_an_empty_read_only_folder_is_refused(small_disk: Path) -> None:
    mount("-o", "remount,ro", small_disk)

    assert "Read-only" in refusal(small_disk / "cache")


def test_a_file_system_without_hard_links_is_refused(folder: Path, monkeypatch: Any) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)

    assert "hard links" in refusal(folder / "cache")


def test_a_file_system_without_locks_is_refused(folder: Path, monkeypatch: Any) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)

    assert "locks" in refusal(folder / "cache")


def test_a_folder_with_a_lost_and_found_is_taken(folder: Path, make: Make) -> None:
    (folder / "volume" / "lost+found").mkdir(parents=True)
    cache = DiskCache(folder / "volume", CacheSettings(min_free_bytes=0))
    cache.open()

    make(1).put(cache, V1)

    assert (folder / "volume" / "lost+found").exists()


# -- what else may lie in it -----------------------------------------------------------------------


def plant(root: Path, outside: Path) -> None:
    """Put what the cache would never make wherever it looks."""
    for parent in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        (parent / "stray").write_bytes(b"\xff\x00")
        (parent / "folder").mkdir()
        (parent / "link").symlink_to(outside)
        (parent / "loop").symlink_to("loop")
        os.mkfifo(parent / "fifo")


def test_strays_everywhere_are_removed_and_nothing_outside_is_touched(
    open_cache: OpenCache, folder: Path, make: Make
) -> None:
    cache, outside = open_cache(), folder / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    make(1).put(cache, V1)
    plant(folder / "cache", outside)

    make(2).put(cache, V2)
    cache.open()

    assert (outside / "precious").exists()
    assert cache.find(V1) is not None
    assert cache.find(V2) is not None
    cache.check_integrity(deep=True)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'{"digest": "../../etc"}', b"\xff" * 100, b"[" * 60_000]
)
def test_a_broken_name_record_is_no_name_and_is_written_anew(
    open_cache: OpenCache, folder: Path, make: Make, data: bytes
) -> None:
    cache = open_cache()
    make(1).put(cache, V1)
    record = folder / "cache" / "names" / "acme" / "default" / "v1"
    record.write_bytes(data)

    assert cache.find(V1) is None
    make(1).put(cache, V1)

    assert cache.find(V1) is not None
    cache.check_integrity()


def replace_by_link(path: Path, to: Path) -> None:
    path.unlink()
    path.symlink_to(to)


def replace_by_folder(path: Path, _: Path) -> None:
    path.unlink()
    (path / "inner").mkdir(parents=True)


def remove(path: Path, _: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [replace_by_link, replace_by_folder, remove])
@pytest.mark.parametrize(
    "where", ["names/acme/default/v1", "locks/DIGEST", "versions/DIGEST/manifest.json", "blobs"]
)
def test_files_that_became_something_else_raise_nothing_but_typed_errors_and_heal(
    open_cache: OpenCache,
    folder: Path,
    make: Make,
    harm: Callable[[Path, Path], None],
    where: str,
) -> None:
    cache, version = open_cache(quota_bytes=250), make(1)
    version.put(cache, V1)
    other = folder / "other"
    other.write_bytes(b"{}")
    path = folder / "cache" / where.replace("DIGEST", version.digest)
    path = next(path.glob("*/*")) if where == "blobs" else path

    harm(path, other)

    for _ in range(2):  # the first may be refused, and puts things right
        try:
            cache.find(V1)
            cache.lease(version.digest).release()
            cache.verify(version.digest)
            version.put(cache, V1)
            make(2).put(cache, V2)
            make(3).put(cache, V3)
        except MuralError:
            pass
    version.put(cache, V1)
    cache.open()
    assert cache.find(V1) is not None
    cache.check_integrity(deep=True)
    assert other.read_bytes() == b"{}"


def test_a_link_among_the_names_makes_no_name_another_tenants(
    open_cache: OpenCache, folder: Path, make: Make
) -> None:
    cache = open_cache()
    make(1).put(cache, "globex:v1")
    names = folder / "cache" / "names"
    (names / "acme").symlink_to(names / "globex")

    assert cache.find(V1) is None
    make(2).put(cache, V1)

    found = cache.find(parse_name("globex:v1"))
    assert found is not None
    assert found.manifest == make(1).manifest


def test_a_version_whose_lock_file_is_gone_can_be_leased_again(
    open_cache: OpenCache, folder: Path, make: Make
) -> None:
    cache = open_cache()
    make(1).put(cache, V1)
    (folder / "cache" / "locks" / make(1).digest).unlink()

    cache.lease(make(1).digest).release()

    cache.check_integrity()


def test_a_version_that_vanished_is_not_cached(
    open_cache: OpenCache, folder: Path, make: Make
) -> None:
    cache = open_cache()
    found = make(1).put(cache, V1)
    for path in found.path.iterdir():
        path.unlink()
    found.path.rmdir()

    assert cache.find(V1) is None
    with pytest.raises(NotCached):
        cache.lease(make(1).digest)
    make(1).put(cache, V1)
    cache.open()
    cache.check_integrity(deep=True)


@pytest.mark.parametrize("removed", [".", "blobs", "locks", "names", "staging", "versions"])
def test_a_cache_in_use_from_which_somebody_removes_folders_goes_on(
    folder: Path, open_cache: OpenCache, make: Make, removed: str
) -> None:
    cache = open_cache(folder / "cache", quota_bytes=250)
    make(1).put(cache, V1)
    lease = cache.lease(make(1).digest)
    staging = make(2).stage(cache)
    shutil.rmtree(folder / "cache" / removed)

    for seed, name in enumerate((V3, V1, V2), 3):
        cache.find(name)
        cache.forget(name)
        lease.release()
        staging.discard()
        make(seed).put(cache, name)
    cache.check_integrity(deep=True)
    assert cache.usage().versions == 2
