"""One JSON line a request: who, what, where and why there, how much, how long. No prompt, no key.

Lines are gathered on the loop and written by a thread a few times a second: neither a full disk
nor a slow one holds a request up, and a line costs the loop two microseconds. What does not fit
the bound is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

import msgspec

from mural_resolvers.redaction import redacted

__all__ = ["AccessLog", "AccessRecord", "for_log", "now_text"]

FLUSH_S: Final = 0.2
MAX_PENDING_BYTES: Final = 4 << 20
MAX_TEXT_CHARS: Final = 256
CLOSE_S: Final = 5.0

logger = logging.getLogger("mural.router.access")


class AccessRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One request. Times are seconds from its arrival, ``at`` is when it ended, in UTC."""

    at: str
    request_id: str
    path: str
    status: int
    """Of the answer; 0: the client left before there was one."""
    tenant: str | None = None
    key_id: str | None = None
    asked: str | None = None
    """The name as it was asked for, where that was an alias."""
    adapter: str | None = None
    """The exact version; None: the base, or none was found."""
    digest: str | None = None
    replica: str | None = None
    reason: str | None = None
    """Of the choice, as placement names it."""
    attempts: int = 0
    stream: bool = False
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    queued_s: float | None = None
    first_byte_s: float | None = None
    total_s: float | None = None
    bytes_sent: int = 0
    error: str | None = None
    """The code of a refusal, or what went wrong, in words."""


def now_text(now_s: float) -> str:
    """A time in UTC as ISO 8601, to the millisecond."""
    second = int(now_s)
    return f"{_second_text(second)}.{int((now_s - second) * 1000):03d}Z"


@lru_cache(maxsize=4)
def _second_text(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


class AccessLog:
    """Appends records to a file (None: standard output). For one event loop.

    The file is opened for each write, so that it may be moved away under us.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        flush_s: float = FLUSH_S,
        max_pending_bytes: int = MAX_PENDING_BYTES,
        write: Callable[[bytes], None] | None = None,
    ) -> None:
        """Raises `OSError` for a file that cannot be opened."""
        self.written = 0
        self.lost = 0
        self._name = "on standard output" if path is None else str(path)
        self._write = write or _writer(path)
        self._flush_s = flush_s
        self._max_pending_bytes = max_pending_bytes
        self._lines: list[bytes] = []
        self._pending_bytes = 0
        self._writing_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._failing = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="access-log")
        self._encode = msgspec.json.Encoder().encode

    def record(self, record: AccessRecord) -> None:
        """Note a request; never blocks and never raises."""
        line = self._encode(record)
        if self._pending_bytes + self._writing_bytes + len(line) > self._max_pending_bytes:
            self._lose(1, "it is not written fast enough")
            return
        self._lines.append(line)
        self._pending_bytes += len(line)
        if self._timer is None and self._writing is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._flush_s, self._flush)

    async def close(self) -> None:
        """Write what is waiting, in bounded time."""
        if self._timer is not None:
            self._timer.cancel()
        for _ in range(2):
            # The first round is what is being written already.
            if self._writing is None:
                self._flush()
            if self._writing is not None:
                await asyncio.wait({self._writing}, timeout=CLOSE_S)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _flush(self) -> None:
        self._timer = None
        if not self._lines:
            return
        lines, self._lines = self._lines, []
        self._writing_bytes, self._pending_bytes = self._pending_bytes, 0
        data = b"\n".join(lines) + b"\n"
        loop = asyncio.get_running_loop()
        self._writing = loop.run_in_executor(self._thread, self._write, data)
        self._writing.add_done_callback(lambda done: self._flushed(done, len(lines)))

    def _flushed(self, done: asyncio.Future[None], count: int) -> None:
        self._writing, self._writing_bytes = None, 0
        error = None if done.cancelled() else done.exception()
        if error is None:
            self.written += count
            self._failing = False
        else:
            reason = error.strerror if isinstance(error, OSError) else None
            self._lose(count, reason or type(error).__name__)
        if self._lines and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._flush_s, self._flush)

    def _lose(self, count: int, reason: str) -> None:
        self.lost += count
        if not self._failing:
            # Once for each time that it begins to fail.
            self._failing = True
            logger.error("the access log %s loses lines: %s", self._name, reason)


def for_log(text: str) -> str:
    """A name from a client, as far as it may stand in a log: without keys, and cut."""
    return redacted(text)[:MAX_TEXT_CHARS].encode("ascii", "backslashreplace").decode()


def _writer(path: Path | None) -> Callable[[bytes], None]:
    if path is None:
        return _to_standard_output
    _append(path, b"")
    return lambda data: _append(path, data)


def _to_standard_output(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _append(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)
