"""Finds the token counts in an answer without parsing the rest of it.

The counts stand in ``"usage":{…}`` near an answer's end. What a model generated cannot look like
it: inside a JSON string every quote is escaped.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["MARK", "Usage", "UsageReader", "find_usage"]

MARK: Final = b'"prompt_tokens":'
"""Stands in every usage object."""

_PROMPT = re.compile(rb'"prompt_tokens":\s?([0-9]{1,9})(?![0-9])')
_COMPLETION = re.compile(rb'"completion_tokens":\s?([0-9]{1,9})(?![0-9])')
_START: Final = b'"usage":'
_KEPT_BYTES: Final = 512

Usage = tuple[int, int]
"""Prompt tokens and generated tokens."""


def find_usage(text: bytes) -> Usage | None:
    """The counts of the last usage object in ``text``; None: there is none."""
    start = text.rfind(_START, 0, text.rfind(MARK))
    if start < 0:
        return None
    prompt = _PROMPT.search(text, start)
    if prompt is None:
        return None
    completion = _COMPLETION.search(text, start)
    return int(prompt[1]), int(completion[1]) if completion else 0


class UsageReader:
    """Reads the counts of a JSON answer that comes in pieces."""

    __slots__ = ("_before", "usage")

    def __init__(self) -> None:
        self._before = b""
        self.usage: Usage | None = None

    def feed(self, payload: bytes) -> None:
        """Look at the next piece, and at what lies across its border with the one before."""
        text = self._before + payload if self._before else payload
        found = find_usage(text)
        if found is not None:
            self.usage = found
        self._before = text[-_KEPT_BYTES:]
