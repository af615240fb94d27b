"""What runs when: budgets, fairness, preemption, pauses. A counter stands in for the model."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mural_resolvers.request import LoRARequest
from mural_server.engine.block_pool import BlockPool
from mural_server.engine.messages import EngineRequest
from mural_server.engine.request import Request, State
from mural_server.engine.scheduler import Scheduler, StepPlan
from mural_server.engine.slot_share import SlotShare
from mural_server.sampling_params import SamplingParams


def scheduler_of(
    *,
    blocks: int = 64,
    slots: int = 2,
    quantum: int = 4,
    rows: int = 4,
    tokens: int = 16,
    chunked: bool = True,
    caching: bool = True,
) -> Scheduler:
    return Scheduler(
        BlockPool(blocks, 4, enable_prefix_caching=caching),
        SlotShare(slots, quantum),
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        enable_chunked_prefill=chunked,
    )


@dataclass
class Loop:
    """Drives a scheduler; a request ends after ``max_tokens`` outputs."""

    scheduler: Scheduler
    arrivals: int = 0
    step_of_token: dict[str, list[int]] = field(default_factory=dict)
    finished: dict[str, list[int]] = field(default_factory=dict)

    def add(
        self,
        name: str,
        prompt: int | list[int] = 4,
        *,
        output: int = 4,
        adapter: int = 0,
        tenant: str = "",
        weight: float = 1.0,
    ) -> Request:
        self.arrivals += 1
        ids = (
            prompt
            if isinstance(prompt, list)
            else [self.arrivals * 1000 + i for i in range(prompt)]
        )
        message = EngineRequest(
            request_id=name,
            prompt_token_ids=ids,
            sampling=SamplingParams(max_tokens=output),
            lora=LoRARequest(f"a{adapter}", adapter, "/nowhere") if adapter else None,
            tenant=tenant,
            weight=weight,
        )
        request = Request.admit(
            message, eos_token_ids=(), entropy=random.Random(0), arrival=self.arrivals
        )
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan:
        self.scheduler.change_slots(self.scheduler.busy_adapters, 1)
        plan = self.scheduler.schedule()
        self.check(plan)
        for chunk in plan.chunks:
            complete = chunk.request.remaining == chunk.length
            self.scheduler.computed(chunk)
            if complete:
                self.sample(chunk.request)
        self.scheduler.check_integrity()
        return plan

    def check(self, plan: StepPlan) -> None:
        scheduler = self.scheduler
        requests = [chunk.request for chunk in plan.chunks]
        assert len(requests) == len({id(r) for r in requests}) <= scheduler.max_num_seqs
        adapters = {r.lora_int_id for r in requests} - {0}
        assert adapters <= set(scheduler.slots.holders)
        assert len(adapters) <= scheduler.slots.num_slots
        for request, count in plan.chunks:
            size = scheduler.pool.block_size
            assert len(request.blocks) * size >= request.num_computed + count

    def sample(self, request: Request) -> None:
        # A token that tells whose it is and where, so that lost or doubled ones show.
        self.scheduler.append(request, request.arrival * 1000 + len(request.tokens))
        self.step_of_token.setdefault(request.request_id, []).append(self.scheduler.step)
        if len(request.output) == request.sampling.max_tokens:
            self.finished[request.request_id] = request.output
            self.scheduler.finish(request)

    def run(self, until: Callable[[], bool] | None = None, limit: int = 3000) -> None:
        for _ in range(limit):
            if until() if until else not self.scheduler.num_unfinished:
                return
            self.step()
        raise AssertionError("the scheduler does not get on")


def test_prompts_are_cut_to_the_budget_and_mixed_with_decodes() -> None:
    loop = Loop(scheduler_of(tokens=8))
    loop.add("short", 3)
    loop.add("long", 12)
    first = loop.step()
    assert [(c.request.request_id, c.length) for c in first.chunks] == [("short", 3), ("long", 5)]
    second = loop.step()
    assert [r.request_id for r in second.decodes] == ["short"]
    assert [(c.request.request_id, c.length) for c in second.prefills] == [("long", 7)]


def test_without_chunked_prefill_a_prompt_runs_whole() -> None:
    loop = Loop(scheduler_of(tokens=16, chunked=False))
    loop.add("a", 10)
    loop.add("b", 10)
    assert [c.length for c in loop.step().chunks] == [10]
    assert [c.length for c in loop.step().chunks] == [1, 10]


def test_a_known_prefix_is_not_computed_again() -> None:
    loop = Loop(scheduler_of(tokens=32))
    loop.add("first", list(range(12)))
    loop.run()
    loop.add("second", list(range(12)))
    [chunk] = loop.step().chunks
    # The block with the last token is computed, since its logits are wanted.
    assert (chunk.request.cached_tokens, chunk.length) == (8, 4)
    assert loop.scheduler.pool.prefix_hits == 8


def test_a_prefix_is_not_shared_between_adapters() -> None:
    loop = Loop(scheduler_of(tokens=32))
    loop.add("first", list(range(12)), adapter=1)
    loop.run()
    loop.add("second", list(range(12)), adapter=2)
    loop.run()
    assert loop.scheduler.pool.prefix_hits == 0


def test_when_memory_ends_the_latest_is_preempted_and_loses_nothing() -> None:
    loop = Loop(scheduler_of(blocks=9, caching=False))
    for name in "ab":
        loop.add(name, 8, output=16)
    loop.run()
    assert loop.scheduler.preemptions > 0
    assert {name: len(output) for name, output in loop.finished.items()} == {"a": 16, "b": 16}
    assert loop.step_of_token["a"][-1] < loop.step_of_token["b"][-1]


def test_an_adapter_without_a_slot_is_not_overtaken_for_ever() -> None:
    loop = Loop(scheduler_of(slots=1, quantum=4))
    loop.add("hot-0", output=50, adapter=1)
    loop.step()
    loop.add("cold", output=2, adapter=2)
    for i in range(1, 40):
        loop.add(f"hot-{i}", output=50, adapter=1)
        loop.step()
    assert "cold" in loop.finished


def test_a_paused_request_keeps_its_blocks_and_goes_on_where_it_was() -> None:
    loop = Loop(scheduler_of(slots=1, quantum=2))
    paused = loop.add("a", 8, output=12, adapter=1)
    loop.step()
    loop.add("b", 8, output=12, adapter=2)
    loop.run(lambda: paused.state is State.PAUSED)
    kept, computed = list(paused.blocks), paused.num_computed
    loop.run(lambda: paused.state is State.RUNNING)
    assert paused.blocks[: len(kept)] == kept
    assert paused.num_computed >= computed
    loop.run()
    assert loop.scheduler.preemptions == 0
    assert len(loop.finished["a"]) == len(loop.finished["b"]) == 12


def test_a_group_without_a_row_gets_one_though_all_are_taken() -> None:
    loop = Loop(scheduler_of(rows=2, quantum=3))
    for i in range(4):
        loop.add(f"base-{i}", output=100, tenant="big")
    loop.step()
    loop.add("small", output=1, tenant="small")
    loop.run(lambda: "small" in loop.finished, limit=12)


def test_tenants_are_served_by_their_weights() -> None:
    loop = Loop(scheduler_of(rows=4, tokens=8, quantum=2, blocks=400))
    for i in range(40):
        loop.add(f"one-{i}", 8, output=8, tenant="one", weight=1.0)
        loop.add(f"three-{i}", 8, output=8, tenant="three", weight=3.0)
    for _ in range(80):
        loop.step()
    served = {
        tenant: sum(len(s) for n, s in loop.step_of_token.items() if n.startswith(tenant))
        for tenant in ("one", "three")
    }
    assert 2.0 < served["three"] / served["one"] < 4.0


def test_a_tenant_that_was_away_has_saved_up_nothing() -> None:
    loop = Loop(scheduler_of(rows=2, blocks=400))
    loop.add("early", output=1, tenant="idler")
    loop.run()
    for i in range(20):
        loop.add(f"busy-{i}", output=8, tenant="busy")
    for _ in range(20):
        loop.step()
    for i in range(20):
        loop.add(f"idler-{i}", output=8, tenant="idler")
    served_before = len(loop.finished)
    loop.run(lambda: len(loop.finished) >= served_before + 8)
    names = [n.split("-")[0] for n in list(loop.finished)[served_before:]]
    assert names.count("busy") >= 2


@pytest.mark.parametrize("tenant", ["small", "big"])
def test_a_long_prompt_is_not_starved_of_memory_by_later_short_ones(tenant: str) -> None:
    loop = Loop(scheduler_of(blocks=33, rows=6, tokens=128, chunked=False, caching=False))
    names = itertools.count()

    def fill() -> None:
        while loop.scheduler.num_unfinished < 8:
            i = next(names)
            loop.add(f"s{i}", 24, output=12, tenant="small", adapter=1 + i % 2)

    for _ in range(10):
        fill()
        loop.step()
    loop.add("long", 100, output=4, tenant=tenant)
    for _ in range(60):
        fill()
        loop.step()
    assert "long" in loop.finished


def test_with_memory_full_a_step_tries_one_queued_request_not_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = Loop(scheduler_of(blocks=40, rows=16, tokens=64))
    loop.add("first", 140, output=8)
    for _ in range(3):
        loop.step()
    for i in range(200):
        loop.add(f"q{i}", 100, tenant=f"t{i}")
    tries: list[str] = []
    begin = Scheduler._begin

    def counted(scheduler: Scheduler, request: Request, budget: int, plan: StepPlan) -> int:
        tries.append(request.request_id)
        return begin(scheduler, request, budget, plan)

    monkeypatch.setattr(Scheduler, "_begin", counted)
    loop.step()
    assert tries == ["q0"]


def test_aborting_frees_the_blocks_at_once() -> None:
    loop = Loop(scheduler_of(blocks=8))
    request = loop.add("a", 12)
    loop.step()
    assert loop.scheduler.pool.num_free < 7
    loop.scheduler.finish(request)
    assert loop.scheduler.pool.num_free == 7
    loop.scheduler.check_integrity()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 30),
            st.integers(1, 12),
            st.integers(0, 6),
            st.integers(0, 2),
            st.integers(0, 3),
            st.booleans(),
        ),
        min_size=1,
        max_size=25,
    ),
    st.integers(12, 40),
    st.integers(1, 3),
    st.booleans(),
)
def test_everything_finishes_whole_and_nothing_leaks(
    arrivals: list[tuple[int, int, int, int, int, bool]], blocks: int, slots: int, caching: bool
) -> None:
    """Random arrivals and aborts under little memory: all the rest gets all of its tokens."""
    loop = Loop(scheduler_of(blocks=blocks, slots=slots, quantum=3, tokens=8, caching=caching))
    expected: dict[str, int] = {}
    for i, (prompt, output, adapter, tenant, pause, abort) in enumerate(arrivals):
        request = loop.add(
            f"r{i}",
            prompt,
            output=output,
            adapter=adapter,
            tenant=f"t{tenant}",
            weight=1.0 + tenant,
        )
        for _ in range(pause):
            loop.step()
        if abort:
            loop.scheduler.finish(request)
        else:
            expected[request.request_id] = output
    loop.run()
    for name, output in expected.items():
        assert len(loop.finished[name]) == output
    assert loop.scheduler.pool.usage == 0.0


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(2, 10), st.integers(1, 3))
def test_every_adapter_gets_a_token_within_the_stated_number_of_quanta(
    slots: int, quantum: int, adapters: int, per_adapter: int
) -> None:
    """n busy adapters, m slots, rows for all that hold one: at most ceil(n / m) + 1 turns apart.

    A turn is the quantum, a step for each change before it (one a step), and the chunks of the
    group's prompts.
    """
    rows = slots * per_adapter
    loop = Loop(scheduler_of(slots=slots, quantum=quantum, rows=rows, tokens=64, blocks=600))
    for adapter in range(1, adapters + 1):
        for i in range(per_adapter):
            loop.add(f"{adapter}-{i}", 6, output=10_000, adapter=adapter)
    turn = max(quantum, slots) + slots
    bound = (-(-adapters // slots) + 1) * turn
    last = dict.fromkeys(range(1, adapters + 1), 0)
    for _ in range(min(6 * bound, 200)):
        plan = loop.step()
        for request, _count in plan.chunks:
            last[request.lora_int_id] = loop.scheduler.step
        assert all(loop.scheduler.step - seen <= bound for seen in last.values())
