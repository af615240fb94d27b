"""Regular expressions that an adapter brings along.

They are hostile: their length is bounded before they come here, and whoever matches them runs
in the loader process, which is killed at its deadline.
"""

from __future__ import annotations

import re
from typing import Generic, TypeVar

from mural_resolvers.errors import UnusableAdapter, quoted

__all__ = ["PatternRules", "compiled"]

V = TypeVar("V")


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern; raise ``UnusableAdapter`` when it is no regular expression."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise UnusableAdapter(
            f"adapter_config.json has {quoted(pattern)}, which is not a regular expression."
        ) from None


class PatternRules(Generic[V]):
    """Ordered (key, value) rules of ``rank_pattern`` or ``alpha_pattern``."""

    def __init__(self, rules: tuple[tuple[str, V], ...]) -> None:
        self._rules = [(compiled(rf"(.*\.)?({key})$"), value) for key, value in rules]

    def first(self, module: str, default: V) -> V:
        """The value of the first key that matches the module, as PEFT's ``get_pattern_key``."""
        for pattern, value in self._rules:
            if pattern.match(module):
                return value
        return default
