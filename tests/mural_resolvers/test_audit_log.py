"""The audit log: what it says, and that it never stands in the way."""

from __future__ import annotations

import logging
import os
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from mural_resolvers.audit import AuditLog
from mural_resolvers.tenants import ADMIN, Principal, mint_key

ROOT = Principal(tenant=None, rights=frozenset({ADMIN}), key_id="k1")


def clock() -> datetime:
    return datetime(2026, 11, 29, 12, 30, tzinfo=UTC)


def read(path: Path) -> list[dict[str, object]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]


def test_an_action_is_one_line_with_who_what_when_and_how_it_ended(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path, clock=clock)

    audit.record(ROOT, "load", name="sql", digest="ab" * 32)
    audit.record(Principal(tenant="ops", key_id="k2"), "unload", name="x", result="model_not_found")
    audit.close()

    assert read(path) == [
        {
            "at": "2026-11-29T12:30:00.000+00:00",
            "key_id": "k1",
            "tenant": None,
            "action": "load",
            "name": "sql",
            "digest": "ab" * 32,
            "result": "ok",
        },
        {
            "at": "2026-11-29T12:30:00.000+00:00",
            "key_id": "k2",
            "tenant": "ops",
            "action": "unload",
            "name": "x",
            "digest": None,
            "result": "model_not_found",
        },
    ]
    assert (audit.numbers.written, audit.numbers.failed) == (2, 0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_without_a_file_it_is_the_log_whatever_else_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger().setLevel(logging.WARNING)
    audit = AuditLog(clock=clock)

    audit.record(ROOT, "drain")
    audit.close()

    (record,) = [record for record in caplog.records if record.name == "mural.audit"]
    assert msgspec.json.decode(record.getMessage())["action"] == "drain"


def test_a_file_that_was_moved_away_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    audit = AuditLog(path)
    audit.record(ROOT, "load", name="one")
    audit.flush()
    path.rename(tmp_path / "audit.1")

    audit.record(ROOT, "load", name="two")
    audit.close()

    assert [line["name"] for line in read(path)] == ["two"]


def test_what_cannot_be_written_is_counted_and_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    audit = AuditLog(folder / "audit.jsonl")
    folder.rmdir()

    for name in ("one", "two"):
        audit.record(ROOT, "load", name=name)
    audit.flush()
    assert (audit.numbers.written, audit.numbers.failed) == (0, 2)
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    # The lines are in the log at least.
    assert {"one", "two"} <= {
        msgspec.json.decode(r.getMessage())["name"]
        for r in caplog.records
        if r.levelno == logging.WARNING
    }

    folder.mkdir()
    audit.record(ROOT, "load", name="three")
    audit.close()
    assert [line["name"] for line in read(folder / "audit.jsonl")] == ["three"]


def test_a_disk_that_hangs_holds_nobody_up(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    audit = AuditLog(pipe, max_pending=4)

    # Nobody reads, so the writing thread hangs in its first open.
    for _ in range(100):
        audit.record(ROOT, "load")

    assert audit.numbers.failed >= 95
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()))
    reader.start()
    audit.close(timeout_s=30)
    reader.join(timeout=30)
    assert received


def test_a_name_that_holds_a_key_is_noted_without_it(tmp_path: Path) -> None:
    minted = mint_key()
    audit = AuditLog(tmp_path / "audit.jsonl")

    audit.record(ROOT, "load", name=minted.key)
    audit.record(ROOT, "load", name="x" * 10_000)
    audit.close()

    first, second = read(tmp_path / "audit.jsonl")
    assert minted.key[-43:] not in str(first)
    assert len(str(second["name"])) == 256
