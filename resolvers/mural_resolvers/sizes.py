"""Sizes as people write them: ``512``, ``512Mi``, ``2G``."""

from __future__ import annotations

import argparse
import re
from typing import Final

from mural_resolvers.errors import InvalidInput, quoted

__all__ = ["parse_size", "size_argument"]

_SIZE = re.compile(r"([0-9]{1,18})([kmgt]?)(i?)b?", re.IGNORECASE)
_POWER: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Give the bytes that a text means; raise ``InvalidInput`` when it means none."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise InvalidInput(f"{quoted(text)} is no size: write it as 536870912 or 512Mi.")
    step = 1024 if match[3] else 1000
    size: int = int(match[1]) * step ** _POWER[match[2].lower()]
    return size


def size_argument(text: str) -> int:
    """`parse_size` as the ``type`` of a command's flag."""
    try:
        return parse_size(text)
    except InvalidInput as error:
        raise argparse.ArgumentTypeError(error.message) from None
