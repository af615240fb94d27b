"""A fleet in little: replays a trace under a policy and measures what clients would have seen.

The model of a replica, in the order in which a request meets it:

1. Its adapter: in memory, or it waits for a load, which it shares with others that wait for the
   same one. A replica loads a few at a time, each for as long as its rank says; memory holds a
   fixed sum of ranks and forgets the adapter that was used least recently, never one in use.
2. A seat: so many sequences are computed at a time, the rest wait in line.
3. Prefill: one prompt after the other at a fixed rate. The tokens that a prompt shares with an
   earlier one of its adapter cost nothing where they are still in the prefix cache, which holds a
   fixed number of tokens and forgets those used least recently. The first token follows.
4. Decode: the remaining tokens, at a time a token that grows with the seats taken and the ranks
   of those who have them.

Reports reach the routers at intervals, as the state stream's do. Requests alternate between the
routers. When a replica dies, requests without a first token are sent elsewhere, the others break.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from mural_router.bench.policies import Policy
from mural_router.bench.traces import Arrival, Trace
from mural_router.placement import Fleet, Replica, Residency

__all__ = ["FleetModel", "Result", "simulate"]

WINDOW_S = 60.0
SHORT_WINDOW_S = 5.0


@dataclass(frozen=True, slots=True)
class FleetModel:
    """What the replicas can do; about a small model on one accelerator each."""

    replicas: int = 8
    routers: int = 2
    seats: int = 48
    ranks_held: int = 1600
    """Memory for adapters, by the sum of their ranks: a hundred of rank 16."""
    loads_at_a_time: int = 2
    load_s: float = 0.5
    """Of an adapter of rank 16; others in proportion."""
    prefill_tokens_per_s: float = 10_000.0
    prefix_cache_tokens: int = 150_000
    token_s: float = 0.015
    token_s_a_seat: float = 0.00024
    rank_cost: float = 0.02
    """What a rank adds to a seat."""
    report_s: float = 0.25


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a trace under a policy."""

    trace: str
    policy: str
    requests: int
    broken: int
    residency_hits: float
    """Part of the requests that met their adapter in memory or on its way."""
    prefix_hits: float
    """Part of the prompts' tokens that were in the prefix cache."""
    spread: float
    """Mean over time of the largest load over the mean one, by what sequences cost, while there is
    one a replica."""
    homes: float
    """Replicas that hold an adapter, mean over those that are held, at the end."""
    ttft_p50_s: float
    ttft_p99_s: float


BYTES_A_RANK = 1 << 20


@dataclass(slots=True, eq=False)
class _Sequence:
    arrival: Arrival
    router: int
    replica: int = -1
    started: bool = False
    """It has its first token."""


@dataclass(slots=True)
class _Rate:
    """Tokens a second over a window that forgets."""

    window_s: float
    value: float = 0.0
    at_s: float = 0.0

    def add(self, tokens: int, now_s: float) -> None:
        self.value = self.at(now_s) + tokens / self.window_s
        self.at_s = now_s

    def at(self, now_s: float) -> float:
        return self.value * math.exp((self.at_s - now_s) / self.window_s)


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    arrivals: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    broken: int = 0
    ttft_s: list[float] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)


class _Server:
    """One replica by the model of this module."""

    def __init__(self, index: int, model: FleetModel, run: _Run) -> None:
        self.name = f"mural-{index}"
        self.up = True
        self.reports = 0
        self._index = index
        self._model = model
        self._run = run
        self._clear()

    def _clear(self) -> None:
        self.present: set[_Sequence] = set()
        self._held: OrderedDict[str, int] = OrderedDict()
        """Ranks, the adapter used least recently first."""
        self._ranks: dict[str, int] = {}
        """Of all that have been asked for here: those not held are on disk."""
        self._seated_ranks = 0
        self._users: dict[str, int] = {}
        self._loading: dict[str, list[_Sequence]] = {}
        self._to_load: deque[str] = deque()
        self._loads = 0
        self._line: deque[_Sequence] = deque()
        self._seated = 0
        self._prefill_free_s = 0.0
        self._prefixes: OrderedDict[int, int] = OrderedDict()
        self._prefix_tokens = 0
        self._rates: dict[str, _Rate] = {}
        self._rate = _Rate(SHORT_WINDOW_S)

    def take(self, sequence: _Sequence) -> None:
        adapter, counts = sequence.arrival.adapter, self._run.counts
        sequence.replica = self._index
        self.present.add(sequence)
        self._ranks[adapter] = sequence.arrival.rank
        self._users[adapter] = self._users.get(adapter, 0) + 1
        counts.arrivals += 1
        if adapter in self._held:
            counts.hits += 1
            self._held.move_to_end(adapter)
            self._queue(sequence)
        elif adapter in self._loading:
            counts.hits += 1
            self._loading[adapter].append(sequence)
        else:
            self._loading[adapter] = [sequence]
            self._to_load.append(adapter)
            self._load()

    def die(self) -> list[_Sequence]:
        """Everything is lost; those present are returned."""
        lost = sorted(self.present, key=lambda each: each.arrival.at_s)
        self._clear()
        self.up = False
        self.reports += 1
        return lost

    def report(self, now_s: float) -> Replica:
        self.reports += 1
        adapters = {name: self._residency(name, now_s) for name in self._ranks}
        return Replica(
            self.name,
            ready=self.up,
            report=self.reports,
            slots=16,
            host_bytes=self._model.ranks_held * BYTES_A_RANK,
            max_num_seqs=self._model.seats,
            running=self._seated,
            waiting=len(self.present) - self._seated,
            tokens_per_s=self._rate.at(now_s),
            adapters=adapters,
        )

    @property
    def held(self) -> Iterable[str]:
        return self._held.keys()

    @property
    def cost(self) -> float:
        """Of the sequences there, in those of the base."""
        ranks = sum(sequence.arrival.rank for sequence in self.present)
        return len(self.present) + self._model.rank_cost * ranks

    def _residency(self, adapter: str, now_s: float) -> Residency:
        rate, rank = self._rates.get(adapter), self._ranks[adapter]
        return Residency(
            "host" if adapter in self._held else "disk",
            loading=adapter in self._loading,
            rank=rank,
            bytes=rank * BYTES_A_RANK,
            requests=self._users.get(adapter, 0),
            load=0.0 if rate is None else rate.at(now_s),
        )

    def _load(self) -> None:
        while self._to_load and self._loads < self._model.loads_at_a_time:
            self._loads += 1
            adapter = self._to_load.popleft()
            load_s = self._model.load_s * self._ranks[adapter] / 16
            self._run.after(load_s, self._alive(partial(self._loaded, adapter)))

    def _loaded(self, adapter: str) -> None:
        self._loads -= 1
        self._held[adapter] = self._ranks[adapter]
        for name in [name for name in self._held if not self._users.get(name)]:
            if sum(self._held.values()) <= self._model.ranks_held:
                break
            del self._held[name]
            self._rates.pop(name, None)
        for sequence in self._loading.pop(adapter):
            self._queue(sequence)
        self._load()

    def _queue(self, sequence: _Sequence) -> None:
        self._line.append(sequence)
        self._seat()

    def _seat(self) -> None:
        while self._line and self._seated < self._model.seats:
            sequence = self._line.popleft()
            self._seated += 1
            self._seated_ranks += sequence.arrival.rank
            begin = max(self._run.now_s, self._prefill_free_s)
            tokens = self._uncached(sequence.arrival)
            self._prefill_free_s = begin + tokens / self._model.prefill_tokens_per_s
            wait = self._prefill_free_s - self._run.now_s
            self._run.after(wait, self._alive(partial(self._first_token, sequence)))

    def _uncached(self, arrival: Arrival) -> int:
        counts, key = self._run.counts, arrival.prefix
        cached = self._prefixes.pop(key, 0)
        self._prefixes[key] = arrival.shared_tokens
        self._prefix_tokens += arrival.shared_tokens - cached
        while self._prefix_tokens > self._model.prefix_cache_tokens:
            self._prefix_tokens -= self._prefixes.popitem(last=False)[1]
        prompt = arrival.shared_tokens + arrival.own_tokens
        counts.cached_tokens += cached
        counts.prompt_tokens += prompt
        return prompt - cached

    def _first_token(self, sequence: _Sequence) -> None:
        sequence.started = True
        self._run.counts.ttft_s.append(self._run.now_s - sequence.arrival.at_s)
        seats = self._seated + self._model.rank_cost * self._seated_ranks
        token_s = self._model.token_s + self._model.token_s_a_seat * seats
        rest_s = token_s * (sequence.arrival.output_tokens - 1)
        self._run.after(rest_s, self._alive(partial(self._end, sequence)))

    def _end(self, sequence: _Sequence) -> None:
        arrival, now_s = sequence.arrival, self._run.now_s
        self._seated -= 1
        self._seated_ranks -= arrival.rank
        self.present.remove(sequence)
        self._users[arrival.adapter] -= 1
        rate = self._rates.setdefault(arrival.adapter, _Rate(WINDOW_S))
        rate.add(arrival.output_tokens, now_s)
        self._rate.add(arrival.output_tokens, now_s)
        self._seat()
        self._run.ended(sequence)

    def _alive(self, act: Callable[[], None]) -> Callable[[], None]:
        """What was to happen does not when the replica has died meanwhile."""
        present = self.present
        return lambda: act() if self.present is present else None


class _Run:
    """One replay: the clock, the events and the routers."""

    def __init__(self, trace: Trace, policy: type[Policy], model: FleetModel) -> None:
        self.now_s = 0.0
        self.counts = _Counts()
        self._trace = trace
        self._model = model
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._routers = [policy() for _ in range(model.routers)]
        self._waiting: list[deque[_Sequence]] = [deque() for _ in self._routers]
        self._servers = [_Server(i, model, self) for i in range(model.replicas)]
        self._length_s = trace.arrivals[-1].at_s

    def after(self, wait_s: float, act: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now_s + wait_s, self._number, act))

    def ended(self, sequence: _Sequence) -> None:
        name = self._servers[sequence.replica].name
        self._routers[sequence.router].finished(name, sequence.arrival)
        self._serve(sequence.router)

    def replay(self) -> None:
        self._report()
        for outage in self._trace.outages:
            self.after(outage.from_s, partial(self._die, outage.replica))
            self.after(outage.to_s, partial(self._rise, outage.replica))
        for number, arrival in enumerate(self._trace.arrivals):
            router = number % len(self._routers)
            self.after(arrival.at_s, partial(self._arrive, _Sequence(arrival, router)))
        while self._events:
            self.now_s, _, act = heapq.heappop(self._events)
            act()

    def homes(self) -> float:
        held: dict[str, int] = {}
        for server in self._servers:
            for adapter in server.held:
                held[adapter] = held.get(adapter, 0) + 1
        return statistics.fmean(held.values()) if held else 0.0

    def _arrive(self, sequence: _Sequence) -> None:
        self._waiting[sequence.router].append(sequence)
        self._serve(sequence.router)

    def _serve(self, router: int) -> None:
        """In order of arrival, as long as there is a place."""
        line, policy = self._waiting[router], self._routers[router]
        while line and (name := policy.choose(line[0].arrival)) is not None:
            sequence = line.popleft()
            policy.started(name, sequence.arrival)
            self._servers[int(name.rpartition("-")[2])].take(sequence)

    def _report(self) -> None:
        self._tell()
        loads = [server.cost for server in self._servers if server.up]
        if loads and sum(loads) >= len(loads):
            self.counts.spreads.append(max(loads) / statistics.fmean(loads))
        for router in range(len(self._routers)):
            self._serve(router)
        if self.now_s < self._length_s or any(self._waiting):
            self.after(self._model.report_s, self._report)

    def _tell(self) -> None:
        replicas = sorted(
            (server.report(self.now_s) for server in self._servers), key=lambda each: each.name
        )
        fleet = Fleet(tuple(replicas))
        for policy in self._routers:
            policy.observe(fleet)

    def _die(self, index: int) -> None:
        server = self._servers[index]
        lost = server.die()
        self._tell()
        for sequence in lost:
            self._routers[sequence.router].finished(server.name, sequence.arrival)
            if sequence.started:
                self.counts.broken += 1
            else:
                self._arrive(sequence)

    def _rise(self, index: int) -> None:
        self._servers[index].up = True


def simulate(trace: Trace, policy: type[Policy], model: FleetModel) -> Result:
    """Replay a trace and measure; the same every time."""
    run = _Run(trace, policy, model)
    run.replay()
    counts = run.counts
    ttft = statistics.quantiles(counts.ttft_s, n=100, method="inclusive")
    return Result(
        trace=trace.name,
        policy=policy.name,
        requests=len(trace.arrivals),
        broken=counts.broken,
        residency_hits=counts.hits / counts.arrivals,
        prefix_hits=counts.cached_tokens / counts.prompt_tokens,
        spread=statistics.fmean(counts.spreads) if counts.spreads else 1.0,
        homes=run.homes(),
        ttft_p50_s=ttft[49],
        ttft_p99_s=ttft[98],
    )
