"""The engine core: takes commands, runs steps, gives outputs. One thread, no waiting inside."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    InvalidInput,
    MuralError,
    Unavailable,
    UnusableAdapter,
)
from mural_resolvers.request import LoRARequest
from mural_server.engine.adapters import AdapterFailure, Adapters, typed
from mural_server.engine.client import EngineInfo
from mural_server.engine.messages import (
    AdapterInfo,
    AdapterLevel,
    EngineRequest,
    EngineStats,
    FreedBytes,
    RequestDelta,
)
from mural_server.engine.request import Request, State
from mural_server.engine.runner import ModelRunner, StepResult
from mural_server.engine.sampler import SampledToken, check_stop, check_token_ids
from mural_server.engine.scheduler import Scheduler, StepPlan
from mural_server.engine.wire import (
    AbortRequests,
    AdapterReply,
    AddLora,
    AddRequest,
    CallError,
    CheckedReply,
    CheckIntegrity,
    CheckLora,
    Command,
    FreedReply,
    IntegrityReply,
    Outputs,
    PinLora,
    RemoveLora,
    Reply,
    ReplyBody,
    Shutdown,
)
from mural_server.lora.checkpoint import CheckpointHeader

STATS_INTERVAL_S = 0.25
HEARTBEAT_S = 5.0
MAX_SLOT_CHANGES_WHILE_DECODING = 1
"""A copy into a slot takes a few milliseconds of the step, so running decodes see one at most."""


@dataclass(slots=True)
class Removal:
    """An adapter on its way out."""

    call_id: int
    lora_int_id: int
    deadline: float


@dataclass(slots=True)
class Residency:
    """A call that waits for an adapter to be resident as asked."""

    call_id: int
    lora_int_id: int
    in_slot: bool
    lora: LoRARequest | None = None
    """To load it with; None for one that is resident, if only in host memory."""
    pin: AdapterLevel | None = None
    """The tier in which it is to stay."""


class EngineCore:
    """See `Command` for what it takes and `Outputs` for what it gives.

    ``adapters`` is None when the engine was started without LoRA. ``clock`` gives seconds.
    """

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        runner: ModelRunner,
        adapters: Adapters | None,
        *,
        eos_token_ids: tuple[int, ...],
        entropy: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._scheduler = scheduler
        self._runner = runner
        self._adapters = adapters
        self._eos_token_ids = eos_token_ids
        self._entropy = entropy
        self._clock = clock
        self._arrivals = 0
        self._outputs = Outputs()
        self._removals: list[Removal] = []
        self._residencies: list[Residency] = []
        self._checks: dict[int, Future[CheckpointHeader]] = {}
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._steps = 0
        self._stats_at = -STATS_INTERVAL_S
        self._stats_changed = True

    @property
    def on_news(self) -> Callable[[], None] | None:
        """Called from another thread when a load has ended."""
        return self._adapters.on_news if self._adapters else None

    @on_news.setter
    def on_news(self, wake: Callable[[], None]) -> None:
        if self._adapters:
            self._adapters.on_news = wake

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.num_unfinished or self._removals or self._residencies)

    def close(self) -> None:
        if self._adapters:
            self._adapters.close()

    # -- commands ------------------------------------------------------------------------------

    def handle(self, command: Command) -> None:
        """Take a command; what it leads to comes with the outputs of this or a later step."""
        self._stats_changed = True
        match command:
            case AddRequest(request):
                self._guard_request(request)
            case AbortRequests(request_ids):
                self._abort(request_ids)
            case AddLora(call_id):
                self._guard_call(call_id, lambda: self._add_lora(command))
            case RemoveLora(call_id):
                self._guard_call(call_id, lambda: self._remove_lora(command))
            case PinLora(call_id):
                self._guard_call(call_id, lambda: self._pin_lora(command))
            case CheckLora(call_id):
                self._guard_call(call_id, lambda: self._check_lora(command))
            case CheckIntegrity(call_id):
                self._reply(call_id, IntegrityReply(self._integrity_fault()))
            case Shutdown():
                self._abort(None)

    def _guard_request(self, message: EngineRequest) -> None:
        try:
            self._add_request(message)
        except MuralError as error:
            self._refuse(message.request_id, error)

    def _guard_call(self, call_id: int, act: Callable[[], None]) -> None:
        try:
            act()
        except MuralError as error:
            self._reply(call_id, CallError.of(error))

    def _reply(self, call_id: int, body: ReplyBody) -> None:
        self._outputs.replies.append(Reply(call_id, body))

    def _refuse(self, request_id: str, error: MuralError) -> None:
        self._outputs.deltas.append(
            RequestDelta(
                request_id=request_id,
                finish_reason="error",
                error=error.message,
                error_status=error.status,
            )
        )

    def _add_request(self, message: EngineRequest) -> None:
        length = len(message.prompt_token_ids)
        if not 0 < length < self.info.max_model_len:
            raise InvalidInput(
                f"The prompt has {length} tokens; it must have at least 1 and, to leave room for "
                f"an answer, fewer than the maximum of {self.info.max_model_len}."
            )
        vocab_size = self.info.base_spec.vocab_size
        if not 0 <= min(message.prompt_token_ids) <= max(message.prompt_token_ids) < vocab_size:
            raise InvalidInput(f"Prompt token ids must be in [0, {vocab_size}).")
        check_token_ids(message.sampling, vocab_size)
        if not 0 < message.weight < math.inf:
            raise InvalidInput(
                f"A tenant's weight must be above 0 and finite, not {message.weight}."
            )
        if self._scheduler.get(message.request_id):
            raise InvalidInput(f"Request id {message.request_id} is in use.")
        if message.lora is not None:
            self._require_adapters().want(message.lora, message.tenant)
        self._arrivals += 1
        self._scheduler.add(
            Request.admit(
                message,
                eos_token_ids=self._eos_token_ids,
                entropy=self._entropy,
                arrival=self._arrivals,
                arrived_s=self._clock(),
            )
        )

    def _require_adapters(self) -> Adapters:
        if self._adapters is None:
            raise InvalidInput("This engine was started without LoRA: set enable_lora.")
        return self._adapters

    def _abort(self, request_ids: list[str] | None) -> None:
        wanted = (
            self._scheduler.requests
            if request_ids is None
            else [self._scheduler.get(request_id) for request_id in request_ids]
        )
        for request in wanted:
            if request is not None:
                self._scheduler.finish(request)
                self._outputs.deltas.append(
                    RequestDelta(request_id=request.request_id, finish_reason="abort")
                )

    def _add_lora(self, command: AddLora) -> None:
        adapters = self._require_adapters()
        lora_int_id, in_slot = command.lora.lora_int_id, command.level == "slot"
        if command.pinned and in_slot:
            self._check_pin(lora_int_id)
        adapters.want(command.lora, tenant="", keep=True)
        if command.pinned and in_slot:
            self._scheduler.slots.pin(lora_int_id)
        pin = command.level if command.pinned else None
        self._await_residency(Residency(command.call_id, lora_int_id, in_slot, command.lora, pin))

    def _await_residency(self, residency: Residency) -> None:
        if residency.in_slot:
            # Wanted once even if it is pinned: an unpin meanwhile must not leave the call waiting.
            self._scheduler.slots.want(residency.lora_int_id)
        self._residencies.append(residency)
        # What is there already could be evicted by the next step.
        self._finish_residencies(self._require_adapters())

    def _check_pin(self, lora_int_id: int) -> None:
        slots = self._scheduler.slots
        if lora_int_id not in slots.pinned and len(slots.pinned) + 1 >= slots.num_slots:
            raise Unavailable(
                f"{len(slots.pinned)} of {slots.num_slots} slots are pinned already and one must "
                "stay free for the other adapters: unpin one, or raise max_loras.",
                retry_after_s=None,
            )

    def _pin_lora(self, command: PinLora) -> None:
        adapters = self._require_adapters()
        if not command.pinned:
            self._scheduler.slots.unpin(command.lora_int_id)
            adapters.unpin(command.lora_int_id, "host")
        if not adapters.knows(command.lora_int_id):
            raise AdapterNotFound("The adapter is not resident.")
        if not command.pinned:
            self._reply(command.call_id, AdapterReply(self._info_of(command.lora_int_id)))
            return
        self._check_pin(command.lora_int_id)
        self._scheduler.slots.pin(command.lora_int_id)
        self._await_residency(
            Residency(command.call_id, command.lora_int_id, in_slot=True, pin="slot")
        )

    def _remove_lora(self, command: RemoveLora) -> None:
        self._require_adapters().retire(command.lora_int_id)
        self._fail_residencies(
            command.lora_int_id, AdapterNotFound("The adapter was removed meanwhile.")
        )
        same = [r for r in self._removals if r.lora_int_id == command.lora_int_id]
        deadline = min((r.deadline for r in same), default=math.inf)
        deadline = min(deadline, self._clock() + command.drain_timeout_s)
        for removal in same:
            # One that went on waiting would abort those who ask for the adapter after it is freed.
            removal.deadline = deadline
        self._removals.append(Removal(command.call_id, command.lora_int_id, deadline))

    def _check_lora(self, command: CheckLora) -> None:
        self._checks[command.call_id] = self._require_adapters().check(command.lora)

    # -- steps ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Do what can be done now; False when there was nothing, so that the caller may wait."""
        changed = False
        if self._adapters:
            self._take_loads(self._adapters)
            # Before a slot change may take the place in host memory that one has just got.
            self._finish_residencies(self._adapters)
            self._finish_removals(self._adapters)
            self._finish_checks()
            changed = self._change_slots(self._adapters)
        plan = self._scheduler.schedule()
        if self._adapters:
            self._finish_residencies(self._adapters)
        if not plan.empty:
            self._steps += 1
            self._note_starts(plan)
            self._apply(plan, self._runner.execute(plan))
            self._stats_changed = True
        return changed or not plan.empty

    def _change_slots(self, adapters: Adapters) -> bool:
        """Let adapters change places before the step is planned; whether any did."""
        slots = self._scheduler.slots
        decoding = any(r.remaining == 1 for r in self._scheduler.running)
        limit = MAX_SLOT_CHANGES_WHILE_DECODING if decoding else self.info.max_loras
        changes = self._scheduler.change_slots(adapters.ready, limit)
        failures = adapters.change_slots(changes, in_use=self._in_use())
        for failure in failures.unusable:
            self._fail(failure)
        for lora_int_id in reversed(failures.crowded):
            if not slots.postpone(lora_int_id):
                adapters.give_up(lora_int_id)
                self._fail(AdapterFailure(lora_int_id, _no_room_beside_pinned()))
        # What host memory gave up for a newcomer has lost its slot with it.
        for lora_int_id in slots.holders - adapters.in_slots:
            slots.lose(lora_int_id)
        return bool(changes)

    def _take_loads(self, adapters: Adapters) -> None:
        for failure in adapters.take_loads():
            self._fail(failure)
        slots = self._scheduler.slots
        for lora_int_id in slots.holders - adapters.in_slots:
            slots.lose(lora_int_id)
        for lora_int_id in adapters.without_room:
            # All places are in use: whose turn it is for a slot gets a place with it.
            slots.want(lora_int_id)
        slots.update_demand(self._scheduler.busy_adapters)
        adapters.start_loads(slots.queue, busy=self._scheduler.busy_adapters, in_use=self._in_use())

    def _fail(self, failure: AdapterFailure) -> None:
        """An adapter cannot be used: tell all who asked for it."""
        self._scheduler.slots.forget(failure.lora_int_id)
        for request in self._scheduler.requests_of(failure.lora_int_id):
            self._scheduler.finish(request)
            self._refuse(request.request_id, failure.error)
        self._fail_residencies(failure.lora_int_id, failure.error)
        self._stats_changed = True

    def _in_use(self) -> set[int]:
        slots = self._scheduler.slots
        return {a for a in slots.holders if a in self._scheduler.busy_adapters} | slots.pinned

    def _fail_residencies(self, lora_int_id: int, error: MuralError) -> None:
        for residency in [r for r in self._residencies if r.lora_int_id == lora_int_id]:
            self._residencies.remove(residency)
            self._reply(residency.call_id, CallError.of(error))

    def _finish_residencies(self, adapters: Adapters) -> None:
        holders = self._scheduler.slots.holders
        for residency in self._residencies.copy():
            lora_int_id = residency.lora_int_id
            if lora_int_id in holders or (
                not residency.in_slot and adapters.is_registered(lora_int_id)
            ):
                self._residencies.remove(residency)
                self._finish_residency(adapters, residency)
            elif residency.lora is not None:
                # It may have been evicted as soon as it had come.
                adapters.want(residency.lora, tenant="", keep=True)

    def _finish_residency(self, adapters: Adapters, residency: Residency) -> None:
        lora_int_id, slots = residency.lora_int_id, self._scheduler.slots
        reply: AdapterReply | CallError
        try:
            if residency.pin == "host":
                # What was kept in its slot until now may leave it.
                slots.unpin(lora_int_id)
                adapters.unpin(lora_int_id, "slot")
                adapters.pin(lora_int_id, "host")
            elif lora_int_id in slots.pinned:
                adapters.pin(lora_int_id, "slot")
            reply = AdapterReply(self._info_of(lora_int_id))
        except Conflict as error:
            slots.unpin(lora_int_id)
            reply = CallError.of(Unavailable(error.message, retry_after_s=None))
        self._reply(residency.call_id, reply)
        # With what its coming took the place of, which nobody else tells.
        self._stats_changed = True

    def _finish_removals(self, adapters: Adapters) -> None:
        for removal in self._removals.copy():
            requests = self._scheduler.requests_of(removal.lora_int_id)
            if requests and self._clock() < removal.deadline:
                continue
            self._abort([request.request_id for request in requests])
            self._removals.remove(removal)
            self._reply(removal.call_id, FreedReply(self._free(adapters, removal.lora_int_id)))
            self._stats_changed = True

    def _finish_checks(self) -> None:
        for call_id in [call_id for call_id, check in self._checks.items() if check.done()]:
            error = self._checks.pop(call_id).exception()
            if error is None:
                self._reply(call_id, CheckedReply())
            else:
                refusal = typed(error)
                self._reply(
                    call_id, CallError(refusal.status, refusal.message, refusal.retry_after_s)
                )

    def _free(self, adapters: Adapters, lora_int_id: int) -> FreedBytes:
        self._scheduler.slots.forget(lora_int_id)
        freed = adapters.remove(lora_int_id)
        freed.kv_blocks = self._scheduler.pool.forget_adapter(lora_int_id)
        return freed

    def _note_starts(self, plan: StepPlan) -> None:
        now = self._clock()
        for request, _ in plan.chunks:
            if request.started_s is None:
                request.started_s = now

    def _apply(self, plan: StepPlan, result: StepResult) -> None:
        for chunk in plan.chunks:
            self._prompt_tokens += min(
                chunk.length, max(0, chunk.request.prompt_len - chunk.request.num_computed)
            )
            self._scheduler.computed(chunk)
        for request, logprobs in result.prompt_logprobs:
            request.prompt_logprobs.extend(logprobs)
        for request, token in result.sampled:
            self._emit(request, token)

    def _emit(self, request: Request, token: SampledToken) -> None:
        """Append a sampled token and tell of it; the first one brings the prompt's news."""
        if token.error:
            self._scheduler.finish(request)
            self._refuse(request.request_id, _whose_fault(request, token.error))
            return
        self._scheduler.append(request, token.token_id)
        self._generation_tokens += 1
        first = len(request.output) == 1
        reason, stop_token_id = check_stop(
            request.sampling,
            request.output,
            self._eos_token_ids,
            self.info.max_model_len,
            request.prompt_len,
        ) or (None, None)
        self._outputs.deltas.append(
            RequestDelta(
                request_id=request.request_id,
                token_ids=[token.token_id],
                logprobs=[token.logprobs] if token.logprobs else [],
                prompt_logprobs=request.prompt_logprobs if first else [],
                finish_reason=reason,
                stop_token_id=stop_token_id,
                cached_tokens=request.cached_tokens if first else 0,
                queued_s=(request.started_s or 0.0) - request.arrived_s if first else 0.0,
                step=self._steps,
            )
        )
        if reason:
            self._scheduler.finish(request)

    # -- what it tells -------------------------------------------------------------------------

    def take_outputs(self) -> Outputs | None:
        """The news since the last call, with a snapshot of the state now and then.

        A snapshot comes at least every `HEARTBEAT_S` (if this is called as often), so that
        silence means that the core stands still.
        """
        now = self._clock()
        silent_s = now - self._stats_at
        if silent_s >= HEARTBEAT_S or (
            self._stats_changed
            and (silent_s >= STATS_INTERVAL_S or not self._scheduler.num_unfinished)
        ):
            self._outputs.stats = self.stats()
            self._stats_at = now
            self._stats_changed = False
        outputs = self._outputs
        if not outputs.deltas and not outputs.replies and outputs.stats is None:
            return None
        self._outputs = Outputs()
        return outputs

    def stats(self) -> EngineStats:
        requests = self._scheduler.requests
        running = [r for r in requests if r.state is State.RUNNING]
        queued = [r for r in requests if r.state is not State.RUNNING]
        pool = self._scheduler.pool
        return EngineStats(
            running=len(running),
            waiting=sum(r.state is State.WAITING for r in queued),
            paused=sum(r.state is State.PAUSED for r in queued),
            kv_usage=pool.usage,
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            prefix_queries=pool.prefix_queries,
            prefix_hits=pool.prefix_hits,
            preemptions=self._scheduler.preemptions,
            steps=self._steps,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            slots=self._scheduler.slots.num_slots,
            running_adapters=_names(running),
            waiting_adapters=_names(queued),
            adapters=self._infos(requests) if self._adapters else [],
        )

    def _infos(self, requests: Iterable[Request]) -> list[AdapterInfo]:
        assert self._adapters is not None
        # One pass over the requests, whatever the number of adapters: a step waits for this.
        by_adapter: dict[int, list[Request]] = {}
        for request in requests:
            by_adapter.setdefault(request.lora_int_id, []).append(request)
        return [self._info_of(i, by_adapter.get(i, ())) for i in sorted(self._adapters.registered)]

    def _info_of(self, lora_int_id: int, own: Collection[Request] | None = None) -> AdapterInfo:
        assert self._adapters is not None
        if own is None:
            own = self._scheduler.requests_of(lora_int_id)
        running = sum(r.state is State.RUNNING for r in own)
        return self._adapters.info(
            lora_int_id,
            level="slot" if lora_int_id in self._scheduler.slots.holders else "host",
            pinned=self._adapters.is_pinned(lora_int_id)
            or lora_int_id in self._scheduler.slots.pinned,
            running=running,
            waiting=len(own) - running,
        )

    def _integrity_fault(self) -> str:
        try:
            self._scheduler.check_integrity()
            if self._adapters:
                self._adapters.check_integrity(self._scheduler.slots.holders)
        except AssertionError as error:
            return str(error) or "an assertion failed"
        return ""


def _no_room_beside_pinned() -> Unavailable:
    return Unavailable(
        "The host memory for adapters is full, and what is left of it is pinned: unpin an adapter, "
        "or raise max_cpu_lora_bytes."
    )


def _whose_fault(request: Request, error: MuralError) -> MuralError:
    """Weights of an adapter can be finite and yet make the sum overflow: its owner's fault."""
    if request.lora is None:
        return error
    return UnusableAdapter(f"Under the adapter {request.lora.lora_name}, {error.message}.")


def _names(requests: Iterable[Request]) -> list[str]:
    return sorted({r.lora.lora_name for r in requests if r.lora})
