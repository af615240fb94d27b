"""Several writers of one directory: nothing is lost, and whoever dies leaves nothing half done."""

from __future__ import annotations

import asyncio
import fcntl
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from mural_resolvers.directory_store import DirectoryStore
from mural_resolvers.errors import Conflict, Unavailable
from mural_resolvers.manifest import build_manifest
from tests.mural_resolvers import directory_stores
from tests.mural_resolvers.directory_stores import V1, V2, left_in_staging, publish

root = directory_stores.root
store = directory_stores.store

WRITER = """
import asyncio, sys
from pathlib import Path
from mural_resolvers.directory_store import DirectoryStore
from mural_resolvers.errors import Conflict
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.versions import AliasTarget

async def main(root, adapter, mark):
    store = DirectoryStore(Path(root))
    manifest = build_manifest(Path(adapter))
    print("ready", flush=True)
    sys.stdin.readline()
    for i in range(20):
        try:
            won = await store.publish(parse_name(f"acme:v{i}"), Path(adapter), manifest)
        except Conflict:
            won = False
        print(int(won), flush=True)
        await store.set_alias("acme", "default", f"{mark}-{i}", [AliasTarget(f"v{i}", 1.0)])
    await store.close()

asyncio.run(main(*sys.argv[1:]))
"""


def run_writers(root: Path, *folders: Path) -> list[list[str]]:
    """What each process printed: 1 for each version that it published, 0 for one it did not."""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), str(folder), mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for folder, mark in zip(folders, ("one", "two"), strict=True)
    ]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    # Both are told to begin before either is waited for.
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("\n")
        writer.stdin.flush()
    printed = [writer.communicate(timeout=60)[0].split() for writer in writers]
    assert [writer.returncode for writer in writers] == [0, 0]
    return printed


async def test_writers_in_two_processes_lose_nothing(
    root: Path, store: DirectoryStore, adapter: Path, other: Path
) -> None:
    won = await asyncio.to_thread(run_writers, root, adapter, other)

    for i, outcome in enumerate(zip(*won, strict=True)):
        assert sorted(outcome) == ["0", "1"]
        winner = (adapter, other)[outcome.index("1")]
        assert await store.manifest(V1.at(f"v{i}")) == build_manifest(winner)
    aliases = await store.aliases("acme", "default")
    assert aliases.keys() == {f"{mark}-{i}" for mark in ("one", "two") for i in range(20)}
    assert left_in_staging(root) == []


def publish_and_kill(root: Path, folder: Path, after_s: float) -> None:
    """A process that publishes version after version, ended in the middle of something."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root), str(folder), "one"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    writer.stdin.write("\n")
    writer.stdin.flush()
    with suppress(subprocess.TimeoutExpired):
        writer.wait(after_s)
    writer.kill()
    writer.communicate()


async def test_a_writer_that_is_killed_leaves_whole_versions_or_none(
    root: Path, store: DirectoryStore, adapter: Path, tmp_path: Path
) -> None:
    manifest = build_manifest(adapter)
    entropy = random.Random(4)
    for _ in range(6):
        await asyncio.to_thread(publish_and_kill, root, adapter, entropy.uniform(0.0, 0.15))
        for found in await store.list("acme"):
            assert build_manifest(root / "acme" / "default" / found.name.version) == manifest
        await store.aliases("acme", "default")

    # Nobody's lock is left, nor what lay in staging.
    assert await publish(store, V1.at("last"), adapter)
    assert left_in_staging(root) == []


async def test_one_of_many_at_once_publishes(
    store: DirectoryStore, adapter: Path, other: Path
) -> None:
    outcomes = await asyncio.gather(
        *(publish(store, V1, folder) for folder in (adapter, other) * 8), return_exceptions=True
    )

    assert outcomes.count(True) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 8


async def test_a_writer_that_holds_the_lock_is_not_waited_for_without_end(
    root: Path, store: DirectoryStore, adapter: Path
) -> None:
    await publish(store, V1, adapter)
    with (root / "acme" / "default" / "_lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        with pytest.raises(Unavailable):
            await publish(store, V2, adapter)
        with pytest.raises(Unavailable):
            await store.delete(V1)
    assert await store.delete(V1)
