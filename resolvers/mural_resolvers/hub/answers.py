"""What a hub's answers mean: refusals, commits, trees. No I/O.

The statuses and headers are those of https://huggingface.co/docs/hub/api, as huggingface_hub's
``hf_raise_for_status`` reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple, TypeVar

import msgspec

from mural_resolvers.errors import Forbidden, MuralError, Unavailable, UnusableAdapter, quoted
from mural_resolvers.resolver import SourceFile

__all__ = [
    "COMMIT",
    "Revision",
    "TreeEntry",
    "Unreadable",
    "content_range",
    "parse_revision",
    "parse_tree",
    "refusal",
    "source_file",
    "unique_paths",
]

T = TypeVar("T")

# A hub takes no file above 10 MB without LFS. A blob's sha1 can be checked over the whole only.
MAX_BLOB_BYTES = 16 << 20

_MAX_RETRY_AFTER_S = 3600.0
_RETRY_AFTER_S = 2.0
COMMIT = re.compile(r"[0-9a-f]{40}")

_SHA256 = re.compile(r"[0-9a-f]{64}")
# draft-ietf-httpapi-ratelimit-headers: the seconds until the window begins anew.
_RATE_LIMIT = re.compile(r'"[^"]*"\s*;\s*r=\d+\s*;\s*t=(\d{1,9})')
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)")


class Unreadable(Unavailable):
    """The hub answered something that it should not; the log has what."""


class Revision(msgspec.Struct, frozen=True):
    """The repository as the hub itself writes it, and the commit that a revision is now."""

    id: str
    sha: str


class _LfsPointer(msgspec.Struct, frozen=True):
    oid: str
    size: int


class TreeEntry(msgspec.Struct, frozen=True):
    """A file or a folder of a commit; ``oid`` is git's name of the blob."""

    type: str
    path: str
    oid: str = ""
    size: int = -1
    lfs: _LfsPointer | None = None


class _ContentRange(NamedTuple):
    start: int
    stop: int
    total: int | None


def refusal(
    status: int, headers: Mapping[str, str], *, hidden_is_absent: bool, now: datetime | None = None
) -> MuralError | None:
    """What a status that is no success means: an error, or None for what is absent.

    ``headers`` have lower-case names. ``hidden_is_absent``: a 401 that speaks of no credentials.
    """
    code = headers.get("x-error-code", "")
    if code == "GatedRepo" or status in (403, 451):
        return Forbidden()
    if status == 401:
        # Without a token the hub says this of what is private and of what does not exist.
        return None if hidden_is_absent or code == "RepoNotFound" else Forbidden()
    if status in (404, 410):
        return None
    return Unavailable(
        "The hub asks to come back later." if status == 429 else "The hub cannot answer now.",
        retry_after_s=_retry_after_s(headers, now or datetime.now(UTC)),
    )


def _retry_after_s(headers: Mapping[str, str], now: datetime) -> float:
    """``Retry-After`` as seconds or as a date, or the hub's ``RateLimit``; at most an hour."""
    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        wait_s = float(text[:9])
    elif text:
        wait_s = _seconds_until(text, now)
    else:
        limit = _RATE_LIMIT.search(headers.get("ratelimit", ""))
        wait_s = _RETRY_AFTER_S if limit is None else float(limit[1])
    return min(max(wait_s, 1.0), _MAX_RETRY_AFTER_S)


def _seconds_until(text: str, now: datetime) -> float:
    try:
        then = parsedate_to_datetime(text)
    except ValueError:
        return _RETRY_AFTER_S
    return (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp() - now.timestamp()


def parse_revision(data: bytes) -> Revision:
    """Read a model's description; raise ``Unreadable``."""
    revision = _decoded(data, Revision)
    if COMMIT.fullmatch(revision.sha) is None:
        raise Unreadable("The hub names no commit for the revision.")
    return revision


def parse_tree(data: bytes) -> list[TreeEntry]:
    """Read one page of a folder's listing; raise ``Unreadable``."""
    return _decoded(data, list[TreeEntry])


def source_file(entry: TreeEntry) -> SourceFile:
    """Describe a file: an LFS file by its sha256, a small one by git's sha1 of the blob.

    Raises ``UnusableAdapter`` for a large file without a sha256, ``Unreadable``.
    """
    if entry.lfs is not None:
        if _SHA256.fullmatch(entry.lfs.oid) is None or entry.lfs.size < 0:
            raise Unreadable("The hub lists an LFS file without its sha256 or size.")
        return SourceFile(entry.path, entry.lfs.size, entry.lfs.oid, entry.lfs.oid)
    if COMMIT.fullmatch(entry.oid) is None or entry.size < 0:
        raise Unreadable("The hub lists a file without its sha1 or size.")
    if entry.size > MAX_BLOB_BYTES:
        raise UnusableAdapter(
            f"{quoted(entry.path)} is in the repository without LFS; store it with LFS."
        )
    return SourceFile(entry.path, entry.size, None, entry.oid)


def content_range(text: str) -> _ContentRange:
    """Read ``Content-Range``; raise ``Unreadable``."""
    match = _RANGE.fullmatch(text.strip())
    if match is None:
        raise Unreadable("The hub answers a range without saying which.")
    total = None if match[3] == "*" else int(match[3])
    return _ContentRange(int(match[1]), int(match[2]) + 1, total)


def unique_paths(entries: Iterable[TreeEntry]) -> dict[str, TreeEntry]:
    """The files by path; raise ``Unreadable`` where two have one."""
    found: dict[str, TreeEntry] = {}
    for entry in entries:
        if found.setdefault(entry.path, entry) is not entry:
            raise Unreadable("The hub lists a file twice.")
    return found


def _decoded(data: bytes, type: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=type)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Unreadable("The hub's answer cannot be read.") from None
