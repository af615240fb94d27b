"""Heads of requests and answers, by the grammar of RFC 9112 without its leniences.

One expression says what a head is, so that nothing is accepted which it does not say: every line
ends with CRLF, no line is folded, no name is followed by a space, no control byte lies anywhere.
What another reader could frame in another way (RFC 9112, section 6.3 and 11.2) is refused rather
than repaired: a repeated or odd length, a length beside a coding, any coding but ``chunked``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

import msgspec

from mural_router.http.errors import (
    BadRequest,
    BrokenAnswer,
    ExpectationFailed,
    HeadTooLarge,
    UnsupportedCoding,
    VersionNotSupported,
)

__all__ = [
    "END",
    "Field",
    "RequestHead",
    "ResponseHead",
    "parse_request_head",
    "parse_response_head",
    "refuse_hopeless",
]

END: Final = b"\r\n\r\n"

Field = tuple[bytes, bytes]
"""A field's name in lower case and its value without the white space around it."""

# Possessive, so that a head that does not match is refused after one pass over it; but for the
# group, which has nothing to give back, since Python 3.11.0 to 3.11.4 match such groups wrongly.
_FIELDS = rb"((?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+)*)\r\n\r\n"
_REQUEST = re.compile(
    rb"([A-Z]{1,16}) ([!$%&'()*+,\-./0-9:;=?@A-Z\[\]_a-z~]++) HTTP/1\.([01])" + _FIELDS
)
_RESPONSE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [\t\x20-\x7e\x80-\xff]*+)?" + _FIELDS)
_OTHER_VERSION = re.compile(rb"[A-Z]+ [\x21-\x7e]+ HTTP/(?!1\.[01]\r)[0-9]+(?:\.[0-9]+)?\r\n")
_FIELD = re.compile(rb"\r\n([^:]++):[\t ]*+([^\r]*+)")
_HOST = re.compile(rb"(?:[a-z0-9._~\-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_ABSOLUTE = re.compile(rb"https?://([^/?]+)(/.*)", re.IGNORECASE)
_LENGTH = re.compile(rb"[0-9]{1,15}")
_CONNECTION_OPTIONS: Final = {b"close", b"keep-alive", b"te", b"upgrade", b"http2-settings", b""}


_ONCE: Final = {
    b"host": "Host",
    b"content-length": "Content-Length",
    b"transfer-encoding": "Transfer-Encoding",
}
"""What frames a request, or says for whom it is."""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """A head's fields."""

    lines: bytes
    """As they came, each after a CRLF."""
    named: dict[bytes, bytes]
    """Values by lower-case name, white space after them included; of a repeated one the last."""
    repeats: bool
    """Whether a name stands there more than once."""

    @property
    def fields(self) -> list[Field]:
        """All of them, in order."""
        found = _FIELD.findall(self.lines)
        return [(name.lower(), value.rstrip(b" \t")) for name, value in found]

    def values(self, name: bytes) -> tuple[bytes, ...]:
        """Every value of a field, by its lower-case name."""
        if self.repeats:
            return tuple(value for each, value in self.fields if each == name)
        value = self.named.get(name)
        return () if value is None else (value.rstrip(b" \t"),)


class RequestHead(_Head, frozen=True, kw_only=True):
    """A request's head. A body follows if ``chunked`` or ``length``."""

    method: str
    path: str
    """Of the target; begins with a slash; as it was sent (not decoded)."""
    query: str
    """Without the question mark."""
    minor: int
    """1 for HTTP/1.1, 0 for 1.0."""
    length: int
    """Of the body, 0 if it has none or is chunked."""
    chunked: bool
    keep: bool
    """Whether the client would send another request on this connection."""
    expects_continue: bool


class ResponseHead(_Head, frozen=True, kw_only=True):
    """An answer's head. Its body has ``length`` bytes, or is chunked when that is None."""

    status: int
    length: int | None
    keep: bool
    """Whether the replica keeps the connection."""

    def value(self, name: bytes) -> bytes | None:
        """The first value of a field, by its lower-case name."""
        found = self.values(name)
        return found[0] if found else None


def parse_request_head(head: bytes, max_fields: int) -> RequestHead:
    """Read a head up to and with the empty line. Raises the errors of `http.errors`."""
    match = _REQUEST.fullmatch(head)
    if match is None:
        if _OTHER_VERSION.match(head):
            raise VersionNotSupported("This server speaks HTTP/1.1.")
        raise BadRequest("The request's head is not proper HTTP/1.1.")
    method, target, minor, lines = match.groups()
    fields: list[Field] = _FIELD.findall(lines)
    if len(fields) > max_fields:
        raise HeadTooLarge(f"The request has more than {max_fields} header fields.")
    named = {name.lower(): value for name, value in fields}
    repeats = len(named) != len(fields)
    if repeats:
        _refuse_repeated(fields)
    coding = _framing(named, b"transfer-encoding")
    path, query = _target(target, _framing(named, b"host"), minor)
    return RequestHead(
        lines=lines,
        named=named,
        repeats=repeats,
        method=method.decode("ascii"),
        path=path,
        query=query,
        minor=int(minor),
        length=_request_length(_framing(named, b"content-length"), coding, minor),
        chunked=coding is not None,
        keep=_keeps(fields, minor) if b"connection" in named else minor == b"1",
        expects_continue=b"expect" in named and _expects(fields) and minor == b"1",
    )


def parse_response_head(head: bytes) -> ResponseHead:
    """Read an answer's head; raise `BrokenAnswer` for what is improper or framed in no certain way.

    An answer that ends with its connection is refused too: its end and a break look the same.
    """
    match = _RESPONSE.fullmatch(head)
    if match is None:
        raise BrokenAnswer("its head is not proper HTTP/1.1")
    minor, status_text, lines = match.groups()
    fields: list[Field] = _FIELD.findall(lines)
    named = {name.lower(): value for name, value in fields}
    repeats = len(named) != len(fields)
    if repeats:
        names = [name.lower() for name, _ in fields]
        if names.count(b"content-length") > 1:
            raise BrokenAnswer("it has two lengths")
        if names.count(b"transfer-encoding") > 1:
            raise BrokenAnswer("it has two transfer codings")
    length, coding = _framing(named, b"content-length"), _framing(named, b"transfer-encoding")
    status = int(status_text)
    closes = b"connection" in named and any(
        b"close" in value for value in _all_of(fields, b"connection")
    )
    return ResponseHead(
        lines=lines,
        named=named,
        repeats=repeats,
        status=status,
        length=_response_length(status, length, coding, minor),
        keep=minor == b"1" and not closes,
    )


def refuse_hopeless(start: bytes) -> None:
    """Raise `BadRequest` for a part of a head that no further byte can make a proper one."""
    if not b"A" <= start[:1] <= b"Z" or start.count(b"\n") != start.count(b"\r\n"):
        raise BadRequest("The request's head is not proper HTTP/1.1.")


def _framing(named: dict[bytes, bytes], name: bytes) -> bytes | None:
    """A field whose value is the same in lower case."""
    value = named.get(name)
    return None if value is None else value.rstrip(b" \t").lower()


def _all_of(fields: list[Field], name: bytes) -> list[bytes]:
    """Every value of such a field."""
    return [value.rstrip(b" \t").lower() for each, value in fields if each.lower() == name]


def _refuse_repeated(fields: list[Field]) -> None:
    names = [name.lower() for name, _ in fields]
    for name, text in _ONCE.items():
        if names.count(name) > 1:
            raise BadRequest(f"The request has more than one {text}.")


def _connection_options(value: bytes) -> set[bytes]:
    options = {option.strip(b" \t") for option in value.split(b",")}
    # A connection option takes the field that it names away from the request: no client may
    # have that done to a field that means something here.
    if not options <= _CONNECTION_OPTIONS:
        raise BadRequest("The request's Connection names a field that is not of the connection.")
    return options


def _keeps(fields: list[Field], minor: bytes) -> bool:
    options: set[bytes] = set()
    for value in _all_of(fields, b"connection"):
        options |= _connection_options(value)
    return b"close" not in options and (minor == b"1" or b"keep-alive" in options)


def _expects(fields: list[Field]) -> bool:
    if any(value != b"100-continue" for value in _all_of(fields, b"expect")):
        raise ExpectationFailed("The only expectation that is met is 100-continue.")
    return True


def _target(target: bytes, host: bytes | None, minor: bytes) -> tuple[str, str]:
    if host is None:
        if minor == b"1":
            raise BadRequest("The request has no Host.")
    elif not _is_host(host):
        raise BadRequest("The request's Host is not a host.")
    if not target.startswith(b"/"):
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None or host is None or absolute[1].lower() != host:
            raise BadRequest("The request's target is no path, or of another host.")
        target = absolute[2]
    path, _, query = target.decode("ascii").partition("?")
    return path, query


@lru_cache(maxsize=1024)
def _is_host(host: bytes) -> bool:
    return _HOST.fullmatch(host) is not None


def _request_length(length: bytes | None, coding: bytes | None, minor: bytes) -> int:
    if coding is not None:
        if length is not None:
            raise BadRequest("The request has a Content-Length beside a Transfer-Encoding.")
        if minor == b"0":
            raise BadRequest("HTTP/1.0 has no Transfer-Encoding.")
        if coding != b"chunked":
            raise UnsupportedCoding("The only transfer coding that is known is chunked.")
        return 0
    if length is None:
        return 0
    if _LENGTH.fullmatch(length) is None:
        raise BadRequest("The request's Content-Length is not a number.")
    return int(length)


def _response_length(
    status: int, length: bytes | None, coding: bytes | None, minor: bytes
) -> int | None:
    if status < 200 or status in (204, 304):
        if coding is not None or length not in (None, b"0"):
            raise BrokenAnswer(f"an answer {status} has no body")
        return 0
    if coding is not None:
        if length is not None or minor == b"0" or coding != b"chunked":
            raise BrokenAnswer("its framing is ambiguous")
        return None
    if length is None or _LENGTH.fullmatch(length) is None:
        raise BrokenAnswer("it does not say its length")
    return int(length)
