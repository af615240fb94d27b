"""A core driven step by step in this thread, so that each step can be timed by itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from types import TracebackType

from mural_resolvers.request import LoRARequest
from mural_server.bench.adapters import lora_requests
from mural_server.bench.setup import BenchError, Job, Setup, engine_settings
from mural_server.engine.build import build_core
from mural_server.engine.messages import EngineRequest
from mural_server.engine.wire import (
    AbortRequests,
    AddLora,
    AddRequest,
    CallError,
    CheckIntegrity,
    IntegrityReply,
    Outputs,
    ReplyBody,
)
from mural_server.sampling_params import SamplingParams

__all__ = ["CoreDriver"]

IDLE_PAUSE_S = 0.001
LOAD_TIMEOUT_S = 60.0


class CoreDriver:
    """A batch that decodes, and adapters that are loaded beside it. A context manager."""

    def __init__(self, setup: Setup) -> None:
        self._loras: Mapping[str, LoRARequest] = lora_requests(setup)
        self._ids = itertools.count()
        self._running: dict[str, int] = {}
        """Tokens that each request has given."""
        self._replies: dict[int, ReplyBody] = {}
        self._core = build_core(engine_settings(setup))
        self.chosen = self._core.info.chosen

    def __enter__(self) -> CoreDriver:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._core.close()

    def start_batch(self, jobs: Sequence[Job]) -> None:
        """Hand the requests in and step until all of them decode, which they do for long."""
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        for job in jobs:
            request_id = f"bench-{next(self._ids)}"
            self._running[request_id] = 0
            self._core.handle(
                AddRequest(
                    EngineRequest(
                        request_id=request_id,
                        prompt_token_ids=job.prompt,
                        sampling=sampling,
                        lora=self._loras[job.adapter] if job.adapter else None,
                    )
                )
            )
        while not all(self._running.values()):
            self.step()

    def end_batch(self) -> None:
        """Abort what runs, and check that nothing of it is left behind."""
        self._core.handle(AbortRequests(list(self._running)))
        self._running.clear()
        self.step()
        self.check()

    def step(self) -> float:
        """One step, with the taking of its outputs; its seconds."""
        started = time.perf_counter()
        progressed = self._core.step()
        outputs = self._core.take_outputs()
        seconds = time.perf_counter() - started
        if outputs is not None:
            self._note(outputs)
        if not progressed:
            time.sleep(IDLE_PAUSE_S)  # nothing to do until a load has ended
        return seconds

    def begin_load(self, adapter: str) -> int:
        """Ask for an adapter in a slot; the call's id for `loaded`."""
        call_id = next(self._ids)
        self._core.handle(AddLora(call_id, self._loras[adapter], "slot", False))
        return call_id

    def loaded(self, call_id: int) -> bool:
        """Whether the load has ended; raise `BenchError` when it failed."""
        reply = self._replies.pop(call_id, None)
        if isinstance(reply, CallError):
            raise BenchError(f"An adapter could not be loaded: {reply.message}")
        return reply is not None

    def finish_load(self, call_id: int) -> None:
        """Step until it has ended."""
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not self.loaded(call_id):
            if time.monotonic() > deadline:
                raise BenchError(f"A load did not end within {LOAD_TIMEOUT_S:.0f} s.")
            self.step()

    def check(self) -> None:
        """Raise `BenchError` when a cache of the core is not as it must be."""
        call_id = next(self._ids)
        self._core.handle(CheckIntegrity(call_id))
        self.step()
        reply = self._replies.pop(call_id)
        assert isinstance(reply, IntegrityReply)
        if reply.fault:
            raise BenchError(f"A cache of the engine is not as it must be: {reply.fault}")

    def _note(self, outputs: Outputs) -> None:
        for delta in outputs.deltas:
            if delta.finish_reason == "error":
                raise BenchError(f"A request failed: {delta.error}")
            if delta.request_id in self._running:
                if delta.finish_reason is not None:
                    raise BenchError("A request reached the end of its context too early.")
                self._running[delta.request_id] += len(delta.token_ids)
        for reply in outputs.replies:
            self._replies[reply.call_id] = reply.body
