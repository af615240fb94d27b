"""The state stream: one description of the server, its changes numbered, kept for late readers."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable

import msgspec

from mural_resolvers.errors import Unavailable
from mural_server.api.state import AppState
from mural_server.catalog import AdapterView
from mural_server.protocol.wire import (
    AdapterStatus,
    Base,
    Delta,
    Heartbeat,
    Limits,
    Load,
    PrefixStatistics,
    Snapshot,
    StateEvent,
)

__all__ = ["StateFeed", "adapter_status", "difference"]

INTERVAL_S = 0.25
HEARTBEAT_S = 5.0
HISTORY = 1024
MAX_READERS = 64
RATE_WINDOW_S = 5.0

_encoder = msgspec.json.Encoder()


class StateFeed:
    """Watches one server while somebody reads, and says what changed."""

    def __init__(
        self,
        state: AppState,
        *,
        boot_id: str | None = None,
        history: int = HISTORY,
        heartbeat_s: float = HEARTBEAT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.boot_id = uuid.uuid4().hex if boot_id is None else boot_id
        self._state = state
        self._heartbeat_s = heartbeat_s
        self._clock = clock
        self._events: deque[tuple[int, bytes]] = deque(maxlen=history)
        self._changed = asyncio.Event()
        self._readers = 0
        self._read = asyncio.Event()
        self._closed = False
        self._generated = (clock(), state.client.stats().generation_tokens)
        self._tokens_per_s = 0.0
        self.snapshot = self._observe(0)

    async def run(self) -> None:
        """Keep the snapshot fresh, for as long as anybody reads."""
        while not self._closed:
            await self._read.wait()
            self.refresh()
            await asyncio.sleep(INTERVAL_S)

    def refresh(self) -> None:
        """Look at the server; a change gets the next number."""
        new = self._observe(self.snapshot.seq + 1)
        delta = difference(self.snapshot, new)
        if delta is None:
            return
        self.snapshot = new
        self._events.append((delta.seq, _event(delta)))
        self._changed.set()
        self._changed = asyncio.Event()

    def read(self, since: int | None) -> AsyncGenerator[bytes, None]:
        """Events from after ``since`` where they are still kept, else from a snapshot.

        Raises `Unavailable` at once when there are too many readers.
        """
        if self._readers >= MAX_READERS:
            raise Unavailable("Too many readers of the state.", retry_after_s=5.0)
        return self._follow(since)

    async def _follow(self, since: int | None) -> AsyncGenerator[bytes, None]:
        self._readers += 1
        self._read.set()
        try:
            self.refresh()
            place = -1 if since is None else since
            while True:
                if not self._kept(place):
                    # A new reader, or one that was too slow. Time passes while it reads.
                    snapshot = self.snapshot
                    place = snapshot.seq
                    yield _event(snapshot)
                    continue
                news = b"".join(event for seq, event in self._events if seq > place)
                if news:
                    place = self.snapshot.seq
                    yield news
                    continue
                if self._closed:
                    return
                heartbeat = await self._wait(place)
                if heartbeat:
                    yield heartbeat
        finally:
            self._readers -= 1
            if not self._readers:
                self._read.clear()

    async def _wait(self, place: int) -> bytes:
        try:
            await asyncio.wait_for(self._changed.wait(), self._heartbeat_s)
        except TimeoutError:
            return _event(Heartbeat(boot_id=self.boot_id, seq=place))
        return b""

    def close(self) -> None:
        """End every reader's stream, once it has been told the last news."""
        self.refresh()
        self._closed = True
        self._read.set()
        self._changed.set()

    def _kept(self, seq: int) -> bool:
        """Whether everything after ``seq`` can still be told."""
        if seq > self.snapshot.seq or seq < 0:
            return False
        oldest = self._events[0][0] if self._events else self.snapshot.seq + 1
        return seq >= oldest - 1

    def _observe(self, seq: int) -> Snapshot:
        state = self._state
        info, stats = state.client.info, state.client.stats()
        return Snapshot(
            boot_id=self.boot_id,
            seq=seq,
            base=Base(model_names=state.catalog.served, spec_hash=info.base_spec.hash),
            limits=Limits(
                slots=info.max_loras,
                max_cpu_loras=info.max_cpu_loras,
                host_bytes=info.max_cpu_lora_bytes,
                max_lora_rank=info.max_lora_rank,
                max_num_seqs=info.max_num_seqs,
                max_model_len=info.max_model_len,
            ),
            load=Load(
                running=stats.running,
                waiting=stats.waiting,
                paused=stats.paused,
                kv_usage=round(stats.kv_usage, 3),
                tokens_per_s=self._rate(stats.generation_tokens),
            ),
            prefix=PrefixStatistics(queries=stats.prefix_queries, hits=stats.prefix_hits),
            accepting=state.admission.accepting,
            ready=state.not_ready() is None,
            awaits_declared=state.readiness.awaits_declared,
            declared=tuple(sorted(state.readiness.declared)),
            adapters={
                view.name: adapter_status(
                    view, load=in_half_octaves(state.metrics.traffic.rate(view.name))
                )
                for view in state.catalog.view()
            },
        )

    def _rate(self, generated: int) -> float:
        then, before = self._generated
        elapsed = self._clock() - then
        if elapsed >= RATE_WINDOW_S:
            self._tokens_per_s = round((generated - before) / elapsed, 1)
            self._generated = (self._clock(), generated)
        return self._tokens_per_s


def in_half_octaves(rate: float) -> float:
    """Round to steps of √2, so that a load that only fades is not news all the time."""
    if rate < 0.01:
        return 0.0
    return round(math.pow(2.0, round(2 * math.log2(rate)) / 2), 3)


def difference(old: Snapshot, new: Snapshot) -> Delta | None:
    """The delta from one state to the next, or None when they are alike."""
    changed = tuple(
        status for name, status in new.adapters.items() if old.adapters.get(name) != status
    )
    removed = tuple(name for name in old.adapters if name not in new.adapters)
    delta = Delta(
        boot_id=new.boot_id,
        seq=new.seq,
        load=None if new.load == old.load else new.load,
        prefix=None if new.prefix == old.prefix else new.prefix,
        accepting=None if new.accepting == old.accepting else new.accepting,
        ready=None if new.ready == old.ready else new.ready,
        awaits_declared=(
            None if new.awaits_declared == old.awaits_declared else new.awaits_declared
        ),
        declared=None if new.declared == old.declared else new.declared,
        changed=changed,
        removed=removed,
    )
    nothing = Delta(boot_id=new.boot_id, seq=new.seq)
    return None if delta == nothing else delta


def _event(event: StateEvent) -> bytes:
    return b"data: " + _encoder.encode(event) + b"\n\n"


def adapter_status(view: AdapterView, load: float = 0.0) -> AdapterStatus:
    """Say on the wire what the catalog knows of an adapter."""
    return AdapterStatus(
        name=view.name,
        digest=view.digest,
        level=view.state,
        loading=view.loading,
        pinned=view.pinned,
        rank=view.rank,
        bytes=view.bytes,
        requests=view.running + view.waiting,
        load=load,
    )
