"""Every error leaves as an OpenAI error body with its status; nothing else does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from mural_resolvers.errors import AdapterNotFound, InvalidInput, MuralError, Unavailable
from mural_resolvers.redaction import redacted

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request

__all__ = [
    "BadParameter",
    "InvalidUserInput",
    "LoRANotFound",
    "MethodNotAllowed",
    "NotTaken",
    "RequestTimeout",
    "RouteNotFound",
    "RuntimeUpdatesOff",
    "UploadsOff",
    "error_bytes",
    "error_response",
    "install_error_handlers",
]


class BadParameter(InvalidInput):
    """A request parameter that is refused; ``at`` names it as the client wrote it."""

    def __init__(self, message: str, *, at: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.at = at
        self.own_code = code


class RouteNotFound(MuralError):
    """No such path."""

    status = 404
    code = "not_found"
    type = "invalid_request_error"


class MethodNotAllowed(MuralError):
    """The path exists, the method does not."""

    status = 405
    code = "method_not_allowed"
    type = "invalid_request_error"


class NotTaken(Unavailable):
    """Refused before any work: another replica may be asked at once."""


class RequestTimeout(MuralError):
    """The client did not send its body in time."""

    status = 408
    code = "request_timeout"
    type = "invalid_request_error"


class RuntimeUpdatesOff(RouteNotFound):
    """The load and unload endpoints exist only where they were turned on."""

    def __init__(self) -> None:
        super().__init__(
            "Loading and unloading adapters by request is off: start the server with "
            "--allow-runtime-lora-updating."
        )


class UploadsOff(RouteNotFound):
    """Adapters can be uploaded only where there is a store for them."""

    def __init__(self) -> None:
        super().__init__("Uploads are off: start the server with --upload-store.")


class InvalidUserInput(BadParameter):
    """vLLM's type for what the load and unload endpoints refuse."""

    type = "InvalidUserInput"


class LoRANotFound(AdapterNotFound):
    """vLLM's type for a name that the unload endpoint does not know."""

    type = "NotFoundError"


class _Detail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class _Body(msgspec.Struct):
    error: _Detail


def error_bytes(error: MuralError) -> bytes:
    """The JSON of a typed error."""
    param, code = error.param, error.code
    if isinstance(error, BadParameter):
        param, code = error.at, error.own_code or error.code
    # A message may quote what the client sent, and a client may send a key in any place.
    message, param = redacted(error.message), None if param is None else redacted(param)
    return msgspec.json.encode(_Body(_Detail(message, error.type, param, code)))


def error_response(error: MuralError) -> Response:
    """The response of a typed error, with the headers that its status asks for."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, NotTaken):
        # For the router, which tries no other 503 again: a cold load would be as cold elsewhere.
        headers["x-mural-retry"] = "elsewhere"
    if error.status in (408, 413):
        # The rest of the body will not be read, so the connection cannot be used again.
        headers["connection"] = "close"
    return Response(
        error_bytes(error),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


def _of_http_exception(error: HTTPException) -> MuralError:
    if error.status_code == 404:
        return RouteNotFound("There is no such path on this server.")
    if error.status_code == 405:
        return MethodNotAllowed("This path does not take that method.")
    return BadParameter(str(error.detail))


def install_error_handlers(app: Starlette, count: Callable[[int], None]) -> None:
    """Make every exception of a route an OpenAI error body; ``count`` is told the status."""

    async def on_mural_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, MuralError)
        count(error.status)
        return error_response(error)

    async def on_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = error_response(_of_http_exception(error))
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        count(response.status_code)
        return response

    async def on_validation_error(request: Request, error: Exception) -> Response:
        return await on_mural_error(request, BadParameter("A query parameter is not valid."))

    async def on_bug(request: Request, error: Exception) -> Response:
        # The server's own handler logs the traceback.
        return await on_mural_error(
            request, MuralError("The server failed to answer this request.")
        )

    app.add_exception_handler(MuralError, on_mural_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(Exception, on_bug)
