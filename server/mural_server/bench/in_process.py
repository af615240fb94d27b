"""`LLM.generate` as a contender."""

from __future__ import annotations

import time

import msgspec

from mural_server.bench.setup import BenchError, Job, Setup, engine_options
from mural_server.bench.timing import RequestTimes, Sample
from mural_server.llm import LLM, RequestOutput
from mural_server.sampling_params import SamplingParams

__all__ = ["InProcess"]


class InProcess:
    """A whole engine in this process; see `Contender`."""

    def __init__(self, setup: Setup) -> None:
        self._llm = LLM(setup.model, adapter_dir=setup.adapter_dir, **engine_options(setup))
        self._sampling = SamplingParams(
            temperature=0.0, max_tokens=setup.sizes.output_tokens, ignore_eos=True
        )
        self._brief = msgspec.structs.replace(self._sampling, max_tokens=2)

    def start(self, jobs: list[Job]) -> list[str]:
        self._generate(jobs, self._sampling)
        return [f"engine: {line}" for line in self._llm.info.chosen]

    def settle(self, jobs: list[Job]) -> None:
        self._generate(jobs, self._brief)

    def run(self, jobs: list[Job]) -> Sample:
        before = self._llm.stats()
        at_hand = {adapter.name for adapter in before.adapters}
        started = time.perf_counter()
        outputs = self._generate(jobs, self._sampling)
        seconds = time.perf_counter() - started
        times = [
            RequestTimes(o.arrived_s, o.outputs[0].token_times_s, len(o.outputs[0].token_ids))
            for o in outputs
        ]
        wanted = self._sampling.max_tokens
        if any(request.output_tokens != wanted for request in times):
            raise BenchError(f"An answer does not have the {wanted} tokens that were asked for.")
        return Sample(
            seconds=seconds,
            requests=times,
            token_ids=[output.outputs[0].token_ids for output in outputs],
            prefix_hits=self._llm.stats().prefix_hits - before.prefix_hits,
            cold_adapters=len({job.adapter for job in jobs if job.adapter} - at_hand),
        )

    def check(self) -> None:
        stats = self._llm.stats()
        if stats.running or stats.waiting or stats.paused:
            raise BenchError("Requests are left in the engine.")
        try:
            self._llm.check_integrity()
        except AssertionError as error:
            raise BenchError(f"A cache of the engine is not as it must be: {error}") from None

    def close(self) -> None:
        self._llm.close()

    def _generate(self, jobs: list[Job], sampling: SamplingParams) -> list[RequestOutput]:
        return self._llm.generate(
            [job.prompt for job in jobs],
            sampling,
            [job.adapter for job in jobs],
            use_tqdm=False,
        )
