"""From a request of n sequences to a stream of their texts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Literal, NamedTuple

import msgspec
from tokenizers import Tokenizer

from mural_resolvers.errors import Unavailable, error_from_status
from mural_resolvers.request import LoRARequest
from mural_server.detokenizer import IncrementalDetokenizer, StopStrings, TokenTexts
from mural_server.engine.client import EngineClient
from mural_server.engine.messages import EngineRequest, RequestDelta, TokenLogprobs
from mural_server.sampling_params import SEED_BITS, SamplingParams

__all__ = ["GenerateRequest", "Generator", "RequestUpdate", "SequenceUpdate"]


class GenerateRequest(msgspec.Struct, kw_only=True):
    """A prompt and how to continue it; as `EngineRequest`, before ``n`` is fanned out."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    lora: LoRARequest | None = None
    tenant: str = ""
    weight: float = 1.0
    salt: str = ""


class SequenceUpdate(msgspec.Struct, kw_only=True):
    """What was added to one of the n sequences."""

    index: int
    text: str
    """Whole characters; what may be the beginning of a stop string comes later or never."""
    token_ids: list[int]
    """With the token that ended the sequence, whose text is left out."""
    logprobs: list[TokenLogprobs]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id; None for the plain end of sequence."""


class RequestUpdate(msgspec.Struct, kw_only=True):
    """What one step, or several that came together, added to a request."""

    sequences: list[SequenceUpdate]
    prompt_logprobs: list[TokenLogprobs | None] = []
    """Whole, in one of the updates."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache; of the sequence that had most."""
    queued_s: float = 0.0
    """With the first update: the wait before anything was computed; the longest of the n."""
    step: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """Of all sequences up to now."""


class Generator:
    """Fans a request out to the engine and gives back text. For one event loop."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer) -> None:
        self._client = client
        self.texts = TokenTexts(tokenizer)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[RequestUpdate, None]:
        """Generate all n sequences side by side; over when each has had its finish reason.

        Sequence i of a request with a seed has the seed plus i. An error of the engine is raised
        as the `MuralError` of its status, and ends all n; `EngineDead` comes as it is. Closing
        the generator early aborts what still runs.
        """
        sampling = request.sampling
        stops = StopStrings(sampling.stop)
        sequences = [_Sequence(i, request, self.texts, stops) for i in range(sampling.n)]
        children = _Children(self._client, [_child(request, i) for i in range(sampling.n)])
        cached = completion = 0
        try:
            while not all(sequence.finished for sequence in sequences):
                news = await children.read()
                updates = []
                for index, delta in news:
                    updates.append(sequences[index].update(delta))
                    if sequences[index].finished:
                        await children.end(index)
                cached = max(cached, *(delta.cached_tokens for _, delta in news))
                completion += sum(len(update.token_ids) for update in updates)
                yield RequestUpdate(
                    sequences=updates,
                    prompt_logprobs=next((d.prompt_logprobs for i, d in news if i == 0), []),
                    cached_tokens=cached,
                    queued_s=max(delta.queued_s for _, delta in news),
                    step=max(delta.step for _, delta in news),
                    prompt_tokens=len(request.prompt_token_ids),
                    completion_tokens=completion,
                )
        finally:
            await children.close()


def _child(request: GenerateRequest, index: int) -> EngineRequest:
    params = request.sampling
    seed = None if params.seed is None else (params.seed + index) % (1 << SEED_BITS)
    return EngineRequest(
        request_id=request.request_id if params.n == 1 else f"{request.request_id}-{index}",
        prompt_token_ids=request.prompt_token_ids,
        sampling=msgspec.structs.replace(
            params,
            n=1,
            seed=seed,
            stop=(),
            # The prompt is scored once, not n times.
            prompt_logprobs=params.prompt_logprobs if index == 0 else None,
        ),
        lora=request.lora,
        tenant=request.tenant,
        weight=request.weight,
        salt=request.salt,
    )


class _Sequence:
    """One of the n: its detokeniser, and whether it is over."""

    def __init__(
        self, index: int, request: GenerateRequest, texts: TokenTexts, stops: StopStrings
    ) -> None:
        params = request.sampling
        self.index = index
        self.finished = False
        self._include_stop = params.include_stop_str_in_output
        self._detokenizer = IncrementalDetokenizer(
            texts,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=stops,
            include_stop=self._include_stop,
            min_tokens=params.min_tokens,
        )

    def update(self, delta: RequestDelta) -> SequenceUpdate:
        """Turn a delta into text; raise what it carries when it is an error."""
        reason = delta.finish_reason
        if reason == "error":
            raise error_from_status(delta.error_status, delta.error)
        said = delta.token_ids
        if reason == "stop" and not self._include_stop:
            said = said[:-1]
        text, used, stop = self._detokenizer.add(said)
        if stop is None and reason is not None:
            rest = self._detokenizer.finish()
            text, stop = text + rest.text, rest.stop
            used = len(delta.token_ids)
        self.finished = stop is not None or reason is not None
        return SequenceUpdate(
            index=self.index,
            text=text,
            token_ids=delta.token_ids[:used],
            logprobs=delta.logprobs[:used],
            finish_reason=reason if stop is None else "stop",
            stop_reason=delta.stop_token_id if stop is None else stop,
        )


class _News(NamedTuple):
    child: int
    delta: RequestDelta


class _Children:
    """The engine's streams of one request, read side by side: one delta of each at most waits
    here, the rest with the client."""

    def __init__(self, client: EngineClient, requests: Sequence[EngineRequest]) -> None:
        self._streams = {i: client.generate(request) for i, request in enumerate(requests)}
        self._reads: dict[int, asyncio.Task[RequestDelta | None]] = {}

    async def read(self) -> list[_News]:
        """Wait for news of any of them, and give what all have by then: never nothing."""
        if len(self._streams) == 1 and not self._reads:
            [(index, stream)] = self._streams.items()
            return [_News(index, _present(await anext(stream, None)))]
        for index, stream in self._streams.items():
            if index not in self._reads:
                self._reads[index] = asyncio.create_task(_next(stream))
        await asyncio.wait(self._reads.values(), return_when=asyncio.FIRST_COMPLETED)
        news = []
        for index in [i for i, read in self._reads.items() if read.done()]:
            news.append(_News(index, _present(self._reads.pop(index).result())))
        return news

    async def end(self, index: int) -> None:
        """Close one whose news has just been read: it is aborted unless it is over."""
        await _close(self._streams.pop(index))

    async def close(self) -> None:
        """Close all."""
        for read in self._reads.values():
            read.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        while self._streams:
            await self.end(next(iter(self._streams)))


async def _next(stream: AsyncIterator[RequestDelta]) -> RequestDelta | None:
    return await anext(stream, None)


def _present(delta: RequestDelta | None) -> RequestDelta:
    if delta is None:
        raise Unavailable("the engine ended a sequence without a reason")
    return delta


async def _close(stream: AsyncIterator[RequestDelta]) -> None:
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
