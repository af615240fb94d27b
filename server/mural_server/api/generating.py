"""What the two generating endpoints share: from a run to a response, whole or streamed."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mural_resolvers.errors import MuralError
from mural_server.api.answers import ChunkWriter, Usage
from mural_server.api.errors import error_bytes
from mural_server.api.requests import SamplingBody
from mural_server.api.run import Run, Step
from mural_server.api.sse import DONE, ClientGone, EventStream, unless_disconnected

__all__ = ["StreamedChoices", "answer_headers", "new_id", "respond", "stream"]

logger = logging.getLogger("mural.api")

CLIENT_CLOSED_REQUEST = 499
"""nginx's number; nobody is there to read it."""


class StreamedChoices(Protocol):
    """Makes one endpoint's chunks of the steps."""

    def choices(self, step: Step) -> Iterable[msgspec.Struct]:
        """The choices that a step adds to; none when it has nothing to say."""

    def usage(self) -> Usage:
        """The usage so far."""


def new_id(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


async def respond(request: Request, work: Callable[[], Coroutine[Any, Any, Response]]) -> Response:
    """Run ``work``, which is cancelled (and its sequences aborted) when the client leaves."""
    try:
        return await unless_disconnected(request.receive, work())
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def answer_headers(run: Run) -> dict[str, str]:
    """The request's id, and the content of the adapter that served it."""
    headers = {"x-request-id": run.request_id}
    if run.served.lora is not None:
        headers["x-mural-digest"] = run.served.lora.digest
    return headers


async def stream(
    run: Run,
    body: SamplingBody,
    object: str,
    make_choices: Callable[[], StreamedChoices],
) -> Response:
    """The streamed answer, once the first step is there; errors before it keep their status."""
    steps = run.steps()
    try:
        first = await run.first(steps)
    except BaseException:
        await steps.aclose()
        raise
    writer = ChunkWriter(
        id=run.request_id,
        object=object,
        created=int(time.time()),
        model=run.served.name,
        usage=body.wants_usage,
        running_usage=body.wants_running_usage,
    )
    events = _events(steps, first, writer, make_choices(), wants_usage=body.wants_usage)
    return EventStream(events, answer_headers(run))


async def _events(
    steps: AsyncGenerator[Step, None],
    first: Step,
    writer: ChunkWriter,
    choices: StreamedChoices,
    *,
    wants_usage: bool,
) -> AsyncGenerator[bytes, None]:
    async with aclosing(steps):
        try:
            event = writer.chunks(choices.choices(first), choices.usage)
            if event:
                yield event
            async for step in steps:
                event = writer.chunks(choices.choices(step), choices.usage)
                if event:
                    yield event
        except MuralError as error:
            # The status has gone out; without [DONE] no client takes this for a whole answer.
            yield b"data: " + error_bytes(error) + b"\n\n"
            return
        except Exception:
            logger.exception("unexpected error in a stream")
            bug = MuralError("The server failed to answer this request.")
            yield b"data: " + error_bytes(bug) + b"\n\n"
            return
        if wants_usage:
            yield writer.usage(choices.usage()) + DONE
        else:
            yield DONE
