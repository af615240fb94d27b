"""Processes that work on a cache and are killed; run as a script by the tests of crashes.

``crashing.py steps ROOT`` kills a child before each single call that changes the disk.
``crashing.py kills ROOT NUMBER SEED`` kills children at random instants while another one works
on. Both look at what is left after each death, and exit with 1 and a trace where it is wrong.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from conftest import Version  # type: ignore[import-not-found] # the script's own folder

from mural_resolvers.digest import WEIGHTS_FILE
from mural_resolvers.disk_cache import (
    CachedVersion,
    CacheSettings,
    DiskCache,
    NotCached,
    SweepReport,
)
from mural_resolvers.errors import Unavailable
from mural_resolvers.names import AdapterName, parse_name

# Room for three and a half versions, so that work means eviction.
QUOTA = 350
VERSIONS = [Version(seed) for seed in range(12)]
BY_DIGEST = {version.digest: version for version in VERSIONS}
SETTINGS = CacheSettings(quota_bytes=QUOTA, min_free_bytes=0)

# What changes the disk. ``open`` and ``write`` are among them: a file can be there and empty.
CHANGES = (
    *("open", "write", "link", "rename", "replace", "unlink", "mkdir", "rmdir", "fsync"),
    *("utime", "fchmod"),
)
ROTTEN = bytes(98)


def name_of(number: int) -> AdapterName:
    return parse_name(f"t{number % 3}:v{number}")


def opened(root: Path) -> DiskCache:
    cache = DiskCache(root, SETTINGS)
    cache.open()
    return cache


# -- what must hold after a death ------------------------------------------------------------------


def check_found(found: CachedVersion) -> None:
    version = BY_DIGEST[found.manifest.digest]
    for path, data in version.files.items():
        assert (found.path / path).read_bytes() == data, f"{path} is not what was staged"


def check_names(cache: DiskCache) -> None:
    """A name has its own content, whole, or none; what rotted is known once it is verified."""
    for number, version in enumerate(VERSIONS):
        found = cache.find(name_of(number))
        if found is None:
            continue
        assert found.manifest.digest == version.digest
        if (found.path / WEIGHTS_FILE).read_bytes() == ROTTEN:
            assert not cache.verify(version.digest)
            assert cache.find(name_of(number)) is None
        else:
            check_found(found)


def check_survivor(cache: DiskCache) -> None:
    """A process that lived through another's death goes on, and puts things right."""
    check_names(cache)
    cache.stage(QUOTA // 2, "t0").discard()
    check_names(cache)
    cache.check_integrity(deep=True)


def check_restart(root: Path) -> None:
    cache = opened(root)
    assert os.listdir(root / "staging") == []
    check_names(cache)
    assert cache.usage().bytes <= QUOTA
    cache.check_integrity(deep=True)
    again = DiskCache(root, SETTINGS).open()
    assert again == SweepReport(versions=again.versions, bytes=again.bytes)


# -- a death before every step ---------------------------------------------------------------------


def script(cache: DiskCache) -> None:
    """Every kind of change once."""
    VERSIONS[2].put(cache, name_of(2))
    VERSIONS[3].put(cache, name_of(3))  # evicts
    with cache.lease(VERSIONS[3].digest):
        VERSIONS[4].put(cache, name_of(4))
    VERSIONS[5].stage(cache, "t1").discard()
    cache.link(name_of(2).at("again"), VERSIONS[4].digest, source="s", revision="r", tenant="t1")
    cache.forget(name_of(4))
    found = cache.find(name_of(3))
    assert found is not None
    (found.path / WEIGHTS_FILE).write_bytes(ROTTEN)
    cache.verify(found.manifest.digest)
    opened(cache._layout.root)


def die_before(step: int) -> None:
    """From now on the step-th change is not made: the process is killed instead."""
    counter = itertools.count()

    def dying(original: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if next(counter) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        return call

    for name in CHANGES:
        setattr(os, name, dying(getattr(os, name)))


def in_child(job: Callable[[], object]) -> int:
    """The child's wait status. It leaves without cleaning up after its parent."""
    child = os.fork()
    if child == 0:
        try:
            job()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return child


def status_of(child: int) -> int:
    return os.waitpid(child, 0)[1]


def kill_at_every_step(root: Path) -> int:
    return killed_until_it_ends(root, first_start, None) + killed_until_it_ends(root, work, filled)


def first_start(root: Path) -> None:
    VERSIONS[0].put(opened(root), name_of(0))


def work(root: Path) -> None:
    script(DiskCache(root, SETTINGS))


def filled(root: Path) -> DiskCache:
    cache = opened(root)
    VERSIONS[0].put(cache, name_of(0))
    VERSIONS[1].put(cache, name_of(1))
    return cache


def killed_before(step: int, job: Callable[[Path], None], root: Path) -> None:
    die_before(step)
    job(root)


def killed_until_it_ends(
    root: Path, job: Callable[[Path], None], prepare: Callable[[Path], DiskCache] | None
) -> int:
    """How many steps the job has; it was killed before each of them."""
    for step in itertools.count():
        shutil.rmtree(root, ignore_errors=True)
        survivor = None if prepare is None else prepare(root)
        status = status_of(in_child(partial(killed_before, step, job, root)))
        if status == 0:
            return step
        assert os.WIFSIGNALED(status), "the child failed by itself"
        try:
            if survivor is not None and step % 2:
                check_survivor(survivor)
            check_restart(root)
            script_ends(root)
        except BaseException:
            print(f"after a death before step {step} of {job.__name__}", file=sys.stderr)
            raise
    raise AssertionError


def script_ends(root: Path) -> None:
    """What the dead one wanted to do can be done."""
    cache = opened(root)
    for number in (2, 3, 4):
        VERSIONS[number].put(cache, name_of(number))
    cache.check_integrity(deep=True)


# -- deaths at random instants ---------------------------------------------------------------------


def work_for_ever(root: Path, seed: int) -> None:
    cache = opened(root)
    draw = random.Random(seed)
    while os.getppid() != 1:  # no longer than the test
        number = draw.randrange(len(VERSIONS))
        try:
            work_once(cache, draw, number)
        except NotCached:
            pass  # evicted by the other
        except Unavailable as error:
            if "in use" not in error.message:
                raise


def work_once(cache: DiskCache, draw: random.Random, number: int) -> None:
    version, name = VERSIONS[number], name_of(number)
    kind = draw.random()
    if kind < 0.5:
        check_found_if(cache, number, version.put(cache, name))
    elif kind < 0.8:
        with cache.lease(version.digest) as lease:
            staging = VERSIONS[draw.randrange(len(VERSIONS))].stage(cache, name.tenant)
            for path, data in version.files.items():
                assert (lease.path / path).read_bytes() == data
            staging.discard()
    elif kind < 0.9:
        # A name of this content alone: under a shared one the other process would be a Conflict.
        again = name.at(f"again{number}")
        cache.link(again, version.digest, source="s", revision="r", tenant=name.tenant)
        cache.forget(again)
    else:
        cache.verify(version.digest)


def check_found_if(cache: DiskCache, number: int, found: CachedVersion) -> None:
    try:
        with cache.lease(found.manifest.digest):
            check_found(found)
    except NotCached:
        return


def kill_at_random(root: Path, number: int, seed: int) -> int:
    draw = random.Random(seed)
    other = in_child(lambda: work_for_ever(root, seed))
    try:
        for round_ in range(number):
            kill_one(root, seed + round_, draw.uniform(0.0, 0.04))
            if round_ % 10 == 9:
                assert os.waitpid(other, os.WNOHANG) == (0, 0), "the one that lived failed"
                DiskCache(root, SETTINGS).check_integrity(deep=True)
    finally:
        os.kill(other, signal.SIGKILL)
    assert os.WIFSIGNALED(status_of(other)), "the one that lived failed"
    check_restart(root)
    return number


def kill_one(root: Path, seed: int, after_s: float) -> None:
    child = in_child(lambda: work_for_ever(root, seed))
    time.sleep(after_s)  # the instant of the death, not a wait for anything
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(status_of(child)), "the child failed by itself"


def main(kind: str, root: str, *numbers: str) -> None:
    # What a process wrote outlives it without this; only a power cut would tell a difference.
    os.fsync = lambda fd: None
    run = kill_at_every_step if kind == "steps" else kill_at_random
    print(run(Path(root), *map(int, numbers)))


if __name__ == "__main__":
    main(*sys.argv[1:])
