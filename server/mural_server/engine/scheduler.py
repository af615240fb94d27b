"""What runs in the next step.

Continuous batching with chunked prefill as in Orca and Sarathi-Serve, shares between tenants by
virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", 2024), slots
shared by turns (`SlotShare`), and rows shared between groups by the same quantum: a group is one
tenant's requests under one adapter, within it requests are served in order of arrival.

Memory goes by arrival: a request may take the blocks of a later one, never of an earlier one, so
the oldest always finishes and preemption cannot go round in circles.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from mural_server.engine.block_pool import BlockPool
from mural_server.engine.request import GroupKey, Request, State
from mural_server.engine.slot_share import SlotChange, SlotShare

OUTPUT_TOKEN_COST = 2.0
"""An output token counts as so many prompt tokens in a tenant's share, as in the VTC paper."""


class Chunk(NamedTuple):
    """``length`` tokens of a request from ``request.num_computed`` on."""

    request: Request
    length: int


@dataclass(slots=True)
class StepPlan:
    """Decodes (one token each, whose KV before it is there) first, then prompt chunks."""

    decodes: list[Request] = field(default_factory=list)
    prefills: list[Chunk] = field(default_factory=list)

    @property
    def chunks(self) -> Iterator[Chunk]:
        for request in self.decodes:
            yield Chunk(request, 1)
        yield from self.prefills

    @property
    def empty(self) -> bool:
        return not self.decodes and not self.prefills

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.prefills)


@dataclass(slots=True, eq=False)
class Group:
    """One tenant's unfinished requests under one adapter."""

    key: GroupKey
    running: int = 0
    queued: list[Request] = field(default_factory=list)
    """Waiting or paused, by arrival."""

    @property
    def size(self) -> int:
        return self.running + len(self.queued)


class Scheduler:
    """Owns the requests' states and the block pool; pure but for them: no tensors, no clock."""

    def __init__(
        self,
        pool: BlockPool,
        slots: SlotShare,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_chunked_prefill: bool = True,
    ) -> None:
        self.pool = pool
        self.slots = slots
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.enable_chunked_prefill = enable_chunked_prefill
        self.running: list[Request] = []
        self.step = 0
        self.preemptions = 0
        self._requests: dict[str, Request] = {}
        self._groups: dict[GroupKey, Group] = {}
        self._busy: dict[int, int] = {}
        """Adapter → unfinished requests."""
        self._virtual_time: dict[str, float] = {}
        self._tenant_size: dict[str, int] = {}

    # -- requests come and go ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        request.waiting_since = self.step
        self._requests[request.request_id] = request
        tenant = request.group.tenant
        if not self._tenant_size.get(tenant):
            self._lift(tenant)
        self._tenant_size[tenant] = self._tenant_size.get(tenant, 0) + 1
        group = self._groups.setdefault(request.group, Group(request.group))
        group.queued.append(request)
        if request.lora_int_id:
            self._busy[request.lora_int_id] = self._busy.get(request.lora_int_id, 0) + 1

    def _lift(self, tenant: str) -> None:
        """A tenant that was away must not have saved up service (VTC's counter lift)."""
        if not self._tenant_size:
            self._virtual_time = {tenant: 0.0}
            return
        least = min(self._share(t) for t in self._tenant_size)
        own = max(self._share(tenant), least)
        # Whoever is away with no more than the least would be lifted to it anyway.
        self._virtual_time = {t: v for t, v in self._virtual_time.items() if v > least} | {
            t: self._share(t) for t in self._tenant_size
        }
        self._virtual_time[tenant] = own

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def finish(self, request: Request) -> None:
        """Take a request out, whatever its state, and free its blocks."""
        if request.state is State.FINISHED:
            return
        group = self._groups[request.group]
        if request.state is State.RUNNING:
            self.running.remove(request)
            group.running -= 1
        else:
            group.queued.remove(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.state = State.FINISHED
        del self._requests[request.request_id]
        if not group.size:
            del self._groups[request.group]
        self._leave(request)

    def _leave(self, request: Request) -> None:
        tenant = request.group.tenant
        self._tenant_size[tenant] -= 1
        if not self._tenant_size[tenant]:
            del self._tenant_size[tenant]
        if request.lora_int_id:
            self._busy[request.lora_int_id] -= 1
            if not self._busy[request.lora_int_id]:
                del self._busy[request.lora_int_id]

    @property
    def busy_adapters(self) -> Set[int]:
        """Adapters with unfinished requests."""
        return self._busy.keys()

    def requests_of(self, lora_int_id: int) -> list[Request]:
        return [r for r in self._requests.values() if r.lora_int_id == lora_int_id]

    @property
    def requests(self) -> list[Request]:
        return list(self._requests.values())

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    # -- one step ------------------------------------------------------------------------------

    def change_slots(self, ready_adapters: Set[int], max_changes: int) -> list[SlotChange]:
        """Decide who gets a slot for the next step; the caller copies the weights.

        ``ready_adapters`` have their weights in host memory.
        """
        self.slots.update_demand(self.busy_adapters)
        return self.slots.plan(self.busy_adapters, ready_adapters, max_changes)

    def schedule(self) -> StepPlan:
        """Decide the next step."""
        self.step += 1
        plan = StepPlan()
        for request in [r for r in self.running if not self._has_slot(r)]:
            self._pause(request)
        self._share_rows()
        budget = self._continue_running(plan)
        self._start_queued(plan, budget)
        self.slots.count_step(self.busy_adapters)
        return plan

    def _has_slot(self, request: Request) -> bool:
        return not request.lora_int_id or request.lora_int_id in self.slots.holders

    def _share_rows(self) -> None:
        """With all rows taken, a group that has none gets one of the group that has most."""
        if len(self.running) < self.max_num_seqs:
            return
        starved = [
            g
            for g in self._groups.values()
            if g.queued
            and not g.running
            and self._has_slot(g.queued[0])
            and self.step - g.queued[0].waiting_since >= self.slots.quantum
        ]
        if not starved:
            return
        head = min(starved, key=self._group_order).queued[0]
        over = [
            r
            for r in self.running
            if r.turn_steps >= self.slots.quantum
            and self._share(r.group.tenant) >= self._share(head.group.tenant)
        ]
        if over:
            self._pause(max(over, key=lambda r: (self._groups[r.group].running, r.turn_steps)))

    def _continue_running(self, plan: StepPlan) -> int:
        """Give every running request its next token or chunk; returns the budget left."""
        budget = self.max_num_batched_tokens
        for request in sorted(self.running, key=lambda r: (r.remaining > 1, r.arrival)):
            if request.state is not State.RUNNING:
                continue
            count = self._chunk_size(request, budget)
            if not count:
                continue
            if self._grow(request, count, plan):
                budget -= count
                self._put(plan, request, count)
            else:
                # Earlier requests hold the memory; the row is of more use to one of them.
                self._pause(request)
        return budget if self.enable_chunked_prefill else self.max_num_batched_tokens

    def _start_queued(self, plan: StepPlan, budget: int) -> None:
        """Let queued requests run while rows, tokens and blocks last, fairest first.

        One that finds no room keeps those that came later from taking what is freed for it.
        """
        without_room = math.inf
        heads = [
            (self._group_order(g), g)
            for g in self._groups.values()
            if g.queued and self._has_slot(g.queued[0])
        ]
        heapq.heapify(heads)
        while heads and budget > 0 and len(self.running) < self.max_num_seqs:
            _, group = heapq.heappop(heads)
            request = group.queued[0]
            if request.arrival > without_room:
                continue
            count = self._begin(request, budget, plan)
            if not count:
                without_room = request.arrival
                continue
            budget -= count
            self._put(plan, request, count)
            if group.queued:
                heapq.heappush(heads, (self._group_order(group), group))

    def _group_order(self, group: Group) -> tuple[float, bool, int]:
        """The least served tenant, then groups without a row, then the oldest request."""
        return (self._share(group.key.tenant), group.running > 0, group.queued[0].arrival)

    def _share(self, tenant: str) -> float:
        return self._virtual_time.get(tenant, 0.0)

    def _begin(self, request: Request, budget: int, plan: StepPlan) -> int:
        """Make a queued request run; returns its tokens in this step, 0 if it does not fit."""
        if request.state is State.WAITING:
            return self._begin_waiting(request, budget, plan)
        count = self._chunk_size(request, budget)
        if not count or not self._grow(request, count, plan):
            return 0
        self._run(request)
        return count

    def _begin_waiting(self, request: Request, budget: int, plan: StepPlan) -> int:
        matched = self._match_prefix(request)
        cached = len(matched) * self.pool.block_size
        count = self._chunk_size(request, budget, computed=cached)
        if not count:
            return 0
        self.pool.take(matched)
        request.blocks = matched
        request.num_computed = cached
        if not self._grow(request, count, plan):
            self.pool.release(matched)
            request.blocks = []
            request.num_computed = 0
            return 0
        if self.pool.enable_prefix_caching and not request.first_scheduled:
            self.pool.prefix_queries += len(request.tokens)
            self.pool.prefix_hits += cached
            request.cached_tokens = cached
        request.first_scheduled = True
        self._run(request)
        return count

    def _match_prefix(self, request: Request) -> list[int]:
        if not self.pool.enable_prefix_caching or request.wants_prompt_logprobs:
            return []
        request.update_hashes(self.pool.block_size)
        # The last token is always computed: its logits are wanted.
        return self.pool.match(
            request.block_hashes, (len(request.tokens) - 1) // self.pool.block_size
        )

    def _chunk_size(self, request: Request, budget: int, computed: int | None = None) -> int:
        done = request.num_computed if computed is None else computed
        remaining = len(request.tokens) - done
        if remaining <= budget:
            return remaining
        return budget if self.enable_chunked_prefill else 0

    def _grow(self, request: Request, count: int, plan: StepPlan) -> bool:
        """Get the blocks for ``count`` more tokens, preempting later requests if need be."""
        size = self.pool.block_size
        missing = -(-(request.num_computed + count) // size) - len(request.blocks)
        if missing > self.pool.num_free:
            self._make_room(request, missing, plan)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            request.blocks.extend(self.pool.allocate(missing))
        return True

    def _make_room(self, request: Request, missing: int, plan: StepPlan) -> None:
        """Preempt later requests, paused ones first and the latest first, if that is enough."""
        planned = {id(chunk.request) for chunk in plan.chunks}
        later = [
            r
            for r in self._requests.values()
            if r.blocks and r.arrival > request.arrival and id(r) not in planned
        ]
        if self.pool.num_free + sum(len(r.blocks) for r in later) < missing:
            return
        later.sort(key=lambda r: (r.state is State.PAUSED, r.arrival))
        while later and missing > self.pool.num_free:
            self._preempt(later.pop())

    def _preempt(self, request: Request) -> None:
        """Give the blocks back; what was computed is computed again later, or found cached."""
        self.preemptions += 1
        if request.state is State.RUNNING:
            self._pause(request)
        self.pool.release(request.blocks)
        request.blocks = []
        request.num_computed = 0
        request.state = State.WAITING
        if request.wants_prompt_logprobs:
            request.prompt_logprobs = []

    def _pause(self, request: Request) -> None:
        self.running.remove(request)
        group = self._groups[request.group]
        group.running -= 1
        insort(group.queued, request, key=lambda r: r.arrival)
        request.state = State.PAUSED
        request.waiting_since = self.step

    def _run(self, request: Request) -> None:
        group = self._groups[request.group]
        group.queued.remove(request)
        group.running += 1
        request.state = State.RUNNING
        request.turn_steps = 0
        self.running.append(request)

    def _put(self, plan: StepPlan, request: Request, count: int) -> None:
        if count == 1:
            plan.decodes.append(request)
        else:
            plan.prefills.append(Chunk(request, count))

    # -- after the step ------------------------------------------------------------------------

    def computed(self, chunk: Chunk) -> None:
        """A chunk's KV is written: count it and let its full blocks be shared."""
        request, count = chunk
        first = request.num_computed // self.pool.block_size
        request.num_computed += count
        if self.pool.enable_prefix_caching:
            request.update_hashes(self.pool.block_size)
            for index in range(first, request.num_computed // self.pool.block_size):
                self.pool.publish(
                    request.blocks[index], request.block_hashes[index], request.lora_int_id
                )
        self._charge(request, count)

    def append(self, request: Request, token_id: int) -> None:
        """A token was sampled."""
        request.append(token_id)
        request.turn_steps += 1
        self._charge(request, OUTPUT_TOKEN_COST)

    def _charge(self, request: Request, cost: float) -> None:
        tenant = request.group.tenant
        self._virtual_time[tenant] = self._share(tenant) + cost / request.weight

    def check_integrity(self) -> None:
        """Raise `AssertionError` when states, groups, slots or blocks disagree."""
        self.pool.check_integrity(r.blocks for r in self._requests.values())
        self.slots.check_integrity()
        assert len(self.running) <= self.max_num_seqs, "more rows than max_num_seqs"
        for request in self._requests.values():
            is_running = request in self.running
            assert is_running == (request.state is State.RUNNING), "running list disagrees"
            queued = request in self._groups[request.group].queued
            assert queued != is_running, "a request is in no queue or in two"
            assert bool(request.blocks) or request.state is State.WAITING or not is_running
            assert request.state is not State.WAITING or not request.blocks, "waiting with blocks"
        for group in self._groups.values():
            assert group.size, "an empty group is kept"
            assert group.running == sum(r.group == group.key for r in self.running)
            arrivals = [r.arrival for r in group.queued]
            assert arrivals == sorted(arrivals), "a queue is out of order"
        assert sum(self._tenant_size.values()) == len(self._requests)
