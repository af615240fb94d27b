"""Where a decode step's time goes, by the function of the server that asked for it."""

from __future__ import annotations

import cProfile
import pstats
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

import mural_server
from mural_server.bench.core_driver import CoreDriver
from mural_server.bench.setup import GROUPS, Group, Setup, group_jobs
from mural_server.bench.timing import Latency, latency

__all__ = ["Part", "ProfileReport", "StepProfile", "measure_profile"]

PACKAGE = Path(mural_server.__file__).parent
ELSEWHERE = "(elsewhere)"
MAX_PASSES = 12
"""How deep a call may go through others' code before it reaches C."""

Function = tuple[str, int, str]
Edge = tuple[int, int, float, float]


class Part(msgspec.Struct, frozen=True):
    """A function of the server, and what it and the libraries under it took in a step."""

    function: str
    """``ops.packed.linear`` and the like."""
    ms: float


class StepProfile(msgspec.Struct, kw_only=True):
    """A batch's decode steps."""

    batch: Group
    plain: Latency
    """Without the profiler, which slows the calls of Python down."""
    profiled_ms: float
    parts: list[Part]
    """The largest first; their sum is the profiled step."""


class ProfileReport(msgspec.Struct):
    steps: list[StepProfile]


class _Stats(NamedTuple):
    own: Mapping[Function, float]
    callers: Mapping[Function, Mapping[Function, float]]
    """Own seconds of a function by who called it."""


def measure_profile(setup: Setup) -> ProfileReport:
    """Profile windows of decode steps of every group's batch that has no load beside it."""
    with CoreDriver(setup) as driver:
        return ProfileReport(
            [_measure(driver, setup, batch) for batch in GROUPS if batch != "churn"]
        )


def _measure(driver: CoreDriver, setup: Setup, batch: Group) -> StepProfile:
    sizes = setup.sizes
    driver.start_batch(group_jobs(setup, batch, 0))
    plain: list[float] = []
    profiler = cProfile.Profile()
    count = 0
    for _ in range(sizes.windows):
        plain += [driver.step() for _ in range(sizes.window_steps)]
        with profiler:
            for _ in range(sizes.window_steps):
                driver.step()
        count += sizes.window_steps
    driver.end_batch()
    seconds = by_function(profiler)
    parts = [Part(function, 1e3 * spent / count) for function, spent in seconds.items()]
    parts.sort(key=lambda part: -part.ms)
    return StepProfile(
        batch=batch,
        plain=latency(plain),
        profiled_ms=sum(part.ms for part in parts),
        parts=parts,
    )


def by_function(profiler: cProfile.Profile) -> dict[str, float]:
    """Own seconds of each of the server's functions, and of all that it calls outside of them.

    What a library's function took is handed to its callers in proportion to what it took for each
    of them, until it arrives at a function of the server.
    """
    stats = _read(profiler)
    found: dict[str, float] = defaultdict(float)
    pending = dict(stats.own)
    for _ in range(MAX_PASSES):
        handed_on: dict[Function, float] = defaultdict(float)
        for function, seconds in pending.items():
            name = _own_name(function)
            if name is not None:
                found[name] += seconds
                continue
            callers = stats.callers[function]
            total = sum(callers.values())
            if not total:
                found[ELSEWHERE] += seconds
                continue
            for caller, share in callers.items():
                handed_on[caller] += seconds * share / total
        pending = handed_on
    found[ELSEWHERE] += sum(pending.values())
    return dict(found)


def _read(profiler: cProfile.Profile) -> _Stats:
    raw: Mapping[Function, tuple[int, int, float, float, Mapping[Function, Edge]]]
    raw = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # typeshed leaves it out
    return _Stats(
        {function: entry[2] for function, entry in raw.items()},
        {
            function: {caller: edge[2] for caller, edge in entry[4].items()}
            for function, entry in raw.items()
        },
    )


def _own_name(function: Function) -> str | None:
    """None for what is not the server's."""
    path = Path(function[0])
    if not path.is_relative_to(PACKAGE):
        return None
    return ".".join([*path.relative_to(PACKAGE).with_suffix("").parts, function[2]])
