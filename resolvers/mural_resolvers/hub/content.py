"""The bytes of a file out of a response: the window that was asked for, counted and checked."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from mural_resolvers.errors import Conflict, Unavailable
from mural_resolvers.hub.answers import Unreadable, content_range
from mural_resolvers.resolver import SourceFile

if TYPE_CHECKING:
    from mural_resolvers.hub.client import HubResponse

__all__ = ["byte_range", "read_window"]


def byte_range(file: SourceFile, start: int, stop: int) -> tuple[int, int] | None:
    """The range to ask for, or None for the whole.

    A file without a sha256 is read as a whole whatever is wanted of it: the sha1 that git has of
    it is over the whole, and it is small.
    """
    whole = file.sha256 is None or (start, stop) == (0, file.size)
    return None if whole else (start, stop)


async def read_window(
    response: HubResponse, file: SourceFile, start: int, stop: int
) -> AsyncGenerator[bytes, None]:
    """Give ``[start, stop)`` of the file out of a response with status 200 or 206.

    Raises ``Conflict`` for another size, too many bytes or another sha1 than described, which may
    show after the last byte only; ``Unavailable`` where the body breaks off.
    """
    at = _begins_at(response, file, start, stop)
    blob = None if file.sha256 is not None else _blob_hash(file.size)
    end = file.size if blob is not None else stop
    has_more = response.status == 200 and end < file.size
    async with aclosing(response.pieces()) as pieces:
        async for piece in pieces:
            if at + len(piece) > (file.size if response.status == 200 else stop):
                raise Conflict("The hub has more bytes of the file than it described.")
            if blob is not None:
                blob.update(piece)
            wanted = piece[max(start - at, 0) : max(stop - at, 0)]
            at += len(piece)
            if wanted:
                yield wanted
            # Otherwise the body is read to its end, so that the connection can be used again.
            if at >= end and has_more:
                break
    if at < end:
        raise Unavailable("The hub broke off.")
    if blob is not None and blob.hexdigest() != file.tag:
        raise Conflict(f"The hub has other content of {file.path} than it described.")


def _begins_at(response: HubResponse, file: SourceFile, start: int, stop: int) -> int:
    """The offset of the body's first byte; raise where it cannot be what was asked for."""
    headers = response.headers
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Unreadable("The hub sends the file in an encoding that was not asked for.")
    if response.status == 206:
        found = content_range(headers.get("content-range", ""))
        if found.total not in (None, file.size):
            raise Conflict("The hub has another size of the file than it described.")
        if (found.start, found.stop) != (start, stop):
            raise Unreadable("The hub sends another range than was asked for.")
        return start
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) != file.size:
        raise Conflict("The hub has another size of the file than it described.")
    return 0


def _blob_hash(size: int) -> hashlib._Hash:
    """The hash by which git names a blob (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects).

    It finds damage and mix-ups. Whoever can make collisions of sha1 owns the repository anyway:
    the version's own digest is over sha256.
    """
    return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
