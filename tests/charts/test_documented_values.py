"""The values that pages print are ones that the chart takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.chart import CHART, ROOT, Rendered

_BLOCK = re.compile(r"^( *)```ya?ml[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
KNOWN = frozenset(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def printed() -> Iterator[tuple[str, dict[str, Any]]]:
    """YAML of pages about Kubernetes that has names of values."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        if "charts/mural" not in text and "kubectl" not in text:
            continue
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            for value in yaml.safe_load_all(block[2]):
                if isinstance(value, dict) and value.keys() & KNOWN:
                    yield f"{page.relative_to(ROOT)}:{line}", value


VALUES = list(printed())


def test_pages_print_values() -> None:
    pages = {Path(where.partition(":")[0]).name for where, _ in VALUES}
    assert pages >= {"install-on-kubernetes.md", "on-kubernetes.md", "vllm-pods.md"}


@pytest.mark.parametrize(("where", "values"), VALUES, ids=[where for where, _ in VALUES])
def test_printed_values_are_taken(
    where: str, values: dict[str, Any], render: Callable[..., Rendered]
) -> None:
    assert render(values=values).of("StatefulSet")
