"""A directory as a store, for tests of it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from mural_resolvers.directory_store import DirectoryStore
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import AdapterName, parse_name

V1 = parse_name("acme:v1")
V2 = parse_name("acme:v2")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
async def store(root: Path) -> AsyncIterator[DirectoryStore]:
    made = DirectoryStore(root, lock_timeout_s=0.05)
    yield made
    await made.close()


async def publish(store: DirectoryStore, name: AdapterName, folder: Path) -> bool:
    return await store.publish(name, folder, build_manifest(folder))


def left_in_staging(root: Path) -> list[str]:
    return os.listdir(root / "_staging")
