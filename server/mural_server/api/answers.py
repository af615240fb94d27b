"""The bodies and chunks of the generating endpoints, as cheap to encode as they are to read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from mural_server.api.run import Run
from mural_server.api.text import TextPipeline
from mural_server.engine.messages import TokenLogprobs

__all__ = [
    "Answer",
    "ChunkWriter",
    "PromptLogprob",
    "PromptTokensDetails",
    "Usage",
    "clamped",
    "prompt_logprobs",
    "usage_of",
]

LOWEST_LOGPROB = -9999.0

_encoder = msgspec.json.Encoder()

Choice = TypeVar("Choice")


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Answer(msgspec.Struct, Generic[Choice], kw_only=True):
    """A whole answer."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    system_fingerprint: str | None = None


class PromptLogprob(msgspec.Struct):
    """vLLM's ``prompt_logprobs`` entry."""

    logprob: float
    rank: int
    decoded_token: str


def usage_of(run: Run, *, dropped: int = 0) -> Usage:
    """The usage so far; ``dropped`` tokens were generated and not handed out."""
    completion = run.completion_tokens - dropped
    return Usage(
        prompt_tokens=run.prompt_tokens,
        completion_tokens=completion,
        total_tokens=run.prompt_tokens + completion,
        prompt_tokens_details=PromptTokensDetails(run.cached_tokens),
    )


def clamped(logprob: float) -> float:
    """JSON has no minus infinity."""
    return max(logprob, LOWEST_LOGPROB)


def prompt_logprobs(
    found: Sequence[TokenLogprobs | None], limit: int, texts: TextPipeline
) -> list[dict[str, PromptLogprob] | None]:
    """By position: token id → log-probability, of the token that stands there and the likeliest."""
    rows: list[dict[str, PromptLogprob] | None] = []
    for position in found:
        if position is None:
            rows.append(None)
            continue
        row = {
            str(token): PromptLogprob(clamped(logprob), place, texts.token_text(token).text)
            for place, (token, logprob) in enumerate(position.top[:limit], start=1)
        }
        row[str(position.token_id)] = PromptLogprob(
            clamped(position.logprob), position.rank, texts.token_text(position.token_id).text
        )
        rows.append(row)
    return rows


class ChunkWriter:
    """Server-sent events of one stream: what never changes is encoded once."""

    def __init__(
        self, *, id: str, object: str, created: int, model: str, usage: bool, running_usage: bool
    ) -> None:
        head = _encoder.encode({"id": id, "object": object, "created": created, "model": model})
        self._head = b"data: " + head[:-1] + b',"choices":['
        # OpenAI's own: with include_usage every chunk has the field, and the last one fills it.
        self._tail = b'],"usage":null}\n\n' if usage else b"]}\n\n"
        self._running_usage = running_usage

    def chunks(self, choices: Iterable[msgspec.Struct], usage: Callable[[], Usage]) -> bytes:
        """The events of one step, one choice each."""
        tail = self._tail
        if self._running_usage:
            tail = b'],"usage":' + _encoder.encode(usage()) + b"}\n\n"
        return b"".join(self._head + _encoder.encode(choice) + tail for choice in choices)

    def usage(self, usage: Usage) -> bytes:
        """The event before the end that only tells the usage."""
        return self._head + b'],"usage":' + _encoder.encode(usage) + b"}\n\n"
