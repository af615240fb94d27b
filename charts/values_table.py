"""Write the tables of the chart's values: charts/mural/README.md, docs/reference/chart-values.md.

``python charts/values_table.py`` writes them of the comments in values.yaml; ``--check`` fails
(exit status 1) if one of them says something else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

CHARTS = Path(__file__).resolve().parent
VALUES = CHARTS / "mural" / "values.yaml"
README = CHARTS / "mural" / "README.md"
PAGE = CHARTS.parent / "docs" / "reference" / "chart-values.md"
BEGIN, END = "<!-- values: made by charts/values_table.py -->", "<!-- end of values -->"
INDENT = 2
# Kubernetes' own objects: one row each, with what stands below as their default.
WHOLE = {"resources", "labels", "podSecurityContext", "containerSecurityContext"}


class Value(NamedTuple):
    """One row: the path of a value, the text above it, and its default (None: a group)."""

    path: tuple[str, ...]
    text: str
    default: str | None

    @property
    def name(self) -> str:
        return ".".join(self.path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args(argv).check
    stale = []
    for path, text in pages().items():
        if check and (not path.exists() or path.read_text(encoding="utf-8") != text):
            stale.append(path)
        elif not check:
            path.write_text(text, encoding="utf-8")
    for path in stale:
        print(f"{path} is stale: run charts/values_table.py", file=sys.stderr)
    return 1 if stale else 0


def pages() -> dict[Path, str]:
    """Both files as they should be. The README is kept outside of its marks."""
    values = list(read_values())
    readme = README.read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    page = "\n".join([*_page_head(), *_sections(values)])
    return {README: f"{before}{BEGIN}\n\n{_table(values)}\n{END}{after}", PAGE: page}


def read_values() -> Iterator[Value]:
    """Every value of values.yaml, groups included, in the order of the file.

    Raises ValueError for one without a comment above it, or below what is one row.
    """
    lines = VALUES.read_text(encoding="utf-8").splitlines()
    defaults = yaml.safe_load("\n".join(lines))
    path: list[str] = []
    comment: list[str] = []
    whole: int | None = None
    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        depth = (len(line) - len(line.lstrip())) // INDENT
        if not stripped:
            comment = []
        elif stripped.startswith("#"):
            comment.append(stripped.lstrip("# "))
        elif whole is None or depth <= whole:
            name = stripped.partition(":")[0]
            path = [*path[:depth], name]
            if not comment:
                raise ValueError(f"values.yaml, line {number}: {'.'.join(path)} has no comment")
            default = defaults
            for step in path:
                default = default[step]
            group = isinstance(default, dict) and bool(default) and name not in WHOLE
            whole = None if group else depth
            yield Value(tuple(path), " ".join(comment), None if group else _shown(default))
            comment = []


def _shown(default: object) -> str:
    return f"`{json.dumps(default, ensure_ascii=False)}`"


def _table(values: Sequence[Value]) -> str:
    rows = ["| Value | Default | Meaning |", "| --- | --- | --- |"]
    for value in values:
        if value.default is not None:
            rows.append(f"| `{value.name}` | {_cell(value.default)} | {_cell(value.text)} |")
    return "\n".join(rows) + "\n"


def _page_head() -> Iterator[str]:
    yield "<!-- Written by charts/values_table.py; change charts/mural/values.yaml instead. -->\n"
    yield "# Values of the chart\n"
    yield (
        "`helm install mural charts/mural -f my-values.yaml`; "
        "[Install on Kubernetes](../how-to/install-on-kubernetes.md) says how to go about it. "
        "`charts/mural/values.schema.json` holds values to their types and refuses a name that "
        "does not exist; combinations that cannot work are refused with a sentence.\n"
    )


def _sections(values: Sequence[Value]) -> Iterator[str]:
    """A section for each group at the top; single values first."""
    single = [value for value in values if len(value.path) == 1 and value.default is not None]
    yield "## Single values\n"
    yield _table(single)
    for group in values:
        if len(group.path) == 1 and group.default is None:
            inside = [value for value in values if value.path[0] == group.name]
            yield f"## `{group.name}`\n\n{group.text}\n"
            yield _table(inside)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
