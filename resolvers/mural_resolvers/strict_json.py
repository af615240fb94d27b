"""JSON from people who may mean harm: bounded, no duplicate keys, no NaN, no lone surrogates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

__all__ = ["JsonRefused", "JsonValue", "parse_object"]

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

# One string that never ends, too. Outside of strings the parser reads up to the first escape only.
_ESCAPES = re.compile(rb"\\.?", re.DOTALL)
_STRINGS = re.compile(rb'"[^"]*+"?')
_BRACKETS = re.compile(rb"[\[\]{}]")
_MAX_INT_DIGITS = 19


class JsonRefused(ValueError):
    """The text is not JSON that we read; the message says why and holds none of it."""


def parse_object(data: bytes, *, max_bytes: int, max_depth: int) -> dict[str, JsonValue]:
    """Parse one JSON object in UTF-8; raise ``JsonRefused`` for everything else."""
    if len(data) > max_bytes:
        raise JsonRefused(f"it is larger than {max_bytes} bytes")
    # Depth is bounded before the parser sees it, which would otherwise end in a RecursionError.
    _check_depth(data, max_depth)
    try:
        value: JsonValue = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_no_constant,
            parse_int=_bounded_int,
        )
    except JsonRefused:
        raise
    except UnicodeDecodeError:
        raise JsonRefused("it is not UTF-8") from None
    except ValueError:
        raise JsonRefused("it is not valid JSON") from None
    if not isinstance(value, dict):
        raise JsonRefused("it is not an object")
    if b"\\u" in data:
        _check_encodable(value)
    return value


def _check_depth(data: bytes, max_depth: int) -> None:
    depth = 0
    for bracket in _BRACKETS.finditer(_STRINGS.sub(b"", _ESCAPES.sub(b"", data))):
        depth += 1 if bracket.group() in b"[{" else -1
        if depth > max_depth:
            raise JsonRefused(f"it is nested deeper than {max_depth} levels")


def _unique(pairs: list[tuple[str, JsonValue]]) -> dict[str, JsonValue]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JsonRefused("a key stands twice in one object")
    return found


def _no_constant(name: str) -> JsonValue:
    raise JsonRefused(f"{name} is not JSON")


def _bounded_int(digits: str) -> int:
    if len(digits.lstrip("-")) > _MAX_INT_DIGITS:
        raise JsonRefused(f"an integer has more than {_MAX_INT_DIGITS} digits")
    return int(digits)


def _check_encodable(value: JsonValue) -> None:
    """Refuse lone surrogates: such a string can be neither hashed, logged nor sent."""
    pending: list[JsonValue] = [value]
    while pending:
        item = pending.pop()
        texts: Iterable[str] = ()
        if isinstance(item, str):
            texts = (item,)
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            texts = item.keys()
            pending.extend(item.values())
        for text in texts:
            if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
                raise JsonRefused("a string holds half of a surrogate pair")
