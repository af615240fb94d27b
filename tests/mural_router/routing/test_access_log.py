"""One line a request, whatever the disk does."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

from mural_router.routing.access_log import AccessLog, AccessRecord, for_log, now_text


def record(request_id: str) -> AccessRecord:
    return AccessRecord(
        at="2027-01-01T00:00:00.000+00:00", request_id=request_id, path="/", status=200
    )


async def test_lines_are_there_when_it_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(path, flush_s=60)
    for at in range(1_000):
        log.record(record(f"r{at}"))
    await log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == [f"r{at}" for at in range(1_000)]
    assert lines[0] == {
        "at": "2027-01-01T00:00:00.000+00:00",
        "request_id": "r0",
        "path": "/",
        "status": 200,
    }
    assert (log.written, log.lost) == (1_000, 0)


async def test_a_file_that_was_moved_away_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    for name in ("one", "two"):
        log = AccessLog(path, flush_s=60)
        log.record(record(name))
        await log.close()
        path.rename(tmp_path / name)
    assert json.loads((tmp_path / "two").read_text())["request_id"] == "two"


async def test_a_writer_that_hangs_costs_lines_and_no_time() -> None:
    hang, entered = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def write(data: bytes) -> None:
        loop.call_soon_threadsafe(entered.set)
        hang.wait(60)

    log = AccessLog(flush_s=0, max_pending_bytes=1_000, write=write)
    log.record(record("first"))
    await entered.wait()
    for _ in range(100):
        log.record(record("more"))
    assert log.lost > 80
    hang.set()
    await log.close()
    assert log.written + log.lost == 101


async def test_a_full_disk_is_counted_and_does_not_raise(tmp_path: Path) -> None:
    log = AccessLog(Path("/dev/full"), flush_s=60)
    log.record(record("one"))
    await log.close()
    assert (log.written, log.lost) == (0, 1)


def test_what_a_client_wrote_cannot_break_a_line_or_leak_a_key() -> None:
    key = f"mural_{'a' * 16}_{'s' * 43}"
    assert "s" * 10 not in for_log(f"x{key}")
    assert for_log("a\ud800é") == "a\\ud800\\xe9"
    assert len(for_log("n" * 10_000)) == 256


def test_times_are_in_utc_to_the_millisecond():
    assert now_text(1_796_000_145.359) == "2026-11-30T00:55:45.358Z"
    assert now_text(0.0) == "1970-01-01T00:00:00.000Z"
