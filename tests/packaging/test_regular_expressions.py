"""Python 3.11.0 to 3.11.4, which some distributions ship, match possessive groups wrongly.

https://github.com/python/cpython/issues/106052: a group that gives nothing back fails where it
should match, if what it repeats can be matched in several ways.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("resolvers", "server", "router", "operator")


CLASS = re.compile(r"\[(?:\\.|[^\]\\])*\]")
POSSESSIVE = re.compile(r"(?<!\\)\)(?:[*+?]|\{[0-9,]+\})\+|\(\?>")


def test_such_groups_are_found_here() -> None:
    assert POSSESSIVE.search(CLASS.sub("c", r'rb"((?:a[()*+]++b)*+)"'))
    assert not POSSESSIVE.search(CLASS.sub("c", r'rb"((?:a[()*+]++b)*) [)*+\]]++"'))


def test_no_group_is_possessive_or_atomic() -> None:
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert len(sources) > 200
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources
        for line in path.read_text(encoding="utf-8").splitlines()
        if "re.compile" in line or 'rb"' in line or "rb'" in line or 'r"' in line
        if POSSESSIVE.search(CLASS.sub("c", line))
    ]
    assert not found
