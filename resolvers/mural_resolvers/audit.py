"""What admins did: one JSON line for each action, in a file or in the log.

Writing happens on a thread of its own, behind a bounded queue: neither a full disk nor a slow one
holds a request up. What could not be written is counted and goes to the log instead.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from mural_resolvers.redaction import redacted
from mural_resolvers.tenants import Principal

__all__ = ["AuditLog", "AuditNumbers", "AuditRecord"]

MAX_PENDING: Final = 4096
MAX_NAME_CHARS: Final = 256
CLOSE_S: Final = 5.0

logger = logging.getLogger("mural.audit")
# An audit trail is not a matter of how much else is logged.
logger.setLevel(logging.INFO)


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One action. ``result`` is ``ok`` or the code of the error; ``at`` is in UTC."""

    at: str
    key_id: str | None
    tenant: str | None
    action: str
    name: str | None
    digest: str | None
    result: str


@dataclass(frozen=True, slots=True)
class AuditNumbers:
    """Records that reached their place, and records that did not."""

    written: int = 0
    failed: int = 0


class AuditLog:
    """Appends records to a file (None: the logger ``mural.audit``). For any thread.

    The file is opened for each write, so that it may be moved away under us; a new one is for its
    owner alone.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        max_pending: int = MAX_PENDING,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._path = path
        self._clock = clock
        self._pending: queue.Queue[AuditRecord | None] = queue.Queue(max_pending)
        self._lock = threading.Lock()
        self._numbers = AuditNumbers()
        self._failing = False
        self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
        self._thread.start()

    @property
    def numbers(self) -> AuditNumbers:
        """What has been written so far."""
        with self._lock:
            return self._numbers

    def record(
        self,
        principal: Principal,
        action: str,
        *,
        name: str | None = None,
        digest: str | None = None,
        result: str = "ok",
    ) -> None:
        """Note an action; never blocks and never raises."""
        record = AuditRecord(
            at=self._clock().astimezone(UTC).isoformat(timespec="milliseconds"),
            key_id=principal.key_id,
            tenant=principal.tenant,
            action=action,
            name=None if name is None else redacted(name)[:MAX_NAME_CHARS],
            digest=digest,
            result=result,
        )
        try:
            self._pending.put_nowait(record)
        except queue.Full:
            self._lost("too many records are waiting")

    def flush(self) -> None:
        """Wait until everything noted so far is in its place, or has failed to get there."""
        self._pending.join()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write what is waiting, in bounded time. Nothing may be recorded afterwards."""
        try:
            self._pending.put(None, timeout=timeout_s)
        except queue.Full:
            logger.error("the audit log could not be written to its end")
            return
        self._thread.join(timeout_s)

    # -- the writing thread -----------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            record = self._pending.get()
            try:
                if record is None:
                    return
                self._write(record)
            finally:
                self._pending.task_done()

    def _write(self, record: AuditRecord) -> None:
        line = msgspec.json.encode(record)
        if self._path is None:
            logger.info("%s", line.decode())
        else:
            try:
                _append(self._path, line + b"\n")
            except OSError as error:
                self._lost(error.strerror or type(error).__name__)
                logger.warning("%s", line.decode())
                return
        with self._lock:
            self._failing = False
            self._numbers = AuditNumbers(self._numbers.written + 1, self._numbers.failed)

    def _lost(self, reason: str) -> None:
        with self._lock:
            self._numbers = AuditNumbers(self._numbers.written, self._numbers.failed + 1)
            first, self._failing = not self._failing, True
        if first:
            # Once for each time that it begins to fail.
            logger.error("the audit log cannot be written: %s", reason)


def _append(path: Path, line: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        # One write: lines of two servers that share the file do not run into one another.
        if os.write(descriptor, line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
