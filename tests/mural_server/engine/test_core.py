"""The core step by step: who gets a place, what a step costs, what a crowd of adapters does."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mural_resolvers.request import LoRARequest
from mural_server.engine import build
from mural_server.engine.core import EngineCore
from mural_server.engine.messages import EngineRequest, RequestDelta
from mural_server.engine.wire import (
    AdapterReply,
    AddLora,
    AddRequest,
    CallError,
    Command,
    RemoveLora,
    Reply,
)
from mural_server.lora.manager import LoRAModelManager
from mural_server.lora.model import LoRAModel
from mural_server.sampling_params import SamplingParams
from mural_server.settings import EngineSettings

LIMIT = 3000


class InstantLoader:
    """Every adapter is the same folder's weights, in memory of its own, and there at once."""

    def __init__(self, base_spec, options, *, base_digest, nice, eager=True) -> None:
        del nice, eager
        self.loads = 0
        self._read = lambda path: LoRAModel.from_local_checkpoint(
            path, base_spec, options, lora_model_id=1, base_digest=base_digest
        )
        self._model: LoRAModel | None = None

    def submit(self, lora: LoRARequest) -> Future[LoRAModel]:
        self.loads += 1
        if self._model is None:
            self._model = self._read(lora.lora_path)
        future: Future[LoRAModel] = Future()
        future.set_result(replace(self._model, id=lora.lora_int_id, storage=object()))
        return future

    def close(self) -> None:
        """Nothing runs."""


class Driven:
    """A core with its answers."""

    def __init__(self, core: EngineCore, folder: Path) -> None:
        self.core = core
        self.folder = folder
        self.ended: dict[str, RequestDelta] = {}
        self.replies: list[Reply] = []

    @property
    def loader(self) -> InstantLoader:
        assert self.core._adapters is not None
        loader = self.core._adapters._loader
        assert isinstance(loader, InstantLoader)
        return loader

    def lora(self, number: int) -> LoRARequest:
        return LoRARequest(f"t{number}:v1", number, str(self.folder))

    def ask(self, name: str, adapter: int = 0, tokens: int = 8, weight: float = 1.0) -> None:
        self.handle(
            AddRequest(
                EngineRequest(
                    request_id=name,
                    prompt_token_ids=[5, 6, 7, 8],
                    sampling=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
                    lora=self.lora(adapter) if adapter else None,
                    tenant=f"t{adapter}",
                    weight=weight,
                )
            )
        )

    def handle(self, command: Command) -> None:
        self.core.handle(command)

    def step(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.core.step()
            outputs = self.core.take_outputs()
            if outputs is not None:
                self.replies += outputs.replies
                self.ended |= {d.request_id: d for d in outputs.deltas if d.finish_reason}

    def run(self) -> None:
        for _ in range(LIMIT):
            if not self.core.has_work:
                assert self.core._integrity_fault() == ""
                return
            self.step()
        raise AssertionError("the core does not get on")


@pytest.fixture
def start(
    tiny_model: Callable[[str], Path], peft_oracle, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Driven]:
    """``start(**settings)``: a core whose loads end at once."""
    monkeypatch.setattr(build, "AdapterLoader", InstantLoader)

    def make(**settings: Any) -> Driven:
        options: dict[str, Any] = {
            "dtype": "float32",
            "cpu_threads": 1,
            "kv_cache_memory_bytes": 4 << 20,
            "max_loras": 2,
            "max_cpu_loras": 4,
            "max_lora_rank": 16,
        }
        core = build.build_core(
            EngineSettings(model=str(tiny_model("llama")), **options | settings)
        )
        return Driven(core, peft_oracle("llama").folder("all"))

    return make


@pytest.fixture
def adapter_bytes(start: Callable[..., Driven]) -> int:
    driven = start()
    driven.ask("r", 1)
    driven.run()
    return driven.core.stats().adapters[0].bytes


def test_adapters_that_host_memory_holds_only_in_part_take_turns(
    start: Callable[..., Driven], adapter_bytes: int
) -> None:
    driven = start(
        max_loras=4, max_cpu_lora_bytes=int(2.5 * adapter_bytes), adapter_quantum_tokens=4
    )
    for adapter in range(1, 6):
        driven.ask(f"r{adapter}", adapter, tokens=20)
    driven.run()
    assert {name: delta.finish_reason for name, delta in driven.ended.items()} == {
        f"r{adapter}": "length" for adapter in range(1, 6)
    }


def test_a_call_for_an_adapter_that_has_no_room_yet_waits_for_the_end_of_a_turn(
    start: Callable[..., Driven], adapter_bytes: int
) -> None:
    driven = start(
        max_loras=4, max_cpu_lora_bytes=int(2.5 * adapter_bytes), adapter_quantum_tokens=4
    )
    driven.ask("r1", 1, tokens=60)
    driven.ask("r2", 2, tokens=60)
    driven.step(3)
    driven.handle(AddLora(7, driven.lora(3), "slot", pinned=False))
    driven.run()
    [reply] = driven.replies
    assert isinstance(reply.body, AdapterReply)
    assert {d.finish_reason for d in driven.ended.values()} == {"length"}


def test_an_adapter_for_which_pins_leave_no_room_is_refused_at_once(
    start: Callable[..., Driven], adapter_bytes: int
) -> None:
    driven = start(max_loras=4, max_cpu_lora_bytes=int(1.5 * adapter_bytes))
    driven.handle(AddLora(1, driven.lora(1), "slot", pinned=True))
    driven.step(3)
    driven.ask("r2", 2)
    driven.handle(AddLora(2, driven.lora(3), "slot", pinned=False))
    driven.run()
    assert driven.ended["r2"].error_status == 503
    assert isinstance(driven.replies[-1].body, CallError)
    driven.ask("r1", 1)
    driven.run()
    assert driven.ended["r1"].finish_reason == "length"


def test_what_is_pinned_in_host_memory_is_never_read_again_and_takes_no_slot(
    start: Callable[..., Driven],
) -> None:
    driven = start(max_loras=2, max_cpu_loras=4)
    for adapter in (1, 2, 3):
        driven.handle(AddLora(adapter, driven.lora(adapter), "host", pinned=True))
    driven.run()
    infos = [reply.body.info for reply in driven.replies if isinstance(reply.body, AdapterReply)]
    assert [(info.level, info.pinned) for info in infos] == [("host", True)] * 3
    loads = driven.loader.loads
    for place, adapter in enumerate((4, 5, 6, 1, 2, 3)):
        driven.ask(f"r{place}", adapter)
        driven.run()
    assert driven.loader.loads == loads + 3
    assert {d.finish_reason for d in driven.ended.values()} == {"length"}


def test_what_an_adapter_takes_the_place_of_is_told_with_it_not_by_the_next_heartbeat(
    start: Callable[..., Driven],
) -> None:
    driven = start(max_loras=1, max_cpu_loras=2)
    told: set[int] = set()
    for adapter in (1, 2, 3):
        driven.handle(AddLora(adapter, driven.lora(adapter), "host", pinned=False))
        while driven.core.has_work:
            driven.core.step()
            outputs = driven.core.take_outputs()
            if outputs is not None and outputs.stats is not None:
                told = {info.lora_int_id for info in outputs.stats.adapters}
    assert told == {2, 3}


def test_a_pin_that_leaves_no_place_to_others_is_refused_and_the_adapter_stays_unpinned(
    start: Callable[..., Driven],
) -> None:
    driven = start(max_loras=2, max_cpu_loras=2)
    for adapter in (1, 2):
        driven.handle(AddLora(adapter, driven.lora(adapter), "host", pinned=True))
    driven.run()
    [first, second] = [reply.body for reply in driven.replies]
    assert isinstance(first, AdapterReply)
    assert isinstance(second, CallError)
    pinned = {info.lora_int_id for info in driven.core.stats().adapters if info.pinned}
    assert pinned == {1}


def test_a_pin_moves_from_the_slot_to_host_memory_when_that_is_asked_for(
    start: Callable[..., Driven],
) -> None:
    driven = start(max_loras=2, max_cpu_loras=4)
    driven.handle(AddLora(1, driven.lora(1), "slot", pinned=True))
    driven.run()
    driven.handle(AddLora(2, driven.lora(1), "host", pinned=True))
    driven.run()
    for place, adapter in enumerate((2, 3)):
        driven.ask(f"r{place}", adapter)
    driven.run()
    [info] = [info for info in driven.core.stats().adapters if info.lora_int_id == 1]
    assert (info.level, info.pinned) == ("host", True)


@pytest.mark.parametrize("max_cpu_loras", [2, 3, 4, 6, 12])
def test_an_adapter_is_loaded_once_a_turn_at_most(
    start: Callable[..., Driven], max_cpu_loras: int
) -> None:
    driven = start(max_loras=2, max_cpu_loras=max_cpu_loras, adapter_quantum_tokens=4)
    for adapter in range(1, 31):
        driven.ask(f"r{adapter}", adapter, tokens=8)
    driven.run()
    assert {d.finish_reason for d in driven.ended.values()} == {"length"}
    # The prompt's step and two quanta: each adapter has at most three turns.
    assert driven.loader.loads <= 3 * 30


def test_a_step_costs_no_more_for_the_calls_that_wait(
    start: Callable[..., Driven], monkeypatch: pytest.MonkeyPatch
) -> None:
    listings = 0
    list_adapters = LoRAModelManager.list_adapters

    def counted(manager: LoRAModelManager) -> dict[int, LoRAModel]:
        nonlocal listings
        listings += 1
        return list_adapters(manager)

    driven = start()
    monkeypatch.setattr(driven.loader, "submit", lambda lora: Future())
    monkeypatch.setattr(LoRAModelManager, "list_adapters", counted)

    def listings_of_a_step() -> int:
        nonlocal listings
        listings = 0
        driven.core.step()
        return listings

    driven.handle(AddLora(0, driven.lora(1), "host", pinned=False))
    with_one = listings_of_a_step()
    for call in range(1, 50):
        driven.handle(AddLora(call, driven.lora(1 + call), "host", pinned=False))
    assert listings_of_a_step() <= 2 * with_one


def test_the_state_counts_each_adapters_requests(start: Callable[..., Driven]) -> None:
    driven = start(max_num_seqs=2)
    for place in range(3):
        driven.ask(f"one-{place}", 1, tokens=50)
    driven.ask("base", 0, tokens=50)
    driven.ask("two", 2, tokens=50)
    driven.step(4)
    stats = driven.core.stats()
    counts = {info.lora_int_id: info.running + info.waiting for info in stats.adapters}
    assert counts == {1: 3, 2: 1}
    of_adapters = sum(info.running for info in stats.adapters)
    assert stats.running - of_adapters in (0, 1)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_that_is_no_share_is_refused(start: Callable[..., Driven], weight: float) -> None:
    driven = start()
    driven.ask("r", weight=weight)
    driven.step()
    assert driven.ended["r"].error_status == 400


def test_unloads_of_one_adapter_end_with_the_shortest(
    start: Callable[..., Driven],
) -> None:
    driven = start()
    driven.ask("r", 1, tokens=100)
    driven.step(3)
    driven.handle(RemoveLora(1, 1, 1e9))
    driven.handle(RemoveLora(2, 1, 0.0))
    driven.step()
    assert sorted(reply.call_id for reply in driven.replies) == [1, 2]
    assert driven.ended["r"].finish_reason == "abort"
    driven.ask("again", 1)
    driven.run()
    assert driven.ended["again"].finish_reason == "length"
