"""The tenants file while a server runs: changed, spoilt, gone, half written."""

from __future__ import annotations

import asyncio
import logging
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from mural_resolvers.errors import InvalidInput, Unauthorized
from mural_resolvers.tenants import MintedKey, TenantsFile, mint_key

NOW = datetime(2026, 11, 29, tzinfo=UTC)
ACME, GLOBEX = mint_key(), mint_key()


def content(**keys: MintedKey) -> str:
    lines = [
        f"  - {{id: {tenant}, keys: [{{id: '{key.key_id}', sha256: {key.sha256}}}]}}\n"
        for tenant, key in keys.items()
    ]
    return "tenants:\n" + "".join(lines)


def may(file: TenantsFile, key: MintedKey) -> bool:
    try:
        file.ring.authenticate(f"Bearer {key.key}", NOW)
    except Unauthorized:
        return False
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tenants.yaml"
    path.write_text(content(acme=ACME))
    return path


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def write_unnoticed(path: Path, text: str) -> None:
    """Size and time of the change stay what they were."""
    status = path.stat()
    write(path, text)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size


async def settle(file: TenantsFile) -> None:
    """Two looks: one to see a content, one to see that it stays."""
    await file.poll()
    await file.poll()


async def test_a_change_is_in_force_once_it_has_been_seen_twice(path: Path) -> None:
    file = TenantsFile(path)
    write(path, content(globex=GLOBEX))

    await file.poll()
    assert (may(file, ACME), may(file, GLOBEX)) == (True, False)
    await file.poll()
    assert (may(file, ACME), may(file, GLOBEX)) == (False, True)
    assert (file.numbers.reloads, file.numbers.refused, file.numbers.stale) == (1, 0, False)


async def test_a_file_cut_short_for_a_moment_revokes_nobody(path: Path) -> None:
    whole = content(acme=ACME, globex=GLOBEX)
    write(path, whole)
    file = TenantsFile(path)
    write(path, whole[: whole.index("  - {id: globex")])
    await file.poll()
    write(path, whole)

    await settle(file)

    assert (may(file, ACME), may(file, GLOBEX)) == (True, True)
    assert file.numbers.reloads == 0


@pytest.mark.parametrize("bad", ["", "tenants: [", "tenants: [{id: Acme}]", "\ud800"])
async def test_a_bad_file_leaves_the_last_good_one_and_is_told_once(
    path: Path, bad: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = TenantsFile(path)
    write(path, bad)

    for _ in range(4):
        await file.poll()

    assert may(file, ACME)
    assert (file.numbers.refused, file.numbers.stale) == (1, True)
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    write(path, content(globex=GLOBEX))
    await settle(file)
    assert (may(file, ACME), may(file, GLOBEX), file.numbers.stale) == (False, True, False)


async def test_a_file_that_is_gone_leaves_the_last_good_one(path: Path) -> None:
    file = TenantsFile(path)
    await asyncio.to_thread(path.unlink)
    await settle(file)
    assert may(file, ACME)
    assert file.numbers.stale

    write(path, content(acme=ACME))
    await file.poll()

    assert (file.numbers.stale, file.numbers.reloads) == (False, 0)


async def test_a_change_that_keeps_size_and_time_is_seen(path: Path) -> None:
    file = TenantsFile(path)
    write_unnoticed(path, content(acme=GLOBEX))

    await settle(file)

    assert (may(file, ACME), may(file, GLOBEX)) == (False, True)


async def test_a_mounted_file_that_is_switched_by_its_link_is_seen(tmp_path: Path) -> None:
    for name, key in (("old", ACME), ("new", GLOBEX)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tenants.yaml").write_text(content(acme=key))
    (tmp_path / "data").symlink_to("old")
    file = TenantsFile(tmp_path / "data" / "tenants.yaml")

    (tmp_path / "next").symlink_to("new")
    (tmp_path / "next").rename(tmp_path / "data")
    await settle(file)

    assert (may(file, ACME), may(file, GLOBEX)) == (False, True)


async def test_the_watch_tells_of_a_change_and_outlives_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TenantsFile(path)
    poll, failures = file.poll, iter([RuntimeError("once")])

    async def poll_after_a_failure() -> None:
        for error in failures:
            raise error
        await poll()

    monkeypatch.setattr(file, "poll", poll_after_a_failure)
    watching = asyncio.create_task(file.watch(poll_s=0.001))
    changed = asyncio.create_task(file.wait_change())
    write(path, content(globex=GLOBEX))

    await asyncio.wait_for(changed, timeout=30)
    watching.cancel()

    assert (may(file, ACME), may(file, GLOBEX)) == (False, True)


def test_a_server_does_not_start_with_a_file_that_is_absent_or_wrong(path: Path) -> None:
    path.write_text("tenants: [{id: Acme}]")
    with pytest.raises(InvalidInput, match=r"tenants\[0\].id"):
        TenantsFile(path)
    path.unlink()
    with pytest.raises(InvalidInput, match="cannot be read"):
        TenantsFile(path)
