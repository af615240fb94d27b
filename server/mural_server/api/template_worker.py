"""Renders chat templates. Run as a script it is the process in which hostile ones run.

It imports jinja2 and the standard library only, so that it starts fast and holds nothing worth
stealing. Frames on stdin and stdout: four bytes of length, big-endian, then JSON.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, NoReturn

import jinja2
import jinja2.nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["MAX_OUTPUT_CHARS", "TemplateRefused", "TemplateUnusable", "read_frame", "render"]

MAX_OUTPUT_CHARS = 4 << 20
MAX_FRAME_BYTES = 64 << 20
MEMORY_BYTES = 1 << 30

# Marks where the last message ends; transformers' own, so that templates meet nothing new.
_END_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class TemplateUnusable(Exception):
    """The template itself is at fault: it does not parse, or gives too much."""


class TemplateRefused(Exception):
    """The template does not take these messages."""


class _Generation(Extension):  # type: ignore[misc]  # jinja2 is not followed
    """``{% generation %}``, by which training marks the assistant's text; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own escapes HTML, which prompts are not.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRefused(str(message)[:500])


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # the local day, as transformers gives it


@lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    # The same settings as transformers', so that a template renders as it did in training.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def render(template: str, context: dict[str, Any], *, continue_final_message: bool = False) -> str:
    """Render a conversation; ``context["messages"]`` holds it.

    Raises `TemplateUnusable` or `TemplateRefused`. With ``continue_final_message`` the text ends
    where the last message's does.
    """
    try:
        compiled = _compiled(template)
    except (jinja2.TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
        raise TemplateUnusable(f"it does not parse ({type(error).__name__})") from None
    if continue_final_message:
        context = _tagged(context)
    pieces: list[str] = []
    size = 0
    try:
        for piece in compiled.generate(context):
            size += len(piece)
            if size > MAX_OUTPUT_CHARS:
                raise TemplateUnusable(f"it gives more than {MAX_OUTPUT_CHARS} characters")
            pieces.append(piece)
    except (TemplateRefused, TemplateUnusable):
        raise
    except (MemoryError, RecursionError, OverflowError, jinja2.sandbox.SecurityError) as error:
        raise TemplateUnusable(f"it does what is not allowed ({type(error).__name__})") from None
    except Exception as error:  # whatever a template's expression may raise
        raise TemplateRefused(f"{type(error).__name__}: {str(error)[:300]}") from None
    text = "".join(pieces)
    return _cut_at_tag(text) if continue_final_message else text


def _tagged(context: dict[str, Any]) -> dict[str, Any]:
    *before, last = context["messages"]
    last = {**last, "content": f"{last['content']}{_END_TAG}"}
    return {**context, "messages": [*before, last]}


def _cut_at_tag(text: str) -> str:
    place = text.rfind(_END_TAG.strip())
    if place < 0:
        raise TemplateRefused("the last message is not rendered as is, so it cannot be continued")
    # A template that trims the message has taken the tag's blank, and may take the message's.
    kept = text[place:].startswith(_END_TAG)
    return text[:place] if kept else text[:place].rstrip()


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read one frame; None at the end."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    return stream.read(size) if size <= MAX_FRAME_BYTES else None


def _answer(frame: bytes) -> dict[str, str]:
    try:
        request = json.loads(frame)
        text = render(
            request["template"],
            request["context"],
            continue_final_message=request["continue_final_message"],
        )
    except TemplateUnusable as error:
        return {"unusable": str(error)}
    except TemplateRefused as error:
        return {"refused": str(error)}
    return {"text": text}


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


def main(source: BinaryIO, sink: BinaryIO, limit: Callable[[int, int], None] = _limit) -> None:
    """Answer frames until the parent closes the pipe."""
    limit(resource.RLIMIT_AS, MEMORY_BYTES)
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_CORE, 0)
    while (frame := read_frame(source)) is not None:
        answer = json.dumps(_answer(frame)).encode()
        sink.write(len(answer).to_bytes(4, "big") + answer)
        sink.flush()


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
