"""A process that is killed leaves a whole version or nothing, and the others go on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.disk_cache import DiskCache
from mural_resolvers.errors import Unavailable
from mural_resolvers.names import parse_name

OpenCache = Callable[..., DiskCache]
Make = Callable[..., Any]
SCRIPT = Path(__file__).with_name("crashing.py")


def run(*arguments: object) -> int:
    """Run the script that kills; gives what it counted."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout)


def test_a_death_before_any_single_step_leaves_a_cache_that_goes_on(folder: Path) -> None:
    assert run("steps", folder / "cache") > 200


def test_deaths_at_random_instants_leave_a_cache_that_goes_on(folder: Path) -> None:
    assert run("kills", folder / "cache", 40, 1) == 40


@pytest.mark.slow
@pytest.mark.parametrize("seed", [10_000, 20_000, 30_000])
def test_hundreds_of_deaths_at_random_instants(folder: Path, seed: int) -> None:
    assert run("kills", folder / "cache", 300, seed) == 300


def test_a_start_leaves_alone_what_a_living_process_stages(
    open_cache: OpenCache, make: Make
) -> None:
    cache, version = open_cache(), make(1)
    staging = version.stage(cache)

    report = open_cache().open()

    assert report.unfinished == 0
    staging.commit(version.manifest, parse_name("acme:v1"), "s3", "r")
    assert cache.find(parse_name("acme:v1")) is not None


def test_a_start_sweeps_what_nobody_stages_any_more(
    open_cache: OpenCache, folder: Path, make: Make
) -> None:
    cache = open_cache()
    root = folder / "cache"
    broken = make(2).put(cache, "acme:v2").path / "manifest.json"
    broken.write_bytes(b"{")
    abandoned = root / "staging" / "1-dead"
    (abandoned / "content").mkdir(parents=True)
    (abandoned / "reservation.json").write_text('{"tenant":"acme","num_bytes":5}')
    (root / "staging" / "half").mkdir()
    (root / "blobs" / "ab").mkdir()
    (root / "blobs" / "ab" / ("ab" * 32)).write_bytes(b"nobody's")
    (root / "locks" / ("c" * 64)).touch()

    report = cache.open()

    assert (report.unfinished, report.broken_versions, report.orphaned_blobs) == (4, 1, 3)
    assert os.listdir(root / "staging") == []
    assert cache.find(parse_name("acme:v2")) is None
    assert not (root / "locks" / ("c" * 64)).exists()
    cache.check_integrity(deep=True)


def test_a_lease_ends_with_its_process(open_cache: OpenCache, folder: Path, make: Make) -> None:
    cache = open_cache(quota_bytes=150)
    digest = make(1).put(cache, "acme:v1").manifest.digest
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(folder / "cache"), digest],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "leased\n"
    assert not _fits(cache)

    holder.kill()
    holder.wait()
    holder.stdout.close()

    assert _fits(cache)


_HOLD = """
import sys
from pathlib import Path
from mural_resolvers.disk_cache import CacheSettings, DiskCache
cache = DiskCache(Path(sys.argv[1]), CacheSettings(quota_bytes=150, min_free_bytes=0))
lease = cache.lease(sys.argv[2])
print("leased", flush=True)
sys.stdin.read()
"""


def _fits(cache: DiskCache) -> bool:
    try:
        cache.stage(100, "acme").discard()
    except Unavailable:
        return False
    return True
