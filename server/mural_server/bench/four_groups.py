"""Base, one adapter, several mixed, and churn: in-process, over HTTP, and PEFT beside them."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import Literal

import msgspec

from mural_server.bench.contender import Contender, Remote
from mural_server.bench.setup import GROUPS, Group, Setup, group_jobs, settling_jobs
from mural_server.bench.timing import (
    Latency,
    Sample,
    first_token_times,
    inter_token_times,
    latency,
)

__all__ = ["Figures", "FourGroupsReport", "Where", "measure_four_groups"]

Where = Literal["in-process", "http", "peft"]
PEFT_GROUPS: frozenset[Group] = frozenset({"base", "one", "mixed"})
WARM_UP = -1
"""The turn whose prompts no round has."""

Say = Callable[[str], None]
Start = Callable[[Where, Setup], Contender]


class Figures(msgspec.Struct, kw_only=True):
    """One group, measured in one way."""

    group: Group
    where: Where
    tokens_per_s: float
    """Output tokens over the whole time of a round; the median of the rounds."""
    tokens_per_s_by_round: list[float]
    ratio_to_peft: float | None
    """The median of the rounds' ratios: the two of a round ran right after one another."""
    first_token: Latency
    """Of all rounds' requests together, as is the next."""
    inter_token: Latency
    requests: int
    output_tokens: int
    prefix_hits: int | None
    cold_adapters: int | None
    """Summed over the rounds: distinct adapters that had to be loaded."""


class FourGroupsReport(msgspec.Struct, kw_only=True):
    setup: Setup
    conditions: list[str]
    """What was chosen, and what else a reader must know."""
    figures: list[Figures]


def measure_four_groups(
    setup: Setup,
    wheres: Sequence[Where],
    say: Say,
    start: Start | None = None,
) -> FourGroupsReport:
    """Run every group in every way, round by round, one at a time.

    ``say`` is told what is being done; ``start`` makes the contenders, by default in processes of
    their own. Raises `BenchError` for an answer that is not whole, and
    for a cache that is not as it must be after a group.
    """
    with ExitStack() as held:
        contenders: dict[Where, Contender] = {}
        conditions = _conditions(setup)
        for where in wheres:
            say(f"starting {where}")
            contenders[where] = (start or start_contender)(where, setup)
            held.callback(contenders[where].close)
            conditions += contenders[where].start(group_jobs(setup, "mixed", WARM_UP))
        samples: dict[tuple[Group, Where], list[Sample]] = {}
        for turn in range(setup.sizes.rounds):
            for group in GROUPS:
                say(f"round {turn + 1} of {setup.sizes.rounds}: {group}")
                for where in _order(wheres, turn):
                    if where != "peft" or group in PEFT_GROUPS:
                        sample = _round(contenders[where], setup, group, turn)
                        samples.setdefault((group, where), []).append(sample)
    figures = [
        _figures(group, where, samples)
        for group in GROUPS
        for where in wheres
        if (group, where) in samples
    ]
    return FourGroupsReport(setup=setup, conditions=conditions, figures=figures)


def start_contender(where: Where, setup: Setup) -> Contender:
    """Start one where nothing that it does to its process touches the others."""
    match where:
        case "in-process":
            from mural_server.bench.in_process import InProcess

            return Remote(InProcess, setup)
        case "http":
            from mural_server.bench.over_http import OverHTTP

            return OverHTTP(setup)
        case "peft":
            from mural_server.bench.peft_baseline import PeftBaseline

            return Remote(PeftBaseline, setup)


def _order(wheres: Sequence[Where], turn: int) -> list[Where]:
    """Another one first in each round."""
    first = turn % len(wheres)
    return [*wheres[first:], *wheres[:first]]


def _round(contender: Contender, setup: Setup, group: Group, turn: int) -> Sample:
    jobs = group_jobs(setup, group, turn)
    # Churn is about adapters that are not there.
    settling = group_jobs(setup, "base", WARM_UP - turn) if group == "churn" else jobs
    contender.settle(settling_jobs(setup, settling, turn))
    sample = contender.run(jobs)
    contender.check()
    return sample


def _figures(
    group: Group, where: Where, samples: Mapping[tuple[Group, Where], list[Sample]]
) -> Figures:
    own = samples[group, where]
    rates = [sample.tokens_per_s for sample in own]
    peft = [sample.tokens_per_s for sample in samples.get((group, "peft"), [])]
    ratios = [rate / theirs for rate, theirs in zip(rates, peft, strict=False)]
    return Figures(
        group=group,
        where=where,
        tokens_per_s=statistics.median(rates),
        tokens_per_s_by_round=rates,
        ratio_to_peft=statistics.median(ratios) if ratios else None,
        first_token=latency(first_token_times(own)),
        inter_token=latency(inter_token_times(own)),
        requests=sum(len(sample.requests) for sample in own),
        output_tokens=sum(sample.output_tokens for sample in own),
        prefix_hits=_sum([sample.prefix_hits for sample in own]),
        cold_adapters=_sum([sample.cold_adapters for sample in own]),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _conditions(setup: Setup) -> list[str]:
    sizes = setup.sizes
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "peft"))
    return [
        f"{sizes.concurrency} requests at once, {sizes.prompt_tokens} prompt and "
        f"{sizes.output_tokens} output tokens each, greedy; {setup.dtype}, {setup.threads} "
        f"threads; {sizes.rounds} rounds, interleaved",
        f"adapters of rank {sizes.rank} on all seven linears: one; {sizes.slots} mixed; churn: "
        f"{sizes.churn_adapters} over {sizes.slots} slots and {sizes.host_adapters} places in "
        "host memory",
        "prompts are random and never come twice, so the prefix cache cannot help: PEFT has none",
        f"Python {platform.python_version()}, {packages}",
    ]
