"""What has happened, as Kubernetes Events beside the objects: ``kubectl describe`` shows them.

Events are for people and may be lost; whoever notes one is never kept waiting. What is said again
of an object raises the count of its Event, as the recorder of client-go (``tools/events``) has it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal, Protocol

from mural_operator.metrics import Metrics
from mural_resolvers.backoff import Backoff
from mural_resolvers.kubernetes.client import JsonObject, KubeError
from mural_resolvers.kubernetes.complaint import Complaint
from mural_resolvers.kubernetes.objects import GROUP, VERSION, ObjectMeta
from mural_resolvers.kubernetes.paths import EVENTS

__all__ = ["EventClient", "EventRecorder", "EventType", "Regarded"]

MAX_WAITING: Final = 512
MAX_REMEMBERED: Final = 2048
SERIES_S: Final = 360.0
"""What is said again after longer is a new Event."""
COUNT_S: Final = 10.0
"""Between two writes of the count of one Event."""
SPACING_S: Final = 0.05
"""Between two writes of any."""
TRIES: Final = 5
AGAIN: Final = frozenset({0, 409, 429, 500, 502, 503, 504})
MAX_NOTE_BYTES: Final = 1000
"""The API server takes 1024."""
MAX_WORD_CHARS: Final = 128
MAX_NAME_CHARS: Final = 200
CONTROLLER: Final = "mural.dev/operator"

EventType = Literal["Normal", "Warning"]

log = logging.getLogger(__name__)


class EventClient(Protocol):
    """What is asked of a `KubeClient`."""

    async def create(self, path: str, body: JsonObject, /) -> bytes:
        """Make an object."""

    async def patch(self, path: str, body: JsonObject, /) -> bytes:
        """Change one by a merge patch."""


class Regarded(Protocol):
    """Any of the custom resources."""

    @property
    def metadata(self) -> ObjectMeta:
        """Whose it is."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What makes two Events one."""

    uid: str
    type: EventType
    reason: str
    note: str


@dataclass(slots=True)
class _Record:
    """One Event."""

    kind: str
    meta: ObjectMeta
    name: str
    first: datetime
    last: datetime
    last_s: float
    count: int = 1
    written: int = 0
    """The count that the API server has; 0: not even the Event."""
    waiting: bool = False


class EventRecorder:
    """``note`` from anywhere in the event loop; ``run`` sends."""

    def __init__(
        self,
        client: EventClient,
        *,
        metrics: Metrics,
        instance: str = "",
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``instance`` says which operator reports (its host's name, if left out)."""
        self._client = client
        self._metrics = metrics
        self._instance = (instance or socket.gethostname())[:MAX_WORD_CHARS]
        self._now = now
        self._records: OrderedDict[_Said, _Record] = OrderedDict()
        self._queue: asyncio.Queue[_Said] = asyncio.Queue()
        self._complaint = Complaint(
            log, "events cannot be recorded", mended="events are recorded again"
        )

    def note(
        self, regarding: Regarded, kind: str, type: EventType, reason: str, message: str
    ) -> None:
        """Have it told of an object of a kind; dropped, and counted, when too many wait."""
        meta = regarding.metadata
        said = _Said(meta.uid, type, reason[:MAX_WORD_CHARS], _cut(message))
        loop_s, moment = asyncio.get_running_loop().time(), self._now()
        record = self._records.get(said)
        if record is not None and loop_s - record.last_s < SERIES_S:
            record.count += 1
            record.last, record.last_s = moment, loop_s
        else:
            record = _Record(kind, meta, _event_name(meta.name), moment, moment, loop_s)
        if not record.waiting and self._queue.qsize() >= MAX_WAITING:
            self._metrics.events_dropped += 1
            return
        self._remember(said, record)
        if record.count == 1:
            self._enqueue(said, record)
        elif not record.waiting:
            # Counted for a while, then written once.
            record.waiting = True
            asyncio.get_running_loop().call_later(COUNT_S, self._queue.put_nowait, said)

    async def run(self) -> None:
        """Send for ever."""
        while True:
            said = await self._queue.get()
            record = self._records.get(said)
            if record is None:
                continue
            record.waiting = False
            if record.count > record.written:
                await self._send(said, record)
                await asyncio.sleep(SPACING_S)

    def _remember(self, said: _Said, record: _Record) -> None:
        self._records[said] = record
        self._records.move_to_end(said)
        if len(self._records) > MAX_REMEMBERED:
            _, oldest = self._records.popitem(last=False)
            self._metrics.events_dropped += oldest.waiting

    def _enqueue(self, said: _Said, record: _Record) -> None:
        if not record.waiting:
            record.waiting = True
            self._queue.put_nowait(said)

    async def _send(self, said: _Said, record: _Record) -> None:
        backoff = Backoff(0.5, 10.0)
        for _ in range(TRIES):
            try:
                await self._write(said, record)
            except KubeError as error:
                problem = error
                if error.status not in AGAIN:
                    break
                await asyncio.sleep(max(backoff.next_s(), min(error.retry_after_s or 0.0, 10.0)))
            else:
                self._complaint.over()
                self._metrics.recorded(said.type)
                return
        self._metrics.events_dropped += 1
        self._complaint.note(problem)

    async def _write(self, said: _Said, record: _Record) -> None:
        count = record.count
        if record.written:
            path = EVENTS.named(record.meta.namespace, record.name)
            try:
                await self._client.patch(path, _series(record))
            except KubeError as error:
                if error.status != 404:
                    raise
                # The API server forgets Events after an hour.
                record.name, record.first = _event_name(record.meta.name), record.last
                record.written, record.count, count = 0, 1, 1
        if not record.written:
            path = EVENTS.of(record.meta.namespace)
            try:
                await self._client.create(path, self._event(said, record))
            except KubeError as error:
                # There already: an attempt arrived whose answer did not.
                if error.status != 409:
                    raise
        record.written = count

    def _event(self, said: _Said, record: _Record) -> JsonObject:
        meta = record.meta
        return {
            "apiVersion": f"{EVENTS.group}/{EVENTS.version}",
            "kind": "Event",
            "metadata": {"name": record.name, "namespace": meta.namespace},
            "eventTime": _micro_time(record.first),
            "type": said.type,
            "reason": said.reason,
            "action": "Reconcile",
            "note": said.note,
            "regarding": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": record.kind,
                "namespace": meta.namespace,
                "name": meta.name,
                "uid": meta.uid,
                "resourceVersion": meta.resource_version,
            },
            "reportingController": CONTROLLER,
            "reportingInstance": self._instance,
            **(_series(record) if record.count > 1 else {}),
        }


def _series(record: _Record) -> JsonObject:
    return {"series": {"count": record.count, "lastObservedTime": _micro_time(record.last)}}


def _cut(message: str) -> str:
    data = message.encode()
    if len(data) <= MAX_NOTE_BYTES:
        return message
    return f"{data[:MAX_NOTE_BYTES].decode(errors='ignore')}…"


def _event_name(name: str) -> str:
    return f"{name[:MAX_NAME_CHARS].rstrip('.-')}.{secrets.token_hex(8)}"


def _micro_time(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
