"""What can be refused, in one hierarchy: each class knows its HTTP status and OpenAI error body.

Everything that a user's input can cause is one of these classes, so that no boundary has to
guess a status. Messages are written for the user who is told them: they never hold a secret,
a path outside the user's own namespace, or an unbounded echo of the input.
"""

from __future__ import annotations

from typing import ClassVar, TypedDict

from mural_resolvers.redaction import redacted

__all__ = [
    "STATUS_BY_CODE",
    "AdapterNotFound",
    "Conflict",
    "ErrorBody",
    "ErrorDetail",
    "Forbidden",
    "InvalidInput",
    "MalformedName",
    "ManifestMismatch",
    "MuralError",
    "RateLimited",
    "TooLarge",
    "Unauthorized",
    "Unavailable",
    "UnusableAdapter",
    "error_body",
    "error_from_status",
    "quoted",
]


class ErrorDetail(TypedDict):
    """The inner object of an OpenAI error body."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(TypedDict):
    """An OpenAI error body."""

    error: ErrorDetail


class MuralError(Exception):
    """Base of every typed error; ``status``, ``code``, ``type`` and ``param`` belong to the class.

    ``retry_after_s`` (seconds, or None) becomes the ``Retry-After`` header where it is set.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "server_error"
    param: ClassVar[str | None] = None

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s


class MalformedName(MuralError):
    """The text is no adapter name, whatever exists."""

    status = 400
    code = "malformed_name"
    type = "invalid_request_error"
    param = "model"


class InvalidInput(MuralError):
    """A parameter, a body or a settings file that cannot mean anything."""

    status = 400
    code = "invalid_input"
    type = "invalid_request_error"


class Unauthorized(MuralError):
    """No valid key. One message for every reason, so that nothing is learnt from it."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"

    def __init__(self, message: str = "A valid API key is required.") -> None:
        super().__init__(message)


class Forbidden(MuralError):
    """Outside the caller's namespace and grants: one body whether or not the thing exists."""

    status = 403
    code = "forbidden"
    type = "permission_error"
    param = "model"

    def __init__(self, message: str = "This key may not use the requested model.") -> None:
        super().__init__(message)


class AdapterNotFound(MuralError):
    """Inside the caller's own namespace or grants, and no source has it."""

    status = 404
    code = "model_not_found"
    type = "invalid_request_error"
    param = "model"


class Conflict(MuralError):
    """Other content under a name that is already taken."""

    status = 409
    code = "conflict"
    type = "invalid_request_error"


class TooLarge(MuralError):
    """A file or a body above its stated limit."""

    status = 413
    code = "too_large"
    type = "invalid_request_error"


class UnusableAdapter(MuralError):
    """The adapter's files were read and cannot be served; the message is the reason."""

    status = 422
    code = "unusable_adapter"
    type = "invalid_request_error"
    param = "model"


class ManifestMismatch(UnusableAdapter):
    """The files differ from the manifest that stands beside them."""

    code = "manifest_mismatch"


class RateLimited(MuralError):
    """Over a limit of the caller's own; ``retry_after_s`` says when to come back."""

    status = 429
    code = "rate_limit_exceeded"
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class Unavailable(MuralError):
    """No capacity, or no answer from a source, in time; ``retry_after_s`` is always set."""

    status = 503
    code = "unavailable"
    type = "server_error"

    def __init__(self, message: str, *, retry_after_s: float | None = 1.0) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


# Of two with one status, the first is what the status alone stands for.
_ERRORS: tuple[type[MuralError], ...] = (
    InvalidInput,
    MalformedName,
    Unauthorized,
    Forbidden,
    AdapterNotFound,
    Conflict,
    TooLarge,
    UnusableAdapter,
    ManifestMismatch,
    RateLimited,
    Unavailable,
)

STATUS_BY_CODE: dict[str, int] = {error.code: error.status for error in _ERRORS}


def error_body(error: MuralError) -> ErrorBody:
    """Give the OpenAI error body of a typed error."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.code,
        }
    }


def error_from_status(
    status: int, message: str, retry_after_s: float | None = None, code: str = ""
) -> MuralError:
    """Build the error that a status stands for, where only that crossed a border.

    ``code`` tells two errors of one status apart, where it came along. A status that no class
    has gives a plain `MuralError`, which is a fault of the server.
    """
    classes = {error.status: error for error in reversed(_ERRORS)}
    by_code = {error.code: error for error in _ERRORS if error.status == status}
    error = by_code.get(code, classes.get(status, MuralError))(message)
    if retry_after_s is not None:
        error.retry_after_s = retry_after_s
    return error


def quoted(text: str, max_chars: int = 80) -> str:
    """Quote user-given text for a message: ASCII, escaped and cut, so that it can go anywhere."""
    # Before the cut, which could leave a part of a secret that is not recognised any more.
    text = redacted(text)
    return ascii(text if len(text) <= max_chars else text[:max_chars] + "…")
