"""The comparison as a table and as a drawing, from the results alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from mural_router.bench.simulator import Result

__all__ = ["figure", "table"]

COLORS = ("#94a3b8", "#64748b", "#f59e0b", "#0f766e")
BAR, GAP, PANEL, LEFT, TOP = 15, 14, 196, 104, 62
"""Height of a bar, the gap between traces, a panel's width, and the margins, in pixels."""


class _Panel(NamedTuple):
    title: str
    value: Callable[[Result], float]
    text: Callable[[float], str]
    most: float | None
    """At the full width; None: the largest value."""


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _seconds(value: float) -> str:
    return f"{1000 * value:.0f} ms" if value < 1 else f"{value:.1f} s"


PANELS = (
    _Panel("adapter in memory", lambda result: result.residency_hits, _percent, 1.0),
    _Panel("prompt tokens cached", lambda result: result.prefix_hits, _percent, 1.0),
    _Panel("first token, median", lambda result: result.ttft_p50_s, _seconds, None),
    _Panel("first token, p99", lambda result: result.ttft_p99_s, _seconds, None),
)


def table(results: Sequence[Result]) -> str:
    """One line a result, in Markdown."""
    lines = [
        "| trace | policy | in memory | prompt tokens cached | largest / mean load "
        "| replicas an adapter | first token p50 | p99 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in results:
        lines.append(
            f"| {each.trace} | {each.policy} | {_percent(each.residency_hits)} "
            f"| {_percent(each.prefix_hits)} | {each.spread:.2f} | {each.homes:.1f} "
            f"| {_seconds(each.ttft_p50_s)} | {_seconds(each.ttft_p99_s)} |"
        )
    return "\n".join(lines)


def figure(results: Sequence[Result]) -> str:
    """An SVG: a panel a measure, a group of bars a trace, a bar a policy."""
    traces = list(dict.fromkeys(result.trace for result in results))
    policies = list(dict.fromkeys(result.policy for result in results))
    height = TOP + len(traces) * (len(policies) * BAR + GAP) + 8
    width = LEFT + len(PANELS) * PANEL
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" role="img" '
        'aria-label="Placement policies compared on replayed traces">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for i, policy in enumerate(policies):
        x = LEFT + i * 150
        parts.append(f'<rect x="{x}" y="10" width="11" height="11" fill="{COLORS[i]}"/>')
        parts.append(_text(x + 16, 20, policy))
    for i, trace in enumerate(traces):
        y = TOP + i * (len(policies) * BAR + GAP) + len(policies) * BAR / 2 + 4
        parts.append(_text(8, y, trace, weight=600))
    for i, panel in enumerate(PANELS):
        parts += _panel(panel, LEFT + i * PANEL, results, traces, policies)
    return "\n".join([*parts, "</svg>\n"])


def _panel(
    panel: _Panel, x: int, results: Sequence[Result], traces: list[str], policies: list[str]
) -> list[str]:
    most = panel.most or max(panel.value(result) for result in results)
    parts = [_text(x, TOP - 14, panel.title, weight=600)]
    for result in results:
        group, bar = traces.index(result.trace), policies.index(result.policy)
        y = TOP + group * (len(policies) * BAR + GAP) + bar * BAR
        value = panel.value(result)
        wide = max(1.0, value / most * (PANEL - 64))
        parts.append(
            f'<rect x="{x}" y="{y}" width="{wide:.1f}" height="{BAR - 2}" fill="{COLORS[bar]}"/>'
        )
        parts.append(_text(x + wide + 4, y + BAR - 4, panel.text(value)))
    return parts


def _text(x: float, y: float, text: str, weight: int = 400) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" fill="#0f172a" font-weight="{weight}">{escape(text)}</text>'
    )
