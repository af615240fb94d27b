"""``POST /v1/completions``."""

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
from mural_server.api.requests import CompletionRequest
from mural_server.api.run import Plan, Run, Step
from mural_server.api.sampling import completion_sampling
from mural_server.api.state import AppState
from mural_server.api.text import TextPipeline, check_length
from mural_server.catalog import ServedModel
from mural_server.engine.messages import TokenLogprobs
from mural_server.generation import SequenceUpdate

__all__ = ["create_completion"]


class CompletionLogprobs(msgspec.Struct):
    """The legacy form: lists by token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class WholeChoice(CompletionChoice, kw_only=True, omit_defaults=False):
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None


async def create_completion(state: AppState, request: Request) -> Response:
    """Answer one request; raises every refusal as a `MuralError`."""
    caller = state.auth.caller(request)
    body = await read_request(request, CompletionRequest, state.settings.max_body_bytes)

    async def make_plan(served: ServedModel) -> Plan:
        return await _plan(state, body)

    run = Run(
        state,
        caller,
        request_id=new_id("cmpl"),
        model=body.model,
        sequences=len(body.prompts) * (body.n or 1),
        cache_salt=body.cache_salt,
        make_plan=make_plan,
    )

    async def work() -> Response:
        if body.stream:
            return await stream(
                run, body, "text_completion", lambda: _Choices(state.texts, body, run)
            )
        return await _whole(state, body, run)

    return await respond(request, work)


async def _plan(state: AppState, body: CompletionRequest) -> Plan:
    special = True if body.add_special_tokens is None else body.add_special_tokens
    prompts: list[list[int]] = []
    for prompt in body.prompts:
        if isinstance(prompt, str):
            ids = await state.texts.encode(prompt, add_special_tokens=special)
            if not ids:
                raise BadParameter("The prompt has no tokens.", at="prompt")
        else:
            state.texts.check_ids(prompt)
            ids = prompt
        check_length(len(ids), state.max_model_len)
        prompts.append(ids)
    return Plan(
        prompts,
        [
            completion_sampling(
                body,
                state.defaults,
                vocab_size=state.texts.vocab_size,
                room=state.max_model_len - len(ids),
            )
            for ids in prompts
        ],
    )


async def _whole(state: AppState, body: CompletionRequest, run: Run) -> Response:
    async with aclosing(run.steps()) as steps:
        step = await run.first(steps)
        choices = _Choices(state.texts, body, run)
        parts = [choices.whole(step)]
        async for step in steps:
            parts.append(choices.whole(step))
    merged: dict[int, WholeChoice] = {}
    for part in parts:
        for choice in part:
            _append(merged.setdefault(choice.index, choice), choice)
    answer = Answer(
        id=run.request_id,
        object="text_completion",
        created=int(time.time()),
        model=run.served.name,
        choices=[merged[index] for index in sorted(merged)],
        usage=choices.usage(),
    )
    return Response(
        msgspec.json.encode(answer),
        media_type="application/json",
        headers=answer_headers(run),
    )


def _append(whole: WholeChoice, part: WholeChoice) -> None:
    if part is whole:
        return
    whole.text += part.text
    if whole.logprobs is not None and part.logprobs is not None:
        whole.logprobs.tokens += part.logprobs.tokens
        whole.logprobs.token_logprobs += part.logprobs.token_logprobs
        whole.logprobs.top_logprobs += part.logprobs.top_logprobs
        whole.logprobs.text_offset += part.logprobs.text_offset
    if part.finish_reason is not None:
        whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason


class _Choices:
    """Turns steps into choices, with the echo of each prompt before its first text."""

    def __init__(self, texts: TextPipeline, body: CompletionRequest, run: Run) -> None:
        self._texts = texts
        self._body = body
        self._run = run
        self._n = body.n or 1
        self._offsets: dict[int, int] = {}
        self._dropped = 0
        self._prompt_only = body.max_tokens == 0

    def usage(self) -> Usage:
        return usage_of(self._run, dropped=self._dropped)

    def choices(self, step: Step) -> Iterator[msgspec.Struct]:
        for choice in self.whole(step):
            if choice.text or choice.finish_reason or choice.logprobs is not None:
                yield CompletionChoice(
                    index=choice.index,
                    text=choice.text,
                    logprobs=choice.logprobs,
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )

    def whole(self, step: Step) -> list[WholeChoice]:
        found = []
        for place, update in step:
            for sequence in update.sequences:
                found.append(self._choice(place, sequence, update.prompt_logprobs))
        return found

    def _choice(
        self, place: int, sequence: SequenceUpdate, of_prompt: Sequence[TokenLogprobs | None]
    ) -> WholeChoice:
        index = place * self._n + sequence.index
        first = index not in self._offsets
        self._offsets.setdefault(index, 0)
        logprobs = CompletionLogprobs() if self._body.logprobs is not None else None
        text = ""
        if first and self._body.echo:
            text = self._prompt_text(place)
            if logprobs is not None:
                self._add_logprobs(logprobs, index, place, of_prompt)
        if self._prompt_only:
            self._dropped += len(sequence.token_ids)
        else:
            text += sequence.text
            if logprobs is not None:
                self._add_logprobs(logprobs, index, place, sequence.logprobs)
        wanted = self._body.prompt_logprobs
        return WholeChoice(
            index=index,
            text=text,
            logprobs=logprobs,
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            prompt_logprobs=(
                prompt_logprobs(of_prompt, wanted, self._texts)
                if first and wanted is not None
                else None
            ),
        )

    def _prompt_text(self, place: int) -> str:
        prompt = self._body.prompts[place]
        if isinstance(prompt, str):
            return prompt
        return b"".join(self._texts.token_text(token).data for token in prompt).decode(
            "utf-8", "replace"
        )

    def _add_logprobs(
        self,
        logprobs: CompletionLogprobs,
        index: int,
        place: int,
        found: Sequence[TokenLogprobs | None],
    ) -> None:
        top = self._body.logprobs or 0
        for position in found:
            token_id = self._run.plan.prompts[place][0] if position is None else position.token_id
            text = self._texts.token_text(token_id).text
            logprobs.tokens.append(text)
            logprobs.text_offset.append(self._offsets[index])
            self._offsets[index] += len(text)
            if position is None:
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                continue
            logprobs.token_logprobs.append(clamped(position.logprob))
            row = {
                self._texts.token_text(token).text: clamped(logprob)
                for token, logprob in position.top[:top]
            }
            row.setdefault(text, clamped(position.logprob))
            logprobs.top_logprobs.append(row)
