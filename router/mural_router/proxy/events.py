"""Passes server-sent events on in whole ones, so that a stream can end with an error at any time.

Almost always a replica's write arrives as one whole chunk of whole events without a usage: then its
bytes go on as they came. Only what is broken apart, or tells the usage, is framed anew.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from mural_resolvers.errors import ErrorBody, MuralError, error_body
from mural_router.http.chunks import LAST_CHUNK, chunk
from mural_router.http.errors import BrokenAnswer
from mural_router.proxy.usage import MARK, Usage, find_usage

__all__ = ["EventRelay", "error_event"]

MAX_EVENT_BYTES: Final = 8 << 20
_ENDS: Final = (b"\n\n", b"\n\r\n")
_END = re.compile(rb"\n\r?\n")
_WITHOUT_CHOICES = re.compile(rb'"choices":\s?\[\]')


def error_event(error: MuralError) -> bytes:
    """The event that ends a stream which broke, and its last chunk."""
    body: ErrorBody = error_body(error)
    return chunk(b"data: " + msgspec.json.encode(body) + b"\n\n") + LAST_CHUNK


class EventRelay:
    """One stream. What `feed` and `end` give is to be sent."""

    __slots__ = ("_hide_usage", "held", "usage")

    def __init__(self, *, hide_usage: bool) -> None:
        self.held = b""
        """The beginning of an event whose end has not come."""
        self._hide_usage = hide_usage
        self.usage: Usage | None = None

    def feed(self, raw: bytes, payload: bytes, whole: bool) -> bytes:
        """Take a piece of the answer, and give what can be sent, framed.

        ``raw`` with the body's last chunk in it is never given as it came: `end` sends that.
        Raises `BrokenAnswer` for an event that does not end.
        """
        if whole and not self.held and payload.endswith(_ENDS) and MARK not in payload:
            # An end before the last chunk cannot look like the last chunk: \n stands before it.
            return raw[: -len(LAST_CHUNK)] if raw.endswith(LAST_CHUNK) else raw
        return self._reframed(payload)

    def end(self) -> bytes:
        """The answer is complete: what was held, and the last chunk."""
        held, self.held = self.held, b""
        return chunk(held) + LAST_CHUNK if held else LAST_CHUNK

    def _reframed(self, payload: bytes) -> bytes:
        text = self.held + payload
        cut = max(text.rfind(end) + len(end) if end in text else 0 for end in _ENDS)
        self.held = text[cut:]
        if len(self.held) > MAX_EVENT_BYTES:
            raise BrokenAnswer("an event does not end")
        events = text[:cut]
        if MARK in events:
            events = self._read_usage(events)
        return chunk(events) if events else b""

    def _read_usage(self, events: bytes) -> bytes:
        """Note the usage, and take away the event that was asked for by the router alone."""
        kept: list[bytes] = []
        begun, at = 0, events.find(MARK)
        while at >= 0:
            start = _last_end(events, begun, at)
            end = _END.search(events, at)
            stop = end.end() if end is not None else len(events)
            event = events[start:stop]
            self.usage = find_usage(event) or self.usage
            if self._hide_usage and _WITHOUT_CHOICES.search(event):
                kept.append(events[begun:start])
                begun = stop
            at = events.find(MARK, stop)
        kept.append(events[begun:])
        return b"".join(kept)


def _last_end(events: bytes, begin: int, at: int) -> int:
    """Where the event at a place begins: after the last end before it."""
    found = begin
    for end in _ENDS:
        place = events.rfind(end, begin, at)
        if place >= 0:
            found = max(found, place + len(end))
    return found
