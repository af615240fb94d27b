"""Decode steps while adapters are loaded beside them, and without."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import msgspec

from mural_server.bench.core_driver import CoreDriver
from mural_server.bench.setup import Group, Setup, group_jobs
from mural_server.bench.timing import Latency, latency

__all__ = ["BesideLoads", "LoadsReport", "measure_loads"]

BATCHES: tuple[Group, ...] = ("base", "one")


class BesideLoads(msgspec.Struct, kw_only=True):
    """A batch's decode steps."""

    batch: Group
    quiet: Latency
    """No load."""
    loading: Latency
    """One adapter after another is loaded and put into a slot."""
    loads: int
    load: Latency
    """From the asking to the adapter in its slot."""

    @property
    def p99_ratio(self) -> float:
        return self.loading.p99_ms / self.quiet.p99_ms


class LoadsReport(msgspec.Struct, kw_only=True):
    """Why the steps keep their cores, and the measurement."""

    loader: str
    batches: list[BesideLoads]


def measure_loads(setup: Setup) -> LoadsReport:
    """Time windows of steps with and without loads, in turns, on a batch of fixed size.

    Each pair of windows has a new batch, so that both see the same lengths, and the one that comes
    first changes. The adapters are in no cache of the engine; their files are in the system's.
    """
    with CoreDriver(setup) as driver:
        batches = [_measure(driver, setup, batch) for batch in BATCHES]
    return LoadsReport(
        loader="adapters are read, checked and converted in a child process of one thread, "
        "at a lower priority (nice, SCHED_BATCH); between two steps, one copy into a slot at most",
        batches=batches,
    )


def _measure(driver: CoreDriver, setup: Setup, batch: Group) -> BesideLoads:
    sizes = setup.sizes
    adapters = itertools.cycle(setup.churning)
    quiet: list[float] = []
    loading: list[float] = []
    loads: list[float] = []
    for pair in range(sizes.windows):
        driver.start_batch(group_jobs(setup, batch, pair))
        for loads_first in (pair % 2 == 0, pair % 2 == 1):
            if loads_first:
                loading += _window_with_loads(driver, sizes.window_steps, adapters, loads)
            else:
                quiet += [driver.step() for _ in range(sizes.window_steps)]
        driver.end_batch()
    return BesideLoads(
        batch=batch,
        quiet=latency(quiet),
        loading=latency(loading),
        loads=len(loads),
        load=latency(loads),
    )


def _window_with_loads(
    driver: CoreDriver, count: int, adapters: Iterator[str], loads: list[float]
) -> list[float]:
    """The steps' seconds; the last load is finished untimed, so that the next window is quiet."""
    steps = []
    began, call_id = time.perf_counter(), driver.begin_load(next(adapters))
    for _ in range(count):
        steps.append(driver.step())
        if driver.loaded(call_id):
            loads.append(time.perf_counter() - began)
            began, call_id = time.perf_counter(), driver.begin_load(next(adapters))
    driver.finish_load(call_id)
    loads.append(time.perf_counter() - began)
    return steps
