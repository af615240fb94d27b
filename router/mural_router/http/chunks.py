"""Chunked bodies (RFC 9112, section 7.1), without extensions and trailers."""

from __future__ import annotations

import re
from typing import Final

__all__ = ["LAST_CHUNK", "ChunkDecoder", "ChunkError", "chunk"]

LAST_CHUNK: Final = b"0\r\n\r\n"

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_START_OF_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}\r?")


class ChunkError(Exception):
    """No proper chunk: an extension, a trailer, a bare LF, a size that is none."""


def chunk(payload: bytes) -> bytes:
    """Frame some bytes, at least one, as a chunk."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


class ChunkDecoder:
    """Follows the framing of one body through pieces that break it anywhere."""

    __slots__ = ("_after", "_left", "_pending", "done", "whole")

    def __init__(self) -> None:
        self._left = 0
        """Bytes of the chunk that are still to come."""
        self._after = False
        """The next two bytes end a chunk, or the body where ``done``'s chunk was the last."""
        self._pending = b""
        self.done = False
        """The body is complete."""
        self.whole = True
        """All that was fed so far are whole chunks."""

    def feed(self, data: bytes) -> tuple[bytes, bytes]:
        """Give the payload in ``data``, and what follows the body's end (not looked at).

        Raises `ChunkError`; the decoder is of no use then.
        """
        if not self.whole:
            return self._walk(data, 0, [])
        # What a server writes at once mostly comes at once: whole chunks and nothing else.
        pieces: list[bytes] = []
        at, end = 0, len(data)
        while at < end:
            match = _SIZE.match(data, at)
            if match is None:
                break
            start = match.end()
            stop = start + int(match[1], 16)
            if stop == start or data[stop : stop + 2] != b"\r\n":
                break
            pieces.append(data[start:stop])
            at = stop + 2
        if at == end:
            return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), b""
        return self._walk(data, at, pieces)

    def _walk(self, data: bytes, at: int, pieces: list[bytes]) -> tuple[bytes, bytes]:
        if self._pending:
            data = self._pending + data
            self._pending = b""
        end = len(data)
        while at < end and not self.done:
            if self._left:
                piece = data[at : at + self._left]
                pieces.append(piece)
                at += len(piece)
                self._left -= len(piece)
                self._after = not self._left
            elif self._after:
                at = self._end_of_chunk(data, at)
            else:
                at = self._size(data, at)
        self.whole = not (self._left or self._after or self._pending)
        return (pieces[0] if len(pieces) == 1 else b"".join(pieces)), data[at:]

    def _end_of_chunk(self, data: bytes, at: int) -> int:
        if data[at : at + 2] == b"\r\n":
            self._after = False
            return at + 2
        if data[at:] != b"\r":
            raise ChunkError("a chunk does not end where its size says")
        self._pending = b"\r"
        return len(data)

    def _size(self, data: bytes, at: int) -> int:
        match = _SIZE.match(data, at)
        if match is None:
            if _START_OF_SIZE.fullmatch(data, at) is None:
                raise ChunkError("a chunk has no proper size")
            self._pending = data[at:]
            return len(data)
        self._left = int(match[1], 16)
        if self._left:
            return match.end()
        return self._end_of_body(data, at, match.end())

    def _end_of_body(self, data: bytes, at: int, end: int) -> int:
        if data[end : end + 2] == b"\r\n":
            self.done = True
            return end + 2
        if data[end:] not in (b"", b"\r"):
            raise ChunkError("a body has trailers")
        self._pending = data[at:]
        return len(data)
