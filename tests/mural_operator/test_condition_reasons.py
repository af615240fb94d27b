"""Every reason that the operator can give is explained, and none that it cannot."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/conditions.md"
JUDGES = [
    *(
        ROOT / f"operator/mural_operator/{name}.py"
        for name in ("alias_verdict", "judge", "pool_verdict", "tenancy", "verdict")
    ),
    ROOT / "resolvers/mural_resolvers/kubernetes/aliases.py",
]
# Which argument of a call is a reason.
REASON_AT = {"Condition": 2, "Rejected": 0, "RefusedAlias": 0, "_BadKey": 0}
_ROW = re.compile(r"^\| (`[A-Z][^|]*`) \| `(\w+)` \|", re.MULTILINE)


def texts(node: ast.expr | None) -> Iterator[str]:
    """The texts that an expression may be, as far as they stand in it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from texts(node.body)
        yield from texts(node.orelse)
    elif isinstance(node, ast.Subscript):
        # Literal["A", "B"]
        for each in node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]:
            yield from texts(each)


def reasons_in(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            at = REASON_AT.get(node.func.id)
            if at is not None and len(node.args) > at:
                yield from texts(node.args[at])
        elif isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "reason" for target in node.targets
        ):
            yield from texts(node.value)
        elif (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and node.target.id == "reason"
        ):
            yield from texts(node.annotation)


def explained() -> set[str]:
    return {reason for _, reason in _ROW.findall(PAGE.read_text(encoding="utf-8"))}


def test_the_page_explains_the_reasons_that_there_are() -> None:
    given = {reason for path in JUDGES for reason in reasons_in(path)}
    assert len(given) > 30
    assert given == explained()


def test_the_page_names_the_conditions_that_there_are() -> None:
    kinds = set()
    for path in JUDGES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id == "Condition"
                and node.args
            ):
                kinds |= set(texts(node.args[0]))
    named = {
        kind
        for kinds_of_row, _ in _ROW.findall(PAGE.read_text(encoding="utf-8"))
        for kind in re.findall(r"`(\w+)`", kinds_of_row)
    }
    assert named == kinds
