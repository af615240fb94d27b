"""Uploads as a source of adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.directory_store import DirectoryStore
from mural_resolvers.errors import UnusableAdapter
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.tenants import Principal
from mural_resolvers.uploads import UPLOAD_FILE, UploadRecord, UploadsResolver

V1 = parse_name("acme:v1")
ACME = Principal("acme")
RECORD = UploadRecord(uploaded_at=100.0, expires_at=200.0, key_id="abcd", digest="d")


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


@pytest.fixture
async def source(tmp_path: Path, clock: list[float]):
    (tmp_path / "store").mkdir()
    store = DirectoryStore(tmp_path / "store")
    inner = DirectoryResolver(tmp_path / "store")
    yield UploadsResolver(inner, store, now=lambda: clock[0])
    await inner.close()
    await store.close()


async def publish(source: UploadsResolver, folder: Path, record: bytes | None) -> None:
    records = {} if record is None else {UPLOAD_FILE: record}
    assert await source._store.publish(V1, folder, build_manifest(folder), records=records)


@pytest.mark.parametrize(("now", "there"), [(199.9, True), (200.0, False), (1e12, False)])
async def test_an_upload_is_there_until_it_expires(
    source: UploadsResolver,
    write_adapter: Callable[..., Path],
    tmp_path: Path,
    base_spec: BaseSpec,
    clock: list[float],
    now: float,
    there: bool,
) -> None:
    await publish(source, write_adapter(tmp_path / "trained"), RECORD.to_json())
    for name in ("acme:v1", "acme"):
        found = await source.resolve(ACME, parse_name(name), base_spec)
        assert found is not None
        assert found.name == V1

    clock[0] = now

    for name in ("acme:v1", "acme"):
        assert (await source.resolve(ACME, parse_name(name), base_spec) is not None) == there


async def test_what_has_no_end_stays(
    source: UploadsResolver,
    write_adapter: Callable[..., Path],
    tmp_path: Path,
    base_spec: BaseSpec,
    clock: list[float],
) -> None:
    await publish(source, write_adapter(tmp_path / "trained"), None)
    clock[0] = 1e12

    assert await source.resolve(ACME, V1, base_spec) is not None
    assert await source.resolve(ACME, parse_name("acme:v2"), base_spec) is None


async def test_a_record_that_cannot_be_read_hides_its_version(
    source: UploadsResolver,
    write_adapter: Callable[..., Path],
    tmp_path: Path,
    base_spec: BaseSpec,
) -> None:
    await publish(source, write_adapter(tmp_path / "trained"), b"[]")

    with pytest.raises(UnusableAdapter):
        await source.resolve(ACME, V1, base_spec)


async def test_it_downloads_where_the_source_behind_it_does(source: UploadsResolver) -> None:
    assert source.name == "uploads"
    assert not source.downloads


def test_a_record_is_read_back() -> None:
    for end in (None, 5.5):
        record = UploadRecord(uploaded_at=1.0, expires_at=end, key_id=None, digest="d")
        assert UploadRecord.from_json(record.to_json()) == record
