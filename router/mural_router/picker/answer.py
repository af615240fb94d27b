"""Reads the usage of an answer that passes by, and takes away what only the router asked for."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final

from mural_router.http.errors import BrokenAnswer
from mural_router.proxy.usage import MARK, Usage, UsageReader, find_usage

__all__ = ["AnswerReader"]

MAX_HELD_BYTES: Final = 8 << 20

_END = re.compile(rb"\n\r?\n")
_WITHOUT_CHOICES = re.compile(rb'"choices":\s?\[\]')


class AnswerReader:
    """One answer: what `feed` gives is passed on."""

    def __init__(self, *, events: bool, hide_usage: bool) -> None:
        """``events``: it is a stream of server-sent events."""
        self._reader = UsageReader()
        self._hides = events and hide_usage
        self._held = b""
        """The beginning of an event that may have to be left out."""

    @property
    def usage(self) -> Usage | None:
        """The counts seen so far."""
        return self._reader.usage

    def feed(self, piece: bytes, *, ends: bool) -> bytes:
        """Look at a piece. Raises `BrokenAnswer` for an event that does not end."""
        self._reader.feed(piece)
        if not self._hides:
            return piece
        text = self._held + piece
        *events, rest = _split(text)
        self._held = b"" if ends else rest
        if len(self._held) > MAX_HELD_BYTES:
            raise BrokenAnswer("an event does not end")
        passed = [event for event in events if not _only_usage(event)]
        return b"".join([*passed, rest] if ends else passed)


def _split(text: bytes) -> list[bytes]:
    """Whole events, and what follows the last."""
    cuts = [0, *(match.end() for match in _END.finditer(text)), len(text)]
    return [text[start:end] for start, end in pairwise(cuts)]


def _only_usage(event: bytes) -> bool:
    return (
        MARK in event
        and _WITHOUT_CHOICES.search(event) is not None
        and find_usage(event) is not None
    )
