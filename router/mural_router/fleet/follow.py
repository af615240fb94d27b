"""Follows one Mural server's state stream, for as long as the server is in the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing

from mural_resolvers.backoff import Backoff
from mural_router.fleet.endpoint import Endpoint
from mural_router.fleet.follower import Follower, Listener, TlsContext
from mural_router.fleet.report import Report, exact_name, residency
from mural_router.placement import CountedAdapters, Residency, UseCount, base_names
from mural_server.protocol import (
    AdapterStatus,
    ControlClient,
    ControlError,
    Delta,
    Heartbeat,
    Snapshot,
    StateEvent,
    StateGap,
    decode_event,
)
from mural_server.protocol.caution import (
    MAX_ADAPTERS,
    MAX_READ_BYTES,
    EventBudget,
    count,
    rate,
    ratio,
)

__all__ = ["MuralFollower", "StateReader"]

CONNECT_TIMEOUT_S = 3.0
NAMES_AT_A_TIME = 100
"""Taken over between two turns of the loop: less than a millisecond."""


class StateReader:
    """One server's state, put together from its events and cleaned."""

    def __init__(self) -> None:
        self._boot_id = ""
        self._seq = -1
        self._report: Report | None = None
        self._accepting = False
        self._ready = False
        self._adapters: dict[str, Residency] = {}
        self._use = UseCount()
        """Of `_adapters`."""
        self._dropped = 0

    @property
    def since(self) -> int | None:
        """Where to go on after the connection broke; None: with a snapshot."""
        return None if self._report is None else self._seq

    def forget(self) -> None:
        """Begin with a snapshot again."""
        self._report = None

    async def take(self, event: StateEvent) -> Report | None:
        """The report after an event, or None when it says nothing new.

        Raises `StateGap` when the event does not follow. Lets the loop turn in between.
        """
        if isinstance(event, Snapshot):
            self._report = await self._begin(event)
            return self._report
        report = self._report
        if report is None or event.boot_id != self._boot_id:
            raise StateGap("the event is of another process")
        if isinstance(event, Heartbeat):
            if event.seq != self._seq:
                raise StateGap(f"at {self._seq}, but the server is at {event.seq}")
            return None
        if event.seq != self._seq + 1:
            raise StateGap(f"at {self._seq}, but the next change is {event.seq}")
        self._report = await self._change(report, event)
        return self._report

    async def _begin(self, event: Snapshot) -> Report:
        self._boot_id, self._seq = event.boot_id[:64], event.seq
        self._accepting, self._ready = event.accepting, event.ready
        self._adapters, self._use, self._dropped = {}, UseCount(), 0
        await self._add(tuple(event.adapters.values()))
        return Report(
            ready=self._accepting and self._ready,
            base_names=base_names(event.base.model_names),
            spec_hash=event.base.spec_hash[:128],
            boot_id=self._boot_id,
            slots=count(event.limits.slots),
            host_bytes=count(event.limits.host_bytes),
            max_cpu_loras=count(event.limits.max_cpu_loras),
            max_lora_rank=count(event.limits.max_lora_rank),
            max_num_seqs=count(event.limits.max_num_seqs),
            max_model_len=count(event.limits.max_model_len),
            running=count(event.load.running),
            waiting=count(event.load.waiting) + count(event.load.paused),
            kv_usage=ratio(event.load.kv_usage),
            tokens_per_s=rate(event.load.tokens_per_s),
            adapters=CountedAdapters(self._adapters, self._use.use),
            dropped=self._dropped,
        )

    async def _change(self, old: Report, event: Delta) -> Report:
        self._seq = event.seq
        self._accepting = self._accepting if event.accepting is None else event.accepting
        self._ready = self._ready if event.ready is None else event.ready
        adapters = old.adapters
        if event.changed or event.removed:
            for name in event.removed:
                exact = exact_name(name)
                gone = None if exact is None else self._adapters.pop(exact, None)
                if gone is not None:
                    self._use.add(gone, -1)
            await self._add(event.changed)
            # What was given out does not change any more.
            adapters = CountedAdapters(self._adapters, self._use.use)
        load = event.load
        return Report(
            ready=self._accepting and self._ready,
            base_names=old.base_names,
            spec_hash=old.spec_hash,
            boot_id=old.boot_id,
            slots=old.slots,
            host_bytes=old.host_bytes,
            max_cpu_loras=old.max_cpu_loras,
            max_lora_rank=old.max_lora_rank,
            max_num_seqs=old.max_num_seqs,
            max_model_len=old.max_model_len,
            running=old.running if load is None else count(load.running),
            waiting=old.waiting if load is None else count(load.waiting) + count(load.paused),
            kv_usage=old.kv_usage if load is None else ratio(load.kv_usage),
            tokens_per_s=old.tokens_per_s if load is None else rate(load.tokens_per_s),
            adapters=adapters,
            dropped=self._dropped,
        )

    async def _add(self, statuses: tuple[AdapterStatus, ...]) -> None:
        for place, status in enumerate(statuses):
            if place % NAMES_AT_A_TIME == NAMES_AT_A_TIME - 1:
                await asyncio.sleep(0)
            name = exact_name(status.name)
            full = len(self._adapters) >= MAX_ADAPTERS
            if name is None or (full and name not in self._adapters):
                self._dropped += 1
            else:
                old = self._adapters.get(name)
                if old is not None:
                    self._use.add(old, -1)
                self._adapters[name] = new = residency(status)
                self._use.add(new)


class MuralFollower(Follower):
    """One connection to the control API at a time, from the last event on where that is kept.

    After a break the next try is at once, then slower and slower, at most every ``RETRY_MOST_S``.
    """

    RETRY_FIRST_S = 0.05
    RETRY_MOST_S = 2.0
    STEADY_S = 5.0

    def __init__(
        self,
        endpoint: Endpoint,
        listener: Listener,
        *,
        tokens: Callable[[], Sequence[str | None]],
        ssl: TlsContext,
        idle_timeout_s: float,
    ) -> None:
        """``ssl`` and ``tokens`` are asked for each connection; of several tokens the server may
        know either, as while a Secret reaches one pod after the other."""
        if endpoint.control_port is None:
            raise ValueError(f"{endpoint.name}: no control port to follow")
        self._host, self._port = endpoint.host, endpoint.control_port
        self._tokens = tokens
        self._unknown = 0
        """Tokens that were not known there."""
        self._ssl = ssl
        self._idle_timeout_s = idle_timeout_s
        self._listener = listener
        self._reader = StateReader()
        self._backoff = Backoff(self.RETRY_FIRST_S, self.RETRY_MOST_S)

    async def run(self) -> None:
        budget = EventBudget(asyncio.get_running_loop().time)
        while True:
            try:
                await self._follow(budget)
            except StateGap:
                self._reader.forget()
                await asyncio.sleep(self._backoff.next_s())
            except ControlError as error:
                self._unknown += error.status == 401
                self._listener.lost(error.message, refused=error.refused)
                await asyncio.sleep(self._backoff.next_s())

    async def _follow(self, budget: EventBudget) -> None:
        began = asyncio.get_running_loop().time()
        try:
            async with aclosing(self._client().raw_events(self._reader.since)) as events:
                async for data in events:
                    report = await self._reader.take(decode_event(data))
                    if report is None:
                        self._listener.alive()
                    else:
                        self._listener.heard(report)
                    await budget.spend(len(data))
        finally:
            # One that breaks after every snapshot is asked less and less often; of one that held
            # it is to be known at once whether anybody listens there.
            if asyncio.get_running_loop().time() - began > self.STEADY_S:
                self._backoff.reset()

    def _client(self) -> ControlClient:
        tokens = self._tokens()
        return ControlClient(
            self._host,
            self._port,
            token=tokens[self._unknown % len(tokens)],
            ssl=self._ssl(),
            timeout_s=CONNECT_TIMEOUT_S,
            load_timeout_s=CONNECT_TIMEOUT_S,
            idle_timeout_s=self._idle_timeout_s,
            max_event_bytes=MAX_READ_BYTES,
        )
