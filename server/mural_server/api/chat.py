"""``POST /v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mural_server.api.answers import (
    Answer,
    PromptLogprob,
    Usage,
    clamped,
    prompt_logprobs,
    usage_of,
)
from mural_server.api.body import read_request
from mural_server.api.errors import BadParameter
from mural_server.api.generating import answer_headers, new_id, respond, stream
from mural_server.api.requests import ChatCompletionRequest
from mural_server.api.run import Plan, Run, Step
from mural_server.api.sampling import chat_sampling
from mural_server.api.state import AppState
from mural_server.api.text import TextPipeline, check_length
from mural_server.catalog import ServedModel
from mural_server.engine.messages import TokenLogprobs

__all__ = ["create_chat_completion"]


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Message(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatAnswer(Answer[ChatChoice], kw_only=True):
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


async def create_chat_completion(state: AppState, request: Request) -> Response:
    """Answer one request; raises every refusal as a `MuralError`."""
    caller = state.auth.caller(request)
    body = await read_request(request, ChatCompletionRequest, state.settings.max_body_bytes)

    async def make_plan(served: ServedModel) -> Plan:
        return await _plan(state, body, served)

    run = Run(
        state,
        caller,
        request_id=new_id("chatcmpl"),
        model=body.model,
        sequences=body.n or 1,
        cache_salt=body.cache_salt,
        make_plan=make_plan,
    )
    role = state.settings.response_role if body.add_generation_prompt else body.messages[-1].role

    async def work() -> Response:
        if body.stream:
            return await stream(
                run,
                body,
                "chat.completion.chunk",
                lambda: _Chunks(state.texts, body, run, role),
            )
        return await _whole(state, body, run, role)

    return await respond(request, work)


async def _plan(state: AppState, body: ChatCompletionRequest, served: ServedModel) -> Plan:
    prompt = await state.texts.render_chat(served, body.messages, body)
    # The template has written the special tokens itself.
    ids = await state.texts.encode(prompt, add_special_tokens=body.add_special_tokens or False)
    if not ids:
        raise BadParameter("The chat template makes no prompt of these messages.", at="messages")
    check_length(len(ids), state.max_model_len)
    sampling = chat_sampling(
        body,
        state.defaults,
        vocab_size=state.texts.vocab_size,
        room=state.max_model_len - len(ids),
    )
    return Plan([ids], [sampling])


async def _whole(state: AppState, body: ChatCompletionRequest, run: Run, role: str) -> Response:
    choices = {
        index: ChatChoice(
            index=index,
            message=Message(role, ""),
            logprobs=ChatLogprobs([]) if body.logprobs else None,
        )
        for index in range(body.n or 1)
    }
    pieces: dict[int, list[str]] = {index: [] for index in choices}
    of_prompt: Sequence[TokenLogprobs | None] = ()
    async with aclosing(run.steps()) as steps:
        step: Step | None = await run.first(steps)
        while step is not None:
            for _, update in step:
                of_prompt = of_prompt or update.prompt_logprobs
                for sequence in update.sequences:
                    choice = choices[sequence.index]
                    pieces[sequence.index].append(sequence.text)
                    if choice.logprobs is not None:
                        choice.logprobs.content += _logprobs(
                            sequence.logprobs, body.top_logprobs or 0, state.texts
                        )
                    if sequence.finish_reason is not None:
                        choice.finish_reason = sequence.finish_reason
                        choice.stop_reason = sequence.stop_reason
            step = await anext(steps, None)
    for index, choice in choices.items():
        choice.message.content = "".join(pieces[index])
    answer = ChatAnswer(
        id=run.request_id,
        object="chat.completion",
        created=int(time.time()),
        model=run.served.name,
        choices=list(choices.values()),
        usage=usage_of(run),
        prompt_logprobs=(
            prompt_logprobs(of_prompt, body.prompt_logprobs, state.texts)
            if body.prompt_logprobs is not None
            else None
        ),
    )
    return Response(
        msgspec.json.encode(answer),
        media_type="application/json",
        headers=answer_headers(run),
    )


class _Chunks:
    """Turns steps into deltas; each choice begins with its role."""

    def __init__(
        self, texts: TextPipeline, body: ChatCompletionRequest, run: Run, role: str
    ) -> None:
        self._texts = texts
        self._body = body
        self._run = run
        self._role = role
        self._begun: set[int] = set()

    def usage(self) -> Usage:
        return usage_of(self._run)

    def choices(self, step: Step) -> Iterator[msgspec.Struct]:
        for _, update in step:
            for sequence in update.sequences:
                if sequence.index not in self._begun:
                    self._begun.add(sequence.index)
                    yield ChunkChoice(index=sequence.index, delta=Delta(self._role, ""))
                logprobs = None
                if self._body.logprobs and sequence.logprobs:
                    logprobs = ChatLogprobs(
                        _logprobs(sequence.logprobs, self._body.top_logprobs or 0, self._texts)
                    )
                if sequence.text or sequence.finish_reason or logprobs is not None:
                    yield ChunkChoice(
                        index=sequence.index,
                        delta=Delta(content=sequence.text or None),
                        logprobs=logprobs,
                        finish_reason=sequence.finish_reason,
                        stop_reason=sequence.stop_reason,
                    )


def _logprobs(found: Sequence[TokenLogprobs], top: int, texts: TextPipeline) -> list[TokenLogprob]:
    rows = []
    for position in found:
        text, data = texts.token_text(position.token_id)
        rows.append(
            TokenLogprob(
                text,
                clamped(position.logprob),
                list(data),
                [
                    TopLogprob(other, clamped(logprob), list(other_data))
                    for (other, other_data), logprob in (
                        (texts.token_text(token), logprob) for token, logprob in position.top[:top]
                    )
                ],
            )
        )
    return rows
