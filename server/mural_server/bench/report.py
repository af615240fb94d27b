"""Reports as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from mural_server.bench.four_groups import Figures, FourGroupsReport
from mural_server.bench.loads import LoadsReport
from mural_server.bench.profile import ProfileReport
from mural_server.bench.slots import SlotsReport
from mural_server.bench.timing import Latency

__all__ = ["show_four_groups", "show_loads", "show_profile", "show_slots"]

SMALLEST_SHARE = 0.005
MIN_WIDTH = 120
"""Where there is no terminal the tables must not be cut."""


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=MIN_WIDTH)


def show_four_groups(report: FourGroupsReport) -> None:
    """Print the conditions and one row per group and way."""
    console = _console()
    for line in report.conditions:
        console.print(f"· {line}", highlight=False, markup=False)
    table = _table(
        "Four groups",
        ["group", "where"],
        ["tokens/s", "× PEFT", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "prefix hits", "cold"],
    )
    last = None
    for figures in report.figures:
        if last not in (None, figures.group):
            table.add_section()
        last = figures.group
        table.add_row(*_figures_row(figures))
    console.print(table)


def _figures_row(figures: Figures) -> list[str]:
    ratio = figures.ratio_to_peft
    return [
        figures.group,
        figures.where,
        f"{figures.tokens_per_s:.0f}",
        "–" if ratio is None else f"{ratio:.2f}",
        *_percentiles(figures.first_token),
        *_percentiles(figures.inter_token),
        _count(figures.prefix_hits),
        _count(figures.cold_adapters),
    ]


def show_loads(report: LoadsReport) -> None:
    """Print decode steps without loads beside those with."""
    table = _table(
        "Decode steps while adapters load",
        ["batch", "beside"],
        ["steps", "p50 ms", "p99", "max", "p99 ratio"],
    )
    for batch in report.batches:
        table.add_row(batch.batch, "nothing", *_spread(batch.quiet), "")
        beside = f"{batch.loads} loads of {batch.load.p50_ms:.0f} ms"
        table.add_row(batch.batch, beside, *_spread(batch.loading), f"{batch.p99_ratio:.2f}")
    console = _console()
    console.print(table)
    console.print(f"· {report.loader}", highlight=False)


def show_slots(report: SlotsReport) -> None:
    """Print TTFT at as many adapters as slots and at twice as many."""
    table = _table(
        f"{report.clients} clients, {report.slots} slots",
        ["arrival", "adapters"],
        ["tokens/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "TTFT p50 ratio"],
    )
    for case in report.cases:
        ratio = report.first_token_ratio(case.arrival) if case.adapters > report.slots else None
        table.add_row(
            case.arrival,
            str(case.adapters),
            f"{case.tokens_per_s:.0f}",
            *_percentiles(case.first_token),
            *_percentiles(case.inter_token),
            "" if ratio is None else f"{ratio:.2f}",
        )
    _console().print(table)


def show_profile(report: ProfileReport) -> None:
    """Print each batch's decode step by function."""
    console = _console()
    for step in report.steps:
        table = _table(
            f"Decode step, {step.batch}: {step.plain.p50_ms:.1f} ms (p50), "
            f"{step.profiled_ms:.1f} ms under the profiler",
            ["function, with the libraries under it"],
            ["ms", "share"],
        )
        for part in step.parts:
            share = part.ms / step.profiled_ms
            if share >= SMALLEST_SHARE:
                table.add_row(part.function, f"{part.ms:.2f}", f"{share:.0%}")
        console.print(table)


def _table(title: str, texts: list[str], numbers: list[str]) -> Table:
    table = Table(title=title, title_justify="left", min_width=len(title))
    for text in texts:
        table.add_column(text)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _percentiles(found: Latency) -> tuple[str, str]:
    return f"{found.p50_ms:.1f}", f"{found.p99_ms:.1f}"


def _spread(found: Latency) -> tuple[str, str, str, str]:
    return str(found.count), *_percentiles(found), f"{found.max_ms:.1f}"


def _count(value: int | None) -> str:
    return "–" if value is None else str(value)
