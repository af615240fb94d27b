"""Values that the documentation shows are values that the chart takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from tests.charts.chart import CHART, ROOT, Rendered

_BLOCK = re.compile(r"^( *)```yaml[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
KNOWN = set(yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8")))


def shown() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each block of values with the page that it stands on."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", CHART / "README.md"]
    for page in sorted(pages):
        for _, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
            documents = list(yaml.safe_load_all(text))
            found = documents[0] if len(documents) == 1 else None
            if isinstance(found, dict) and is_values(found):
                yield f"{page.name}: {', '.join(found)}", found


def is_values(found: dict[str, Any]) -> bool:
    # A file of tenants has that one name at its top.
    return bool(found.keys() - {"tenants"}) and found.keys() <= KNOWN


BLOCKS = list(shown())


def test_pages_show_values() -> None:
    assert len(BLOCKS) >= 4


@pytest.mark.parametrize(
    "values", [values for _, values in BLOCKS], ids=[where for where, _ in BLOCKS]
)
def test_values_of_a_page_are_taken(
    render: Callable[..., Rendered], values: dict[str, Any]
) -> None:
    assert render(values=values).one("StatefulSet", "mural-server")
