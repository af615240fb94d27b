"""One HTTP request's sequences: admitted, looked up, tokenised, generated, counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import NamedTuple

from mural_resolvers.errors import MuralError, Unavailable
from mural_resolvers.tenants import Ticket
from mural_server.api.router_identity import Caller
from mural_server.api.state import AppState
from mural_server.catalog import ServedModel
from mural_server.generation import GenerateRequest, RequestUpdate
from mural_server.sampling_params import SamplingParams

__all__ = ["Plan", "PromptUpdate", "Run", "Step"]


class Plan(NamedTuple):
    """What to generate, once the adapter is known: token ids and parameters, one per prompt."""

    prompts: list[list[int]]
    sampling: list[SamplingParams]


class PromptUpdate(NamedTuple):
    """What a step gave the prompt at place ``prompt``."""

    prompt: int
    update: RequestUpdate


Step = list[PromptUpdate]


class Run:
    """The sequences of one HTTP request; ``served`` and ``plan`` are known from the first step."""

    served: ServedModel
    plan: Plan

    def __init__(
        self,
        state: AppState,
        caller: Caller,
        *,
        request_id: str,
        model: str,
        sequences: int,
        cache_salt: str | None,
        make_plan: Callable[[ServedModel], Awaitable[Plan]],
    ) -> None:
        self.request_id = request_id
        self.cached_by_prompt: dict[int, int] = {}
        self.completion_tokens = 0
        self._state = state
        self._caller = caller
        self._principal = caller.principal
        self._model = model
        self._sequences = sequences
        self._cache_salt = cache_salt
        self._make_plan = make_plan
        self._arrived = time.perf_counter()

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_prompt.values())

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.plan.prompts)

    async def first(self, steps: AsyncGenerator[Step, None]) -> Step:
        """The first step, for which nobody waits longer than ``queue_wait_s``.

        Everything that can be wrong with a request is raised here, before any header is sent.
        """
        try:
            async with asyncio.timeout(self._state.settings.queue_wait_s):
                return await anext(steps)
        except TimeoutError:
            raise Unavailable(
                "The request waited too long for its turn.", retry_after_s=5.0
            ) from None

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Every step's updates; closing it aborts every sequence."""
        tenant = self._principal.tenant or ""
        async with AsyncExitStack() as held:
            ticket = self._state.accounts.enter(self._principal, self._sequences, time.monotonic())
            held.callback(ticket.close)
            held.enter_context(self._state.admission.enter(tenant, self._sequences))
            self.served = await held.enter_async_context(
                self._state.catalog.use(self._principal, self._model)
            )
            self._caller.check(self.served)
            self.plan = await self._make_plan(self.served)
            streams = [
                self._state.generator.stream(self._request(place))
                for place in range(len(self.plan.prompts))
            ]
            counting = _Counting(self._state, self, self._arrived, ticket)
            try:
                async with aclosing(_merged(streams)) as merged:
                    async for step in merged:
                        counting.add(step)
                        yield step
            finally:
                counting.close()

    def _request(self, place: int) -> GenerateRequest:
        return GenerateRequest(
            request_id=f"{self.request_id}-{place}",
            prompt_token_ids=self.plan.prompts[place],
            sampling=self.plan.sampling[place],
            lora=self.served.lora,
            tenant=self._principal.tenant or "",
            weight=self._principal.weight,
            salt=self._state.salts.salt(self._principal, self._cache_salt),
        )


class _Counting:
    """Keeps a run's sums and the server's metrics; refuses to pass an abort off as an answer."""

    def __init__(self, state: AppState, run: Run, arrived: float, ticket: Ticket) -> None:
        self._metrics = state.metrics
        self._run = run
        self._arrived = arrived
        self._ticket = ticket
        self._last: dict[int, float] = {}
        self._prompts_spent = False

    def add(self, step: Step) -> None:
        now = time.perf_counter()
        tokens = 0
        for place, update in step:
            last = self._last.get(place)
            if last is None:
                self._metrics.first_token_s.observe(now - self._arrived)
                self._metrics.queued_s.observe(update.queued_s)
            else:
                self._metrics.inter_token_s.observe(now - last)
            self._last[place] = now
            self._run.cached_by_prompt[place] = update.cached_tokens
            for sequence in update.sequences:
                tokens += len(sequence.token_ids)
                if sequence.finish_reason == "abort":
                    raise Unavailable("The server ended this request before it was complete.")
                if sequence.finish_reason is not None:
                    self._metrics.finished(sequence.finish_reason)
        self._spend(tokens)
        self._run.completion_tokens += tokens
        self._metrics.traffic.add(self._run.served.name, tokens)

    def _spend(self, tokens: int) -> None:
        """A prompt counts once the engine has taken it, what is generated as it comes."""
        if not self._prompts_spent:
            self._prompts_spent = True
            tokens += self._run.prompt_tokens
        self._ticket.spend(tokens, time.monotonic())

    def close(self) -> None:
        if not self._last:
            return
        self._metrics.latency_s.observe(time.perf_counter() - self._arrived)
        self._metrics.adapter_tokens.add(
            self._run.served.name, self._run.prompt_tokens, self._run.completion_tokens
        )


async def _merged(streams: Sequence[AsyncIterator[RequestUpdate]]) -> AsyncGenerator[Step, None]:
    """The updates of several streams, those that have come by then together."""
    if len(streams) == 1:
        try:
            async for update in streams[0]:
                yield [PromptUpdate(0, update)]
        finally:
            await _close(streams[0])
        return
    news: asyncio.Queue[PromptUpdate | MuralError | None] = asyncio.Queue()
    pumps = [
        asyncio.create_task(_pump(place, stream, news)) for place, stream in enumerate(streams)
    ]
    running = len(pumps)
    try:
        while running:
            step: Step = []
            item = await news.get()
            while True:
                if isinstance(item, MuralError):
                    raise item
                if item is None:
                    running -= 1
                else:
                    step.append(item)
                if news.empty():
                    break
                item = news.get_nowait()
            if step:
                yield step
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(
    place: int,
    stream: AsyncIterator[RequestUpdate],
    news: asyncio.Queue[PromptUpdate | MuralError | None],
) -> None:
    try:
        async for update in stream:
            news.put_nowait(PromptUpdate(place, update))
    except MuralError as error:
        news.put_nowait(error)
    except Exception as error:
        news.put_nowait(MuralError("The server failed to answer this request."))
        raise error
    else:
        news.put_nowait(None)
    finally:
        await _close(stream)


async def _close(stream: AsyncIterator[RequestUpdate]) -> None:
    """End a stream now, which aborts its sequences, rather than when it is collected."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
