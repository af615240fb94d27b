"""What is refused about HTTP itself, in OpenAI's error body, and how an error becomes an answer."""

from __future__ import annotations

import math

import msgspec

from mural_resolvers.errors import InvalidInput, MuralError, error_body

__all__ = [
    "BadRequest",
    "BrokenAnswer",
    "ExpectationFailed",
    "HeadTooLarge",
    "MethodNotAllowed",
    "NotFound",
    "RequestTimeout",
    "UnsupportedCoding",
    "VersionNotSupported",
    "answer_fields",
    "error_json",
]


class BadRequest(InvalidInput):
    """No proper HTTP/1.1, or something of which two readers could see two requests."""

    code = "bad_request"


class NotFound(MuralError):
    """No path of this API."""

    status = 404
    code = "not_found"
    type = "invalid_request_error"


class MethodNotAllowed(MuralError):
    """The path is known, the method is not for it."""

    status = 405
    code = "method_not_allowed"
    type = "invalid_request_error"

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self.allowed = ", ".join(allowed)
        super().__init__(f"The methods of this path are {self.allowed}.")


class RequestTimeout(MuralError):
    """A head or a body that took too long to come."""

    status = 408
    code = "request_timeout"
    type = "invalid_request_error"


class ExpectationFailed(MuralError):
    """An Expect other than 100-continue."""

    status = 417
    code = "expectation_failed"
    type = "invalid_request_error"


class HeadTooLarge(MuralError):
    """Too many bytes or fields before the body."""

    status = 431
    code = "head_too_large"
    type = "invalid_request_error"


class UnsupportedCoding(MuralError):
    """A transfer coding other than chunked."""

    status = 501
    code = "unsupported_coding"
    type = "invalid_request_error"


class VersionNotSupported(MuralError):
    """Not HTTP/1.1 (or 1.0, where that is enough)."""

    status = 505
    code = "version_not_supported"
    type = "invalid_request_error"


class BrokenAnswer(Exception):
    """A replica's answer that is no proper HTTP/1.1; the text is for the log."""


def error_json(error: MuralError) -> bytes:
    """The OpenAI error body as bytes."""
    return msgspec.json.encode(error_body(error))


def answer_fields(error: MuralError) -> tuple[tuple[str, str], ...]:
    """The header fields of an error's answer."""
    if isinstance(error, MethodNotAllowed):
        return (("allow", error.allowed),)
    if error.retry_after_s is None:
        return ()
    return (("retry-after", str(max(1, math.ceil(error.retry_after_s)))),)
