"""From a request's fields, and the model's own defaults, to `SamplingParams`."""

from __future__ import annotations

import msgspec

from mural_resolvers.errors import InvalidInput
from mural_server.api.errors import BadParameter
from mural_server.api.requests import ChatCompletionRequest, CompletionRequest, SamplingBody
from mural_server.sampling_params import SamplingParams

__all__ = ["SamplingDefaults", "chat_sampling", "completion_sampling"]

COMPLETION_MAX_TOKENS = 16


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What a request that says nothing gets; from the model's generation_config.json."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def completion_sampling(
    body: CompletionRequest, defaults: SamplingDefaults, *, vocab_size: int, room: int
) -> SamplingParams:
    """Parameters of ``/v1/completions`` for a prompt that leaves ``room`` tokens."""
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return _params(
        body,
        defaults,
        vocab_size=vocab_size,
        # An echo of nothing but the prompt still takes a step; its token is dropped later.
        asked=max(1, max_tokens),
        room=room,
        logprobs=body.logprobs,
        prompt_logprobs=(
            body.logprobs
            if body.echo and body.prompt_logprobs is None
            else _larger(body.prompt_logprobs, body.logprobs if body.echo else None)
        ),
    )


def chat_sampling(
    body: ChatCompletionRequest, defaults: SamplingDefaults, *, vocab_size: int, room: int
) -> SamplingParams:
    """Parameters of ``/v1/chat/completions`` for a prompt that leaves ``room`` tokens."""
    asked = body.max_completion_tokens or body.max_tokens or room
    return _params(
        body,
        defaults,
        vocab_size=vocab_size,
        asked=asked,
        room=room,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )


def _larger(first: int | None, second: int | None) -> int | None:
    given = [value for value in (first, second) if value is not None]
    return max(given) if given else None


def _params(
    body: SamplingBody,
    defaults: SamplingDefaults,
    *,
    vocab_size: int,
    asked: int,
    room: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    if body.min_tokens > asked:
        raise BadParameter(
            f"min_tokens ({body.min_tokens}) is above max_tokens ({asked}).", at="min_tokens"
        )
    # What the context cannot hold is not generated, whatever was asked for.
    max_tokens = min(asked, room)
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    try:
        return SamplingParams(
            n=body.n or 1,
            max_tokens=max_tokens,
            min_tokens=min(body.min_tokens, max_tokens),
            temperature=given(body.temperature, defaults.temperature),
            top_p=given(body.top_p, defaults.top_p),
            top_k=defaults.top_k if body.top_k is None else body.top_k,
            min_p=given(body.min_p, defaults.min_p),
            repetition_penalty=given(body.repetition_penalty, defaults.repetition_penalty),
            presence_penalty=given(body.presence_penalty, 0.0),
            frequency_penalty=given(body.frequency_penalty, 0.0),
            logit_bias=_logit_bias(body.logit_bias, vocab_size),
            seed=body.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(_in_vocabulary(body.stop_token_ids or [], vocab_size)),
            include_stop_str_in_output=body.include_stop_str_in_output,
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=body.skip_special_tokens,
        )
    except InvalidInput as error:
        raise BadParameter(error.message, at=error.message.partition(" ")[0]) from None


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10 or int(key) >= vocab_size:
            raise BadParameter(
                f"logit_bias takes token ids from 0 to {vocab_size - 1} as keys.", at="logit_bias"
            )
        found[int(key)] = value
    return found


def _in_vocabulary(ids: list[int], vocab_size: int) -> list[int]:
    if any(token >= vocab_size for token in ids):
        raise BadParameter(
            f"stop_token_ids takes token ids from 0 to {vocab_size - 1}.", at="stop_token_ids"
        )
    return ids
