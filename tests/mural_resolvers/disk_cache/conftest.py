"""Small versions to put into a cache, and caches in the test's folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from mural_resolvers.digest import CONFIG_FILE, WEIGHTS_FILE, FileEntry, compute_digest
from mural_resolvers.disk_cache import CachedVersion, CacheSettings, DiskCache, Staging
from mural_resolvers.manifest import Manifest, PeftFacts
from mural_resolvers.names import AdapterName, parse_name

CONFIG = b"{}"
MEMORY = Path("/dev/shm")


class Version:
    """A configuration that all have, and weights that only this seed has.

    The cache reads no safetensors, so that any bytes will do.
    """

    def __init__(self, seed: int | str, num_bytes: int = 100) -> None:
        unit = hashlib.sha256(str(seed).encode()).digest()
        weights = (unit * (num_bytes // len(unit) + 1))[: num_bytes - len(CONFIG)]
        self.files = {CONFIG_FILE: CONFIG, WEIGHTS_FILE: weights}
        self.num_bytes = num_bytes
        entries = tuple(
            FileEntry(path, len(data), hashlib.sha256(data).hexdigest())
            for path, data in self.files.items()
        )
        facts = PeftFacts(rank=4, alpha=8.0, targets=("q_proj",))
        self.digest = compute_digest(entries)
        self.manifest = Manifest(files=entries, facts=facts, digest=self.digest)

    def write(self, folder: Path) -> None:
        for path, data in self.files.items():
            (folder / path).write_bytes(data)

    def stage(self, cache: DiskCache, tenant: str = "acme") -> Staging:
        staging = cache.stage(self.num_bytes, tenant)
        self.write(staging.folder)
        return staging

    def put(
        self,
        cache: DiskCache,
        name: str | AdapterName,
        *,
        tenant: str | None = None,
        revision: str = "r1",
    ) -> CachedVersion:
        """Stage and commit, as a download does."""
        name = parse_name(name) if isinstance(name, str) else name
        staging = self.stage(cache, tenant or name.tenant)
        return staging.commit(self.manifest, name, "s3", revision)


@pytest.fixture(scope="session")
def make() -> type[Version]:
    return Version


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: hundreds of caches are made and removed."""
    if not os.access(MEMORY, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(dir=MEMORY) as memory:
        yield Path(memory)


@pytest.fixture
def open_cache(folder: Path) -> Callable[..., DiskCache]:
    """Open a cache in the test's folder; each call is another process's view of it."""

    def opened(root: Path | None = None, **settings: int | float | bool) -> DiskCache:
        known = {"min_free_bytes": 0, "quota_bytes": 1 << 20, **settings}
        cache = DiskCache(root or folder / "cache", CacheSettings(**known))  # type: ignore[arg-type] # by name
        cache.open()
        return cache

    return opened


@pytest.fixture
def cache(open_cache: Callable[..., DiskCache]) -> DiskCache:
    return open_cache()
