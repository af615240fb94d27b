"""How replicas are written in settings: an address, then ``,key=value`` options."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from urllib.parse import SplitResult

from mural_router.fleet.endpoint import Engine

__all__ = ["read_engine", "read_port", "read_weight", "split_options", "url_port"]


def split_options(text: str, allowed: Collection[str]) -> tuple[str, Mapping[str, str]]:
    """The address and its options, each of the allowed ones at most once; or ValueError."""
    address, *pairs = text.split(",")
    options: dict[str, str] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in allowed or not value or key in options:
            raise ValueError(f"{text!r}: {pair!r} is none of {', '.join(allowed)}=…, each once")
        options[key] = value
    return address, options


def read_engine(text: str, value: str) -> Engine:
    """``mural`` or ``vllm``; ``text`` is what an error shows."""
    if value == "mural":
        return "mural"
    if value == "vllm":
        return "vllm"
    raise ValueError(f"{text!r}: the engine is mural or vllm")


def read_port(text: str, value: str) -> int:
    """From 1 to 65535."""
    if not value.isascii() or not value.isdecimal() or not 0 < int(value[:6]) < 1 << 16:
        raise ValueError(f"{text!r}: {value[:20]!r} is not a port")
    return int(value)


def url_port(text: str, parts: SplitResult) -> int | None:
    """Of an address; None: it names none."""
    try:
        return parts.port
    except ValueError:
        raise ValueError(f"{text!r}: a port is a number up to 65535") from None


def read_weight(text: str, value: str) -> float:
    """Above 0."""
    try:
        weight = float(value)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(f"{text!r}: the weight is a number above 0")
    return weight
