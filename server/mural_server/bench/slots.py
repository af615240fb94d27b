"""What it costs when more adapters are busy than there are slots."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping
from contextlib import aclosing

import msgspec

from mural_resolvers.request import LoRARequest
from mural_server.bench.adapters import lora_requests
from mural_server.bench.setup import BenchError, Setup, engine_settings, random_prompt
from mural_server.bench.timing import (
    Latency,
    RequestTimes,
    Sample,
    first_token_times,
    inter_token_times,
    latency,
)
from mural_server.engine.build import build_core
from mural_server.engine.local import LocalEngine
from mural_server.generation import GenerateRequest, Generator
from mural_server.models.source import fast_backend, load_tokenizer
from mural_server.sampling_params import SamplingParams

__all__ = ["SlotsCase", "SlotsReport", "measure_slots"]


class SlotsCase(msgspec.Struct, kw_only=True):
    """One number of busy adapters under one kind of load."""

    arrival: str
    """``burst``: all requests at once. ``steady``: clients that send the next request when the
    last one has ended."""
    adapters: int
    tokens_per_s: float
    first_token: Latency
    inter_token: Latency


class SlotsReport(msgspec.Struct, kw_only=True):
    """As many clients in every case; only the number of adapters among them differs."""

    slots: int
    clients: int
    cases: list[SlotsCase]

    def first_token_ratio(self, arrival: str) -> float:
        """TTFT p50 at twice as many adapters as slots, over that at as many."""
        few, many = (case for case in self.cases if case.arrival == arrival)
        return many.first_token.p50_ms / few.first_token.p50_ms


def measure_slots(setup: Setup) -> SlotsReport:
    """TTFT with as many busy adapters as slots, and with twice as many, in turns."""
    return asyncio.run(_measure(setup))


async def _measure(setup: Setup) -> SlotsReport:
    settings = msgspec.structs.replace(
        # All of them fit in host memory: the slots are what is short.
        engine_settings(setup),
        max_cpu_loras=4 * setup.sizes.slots,
    )
    engine = LocalEngine(build_core(settings))
    try:
        clients = _Clients(setup, Generator(engine, fast_backend(load_tokenizer(setup.model))))
        few, many = setup.sizes.slots, 2 * setup.sizes.slots
        await clients.run(many, 1)  # warm, and everything in host memory
        samples: dict[tuple[str, int], list[Sample]] = {}
        for _ in range(setup.sizes.rounds):
            for arrival, turns in (("burst", 1), ("steady", setup.sizes.turns)):
                for adapters in (few, many):
                    sample = await clients.run(adapters, turns)
                    samples.setdefault((arrival, adapters), []).append(sample)
                    await _check(engine)
    finally:
        await engine.close()
    return SlotsReport(
        slots=few,
        clients=many,
        cases=[_case(arrival, adapters, found) for (arrival, adapters), found in samples.items()],
    )


async def _check(engine: LocalEngine) -> None:
    try:
        await engine.check_integrity()
    except AssertionError as error:
        raise BenchError(f"A cache of the engine is not as it must be: {error}") from None


def _case(arrival: str, adapters: int, samples: list[Sample]) -> SlotsCase:
    rates = sorted(sample.tokens_per_s for sample in samples)
    return SlotsCase(
        arrival=arrival,
        adapters=adapters,
        tokens_per_s=rates[len(rates) // 2],
        first_token=latency(first_token_times(samples)),
        inter_token=latency(inter_token_times(samples)),
    )


class _Clients:
    """Twice as many clients as slots, each with an adapter that it may share with another."""

    def __init__(self, setup: Setup, generator: Generator) -> None:
        self._setup = setup
        self._generator = generator
        self._loras: Mapping[str, LoRARequest] = lora_requests(setup)
        self._draw = random.Random(setup.seed)
        self._count = 0

    async def run(self, adapters: int, turns: int) -> Sample:
        """Every client sends ``turns`` requests, one after another."""
        names = self._setup.adapters[:adapters]
        started = time.perf_counter()
        found = await asyncio.gather(
            *(self._client(names[i % adapters], turns) for i in range(2 * self._setup.sizes.slots))
        )
        requests = [times for of_client in found for times in of_client]
        return Sample(seconds=time.perf_counter() - started, requests=requests)

    async def _client(self, adapter: str, turns: int) -> list[RequestTimes]:
        return [await self._request(adapter) for _ in range(turns)]

    async def _request(self, adapter: str) -> RequestTimes:
        self._count += 1
        request = GenerateRequest(
            request_id=f"bench-{self._count}",
            prompt_token_ids=random_prompt(self._setup, self._draw),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=self._setup.sizes.output_tokens, ignore_eos=True
            ),
            lora=self._loras[adapter],
        )
        times = RequestTimes(time.perf_counter(), [], 0)
        async with aclosing(self._generator.stream(request)) as updates:
            async for update in updates:
                times.arrivals.append(time.perf_counter())
                times.output_tokens = update.completion_tokens
        return times
