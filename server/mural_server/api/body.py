"""Reads a request's body under its limits and makes it the typed request, or says what is wrong."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from mural_resolvers.errors import TooLarge, quoted
from mural_server.api.errors import BadParameter, RequestTimeout

__all__ = ["BODY_READ_S", "parse_body", "read_body", "read_request"]

BODY_READ_S = 60.0
MAX_SHOWN_ERRORS = 3

Model = TypeVar("Model", bound=BaseModel)


async def read_request(request: Request, model: type[Model], max_bytes: int) -> Model:
    """Read and parse a JSON body; raise `TooLarge`, `RequestTimeout` or `BadParameter`."""
    _check_content_type(request)
    return parse_body(await read_body(request, max_bytes), model)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read a body of at most ``max_bytes``, refusing a larger one before it is buffered."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and (len(announced) > 18 or int(announced) > max_bytes):
        raise TooLarge(f"The body is larger than {max_bytes} bytes.")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise BadParameter("The body must be sent without a content encoding.")
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_READ_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > max_bytes:
                    raise TooLarge(f"The body is larger than {max_bytes} bytes.")
                chunks.append(chunk)
    except TimeoutError:
        raise RequestTimeout(f"The body did not arrive within {BODY_READ_S:.0f} s.") from None
    except ClientDisconnect:
        raise BadParameter("The client went away before its body had arrived.") from None
    return b"".join(chunks)


def parse_body(body: bytes, model: type[Model]) -> Model:
    """Make a body the typed request; raise `BadParameter` naming the first thing that is wrong."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _as_bad_parameter(error) from None


def _check_content_type(request: Request) -> None:
    # A page in a browser may post text/plain anywhere without asking; JSON it may not.
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type and content_type != "application/json" and not content_type.endswith("+json"):
        raise BadParameter(
            f"The content type must be application/json, not {quoted(content_type)}."
        )


def _as_bad_parameter(error: ValidationError) -> BadParameter:
    found = error.errors(include_url=False, include_context=True, include_input=False)
    lines = []
    for item in found[:MAX_SHOWN_ERRORS]:
        where = _where(item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{where} is not a parameter of this server")
        elif item["type"] == "json_invalid":
            lines.append(
                f"the body is not valid JSON: {item['msg'].removeprefix('Invalid JSON: ')}"
            )
        else:
            message = item["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {message}" if where else message)
    more = "" if len(found) <= MAX_SHOWN_ERRORS else f" ({len(found) - MAX_SHOWN_ERRORS} more)"
    at = next((str(item["loc"][0])[:80] for item in found if item["loc"]), None)
    text = "; ".join(lines)
    return BadParameter(f"{text[:1].upper()}{text[1:]}{more}.", at=at)


def _where(location: tuple[int | str, ...]) -> str:
    """``messages[0].content`` for a place in the body, escaped and cut."""
    text = ""
    for part in location[:8]:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if part.isidentifier() and part.isascii() else quoted(part)
            text += f".{name[:80]}" if text else name[:80]
    return text
