"""Typed access to the untyped keys of ``adapter_config.json``."""

from __future__ import annotations

import math
from typing import NoReturn

from mural_resolvers.errors import UnusableAdapter
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.strict_json import JsonValue

__all__ = ["Fields"]

_MAX_RANK = 1 << 16
_MAX_MAGNITUDE = 1e9


class Fields:
    """Reads each key as its type and remembers which were read; null means absent, but for numbers.

    Every method raises ``UnusableAdapter`` naming the key whose value has another form.
    """

    def __init__(self, raw: dict[str, JsonValue], limits: AdapterLimits) -> None:
        self._raw = raw
        self._limits = limits
        self._read: set[str] = set()

    def unread(self, known: frozenset[str]) -> list[str]:
        """The keys that were neither read nor are ``known``."""
        return [key for key in self._raw if key not in self._read and key not in known]

    def _get(self, key: str) -> JsonValue:
        self._read.add(key)
        return self._raw.get(key)

    def flag(self, key: str) -> bool:
        """A boolean, false by default."""
        value = self._get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            self._refuse(key, "true or false")
        return value

    def text(self, key: str) -> str | None:
        """A string of bounded length, or None."""
        value = self._get(key)
        if value is None:
            return None
        if not isinstance(value, str) or len(value) > self._limits.max_pattern_chars:
            self._refuse(key, "a string of ordinary length")
        return value

    def flag_or_text(self, key: str, default: bool) -> bool | str:
        """A boolean or a string."""
        value = self._get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        return self.text(key) or default

    def rank(self, key: str, default: int) -> int:
        """A positive integer; null is none, which PEFT cannot calculate with either."""
        return self._rank(key, self._get(key)) if key in self._raw else default

    def number(self, key: str, default: float) -> float:
        """A finite number; null is none."""
        return self._number(key, self._get(key)) if key in self._raw else default

    def names_or_regex(self, key: str) -> tuple[str, ...] | str:
        """A list of module names, or a regular expression."""
        value = self._get(key)
        return self._pattern(key, value) if isinstance(value, str) else self._texts(key, value)

    def patterns(self, key: str) -> tuple[str, ...]:
        """A list of strings, or one string for a list of one."""
        value = self._get(key)
        if isinstance(value, str):
            return (self._pattern(key, value),) if value else ()
        texts = self._texts(key, value)
        if len(texts) > self._limits.max_patterns:
            self._refuse(key, f"at most {self._limits.max_patterns} entries")
        return texts

    def layer_indices(self, key: str) -> tuple[int, ...]:
        """A list of layer numbers, or one."""
        value = self._get(key)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        indices = tuple(n for n in items if isinstance(n, int) and not isinstance(n, bool))
        if len(indices) != len(items) or len(items) > self._limits.max_patterns:
            self._refuse(key, "a layer number or a list of them")
        return indices

    def rank_pattern(self, key: str) -> tuple[tuple[str, int], ...]:
        """A map from pattern to positive integer, in the file's order."""
        return tuple((name, self._rank(key, value)) for name, value in self._rules(key))

    def number_pattern(self, key: str) -> tuple[tuple[str, float], ...]:
        """A map from pattern to finite number, in the file's order."""
        return tuple((name, self._number(key, value)) for name, value in self._rules(key))

    def _rules(self, key: str) -> list[tuple[str, JsonValue]]:
        value = self._get(key)
        if value is None:
            return []
        if not isinstance(value, dict):
            self._refuse(key, "a map")
        if len(value) > self._limits.max_patterns:
            self._refuse(key, f"at most {self._limits.max_patterns} entries")
        return [(self._pattern(key, name), item) for name, item in value.items()]

    def _texts(self, key: str, value: JsonValue) -> tuple[str, ...]:
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > self._limits.max_targets:
            self._refuse(key, f"a string or a list of at most {self._limits.max_targets}")
        return tuple(self._pattern(key, item) for item in value)

    def _pattern(self, key: str, value: JsonValue) -> str:
        if not isinstance(value, str) or len(value) > self._limits.max_pattern_chars:
            self._refuse(key, f"strings of at most {self._limits.max_pattern_chars} characters")
        return value

    def _rank(self, key: str, value: JsonValue) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_RANK:
            self._refuse(key, f"an integer from 1 to {_MAX_RANK}")
        return value

    def _number(self, key: str, value: JsonValue) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            self._refuse(key, "a number")
        if not math.isfinite(value) or abs(value) > _MAX_MAGNITUDE:
            self._refuse(key, f"a finite number of at most {_MAX_MAGNITUDE:g}")
        return float(value)

    def _refuse(self, key: str, wanted: str) -> NoReturn:
        raise UnusableAdapter(f"adapter_config.json cannot be read: {key} takes {wanted}.")
