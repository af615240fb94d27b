"""Random use of the whole engine: every answer is PEFT's for the content that was asked for.

The core is driven step by step, its loads end when the test says so, late and in any order, and
folders change their content under names that are in use. Whatever happens, an answer is the
oracle's, or an error that has a cause; nothing waits for ever; the caches agree after every act.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mural_resolvers.directory import DirectoryResolver
from mural_resolvers.errors import MuralError, Unavailable
from mural_resolvers.manifest import build_manifest
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.tenants import ADMIN, Principal
from mural_server.catalog import AdapterCatalog
from mural_server.engine import build
from mural_server.engine.core import EngineCore
from mural_server.engine.local import LocalEngine
from mural_server.engine.messages import EngineRequest, RequestDelta
from mural_server.engine.wire import (
    AbortRequests,
    AdapterReply,
    AddLora,
    AddRequest,
    CallError,
    CheckIntegrity,
    Command,
    FreedReply,
    IntegrityReply,
    PinLora,
    RemoveLora,
    Reply,
    ReplyBody,
)
from mural_server.generation import GenerateRequest, Generator
from mural_server.lora.model import LoRAModel
from mural_server.models.source import fast_backend, load_tokenizer
from mural_server.sampling_params import SamplingParams
from mural_server.settings import EngineSettings

BLOCK_SIZE = 4
MAX_MODEL_LEN = 48
BLOCKS_PER_SEQUENCE = MAX_MODEL_LEN // BLOCK_SIZE
BLOCK_BYTES = 2 * 3 * 2 * BLOCK_SIZE * 16 * 4  # keys and values, layers, heads, head_dim, float32
MAX_TOKENS = 8
EOS_IDS = (2, 0)
MAX_STEPS_TO_END = 3000
"""Far more than any scenario needs: beyond it something waits for ever."""

DRAIN_LONG_S = 1e9

CONTENTS = [(kind, seed) for kind in ("all", "query_value", "patterns") for seed in (0, 1)]
NAMES = ("acme:v1", "acme:v2", "globex:v1", "initech:v1")


def make_prompts() -> list[list[int]]:
    """Prompts that begin alike, so that prefix blocks are shared wherever they may be."""
    draw = random.Random(11)
    shared = [draw.randrange(3, 250) for _ in range(30)]
    return [
        shared[:length] + [draw.randrange(3, 250) for _ in range(tail)]
        for length, tail in ((0, 1), (12, 2), (12, 3), (24, 1), (30, 9), (8, 0))
    ]


PROMPTS = make_prompts()


def blocks_of(prompt: int) -> list[tuple[int, ...]]:
    """The beginnings of a prompt that end with a block."""
    tokens = PROMPTS[prompt]
    return [tuple(tokens[:end]) for end in range(BLOCK_SIZE, len(tokens) + 1, BLOCK_SIZE)]


@dataclass(frozen=True)
class Content:
    """An adapter's files somewhere, and what they are known by."""

    folder: Path
    digest: str


class Truth:
    """What transformers and PEFT answer, for each content and prompt."""

    def __init__(self, oracle) -> None:
        self.model = oracle.path
        self._oracle = oracle
        self.contents = [self._content(kind, seed) for kind, seed in CONTENTS]
        self._folders = {content.digest: content.folder for content in self.contents}

    def _content(self, kind: str, seed: int) -> Content:
        folder = self._oracle.folder(kind, seed)
        return Content(folder, build_manifest(folder).digest)

    def tokens(self, digest: str | None, prompt: int, sampling: SamplingParams) -> list[int]:
        """The greedy answer, to its end."""
        folder = self._folders[digest] if digest else None
        tokens = self._oracle.answer(folder, PROMPTS[prompt], MAX_TOKENS).token_ids
        tokens = tokens[: sampling.max_tokens]
        if sampling.ignore_eos:
            return tokens
        end = next((i for i, token in enumerate(tokens) if token in EOS_IDS), len(tokens))
        return tokens[: end + 1]


@pytest.fixture(scope="module")
def truth(peft_oracle) -> Truth:
    return Truth(peft_oracle("llama"))


class HeldLoader:
    """Reads in this process, when told to: loads end late, in any order, or fail."""

    def __init__(self, base_spec, options, *, base_digest, nice, eager=True) -> None:
        del nice, eager
        self._read = lambda lora: LoRAModel.from_local_checkpoint(
            lora.lora_path, base_spec, options, lora_model_id=lora.lora_int_id,
            expected_digest=lora.digest, base_digest=base_digest,
        )  # fmt: skip
        self._jobs: list[tuple[LoRARequest, Future[LoRAModel]]] = []

    @property
    def pending(self) -> list[tuple[LoRARequest, Future[LoRAModel]]]:
        self._jobs = [(lora, future) for lora, future in self._jobs if not future.cancelled()]
        if self._jobs and not self._jobs[0][1].running():
            self._jobs[0][1].set_running_or_notify_cancel()  # from then on it cannot be cancelled
        return self._jobs

    def submit(self, lora: LoRARequest) -> Future[LoRAModel]:
        self._jobs.append((lora, Future()))
        return self.pending[-1][1]

    def finish(self, place: int) -> None:
        lora, future = self._take(place)
        try:
            future.set_result(self._read(lora))
        except MuralError as error:
            future.set_exception(error)

    def fail(self, place: int) -> int:
        lora, future = self._take(place)
        future.set_exception(Unavailable("The adapter's loader died; try again."))
        return lora.lora_int_id

    def _take(self, place: int) -> tuple[LoRARequest, Future[LoRAModel]]:
        jobs = self.pending
        lora, future = jobs.pop(place % len(jobs))
        if not future.running():
            future.set_running_or_notify_cancel()
        return lora, future

    def close(self) -> None:
        """Nothing runs by itself."""


@dataclass
class Asked:
    """A request as the test knows it."""

    lora: LoRARequest | None
    prompt: int
    sampling: SamplingParams
    wanted: list[int]
    """The oracle's answer; of one that samples, nothing is known."""
    salt: str
    got: list[int] = field(default_factory=list)
    may_abort: bool = False
    ended: str | None = None


class Scenario:
    """Acts on a core, and what must hold after each act."""

    def __init__(self, truth: Truth, root: Path, shape: Mapping[str, object]) -> None:
        self.truth = truth
        self.root = root
        shutil.rmtree(root, ignore_errors=True)
        self.numbers = count()
        self.ids = LoRAIdAllocator()
        self.asked: dict[str, Asked] = {}
        self.calls: dict[int, Command] = {}
        self.replies: list[ReplyBody] = []
        self.beginnings: Counter[tuple[int, str, tuple[int, ...]]] = Counter()
        """How many asked for a prompt's beginning, in whole blocks, under an adapter and salt."""
        self.issued: list[LoRARequest] = []
        self.current: dict[str, LoRARequest] = {}
        self.failed: set[int] = set()
        """Adapters of which a load was made to fail."""
        self.unwanted: set[int] = set()
        """Unloaded, and not asked for since."""

        self._start(**shape)

    def _start(
        self, slots, spare_blocks, max_num_seqs, max_num_batched_tokens, quantum, prefix_caching,
        chunked, contents,
    ) -> None:  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "AdapterLoader", HeldLoader)
            self.core: EngineCore = build.build_core(
                EngineSettings(
                    model=str(self.truth.model),
                    dtype="float32",
                    cpu_threads=1,
                    max_model_len=MAX_MODEL_LEN,
                    block_size=BLOCK_SIZE,
                    kv_cache_memory_bytes=(1 + BLOCKS_PER_SEQUENCE + spare_blocks) * BLOCK_BYTES,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens if chunked else MAX_MODEL_LEN,
                    enable_chunked_prefill=chunked,
                    enable_prefix_caching=prefix_caching,
                    max_loras=slots[0],
                    max_cpu_loras=slots[1],
                    max_lora_rank=16,
                    adapter_quantum_tokens=quantum,
                    seed=0,
                )
            )
        assert self.core._adapters is not None
        self.adapters = self.core._adapters
        assert isinstance(self.adapters._loader, HeldLoader)
        self.loader = self.adapters._loader
        for name, content in zip(NAMES, contents, strict=False):
            self._put(name, content)

    def _put(self, name: str, content: int) -> None:
        """Have the name's folder hold a content, whatever it held."""
        folder = self.root / name
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.truth.contents[content].folder, folder)
        digest = self.truth.contents[content].digest
        lora = LoRARequest(name, self.ids.id_for(digest), str(folder), digest)
        self.current[name] = lora
        self.issued.append(lora)

    def _lies_there(self, lora: LoRARequest) -> bool:
        return self.current[lora.lora_name].digest == lora.digest

    def _tampered(self, lora_int_id: int) -> bool:
        """Whether a name under which the adapter was known leads to other content now."""
        return any(
            lora.lora_int_id == lora_int_id and not self._lies_there(lora) for lora in self.issued
        )

    # -- acts ----------------------------------------------------------------------------------

    def ask(
        self, adapter, stale, prompt, max_tokens, sampled, ignore_eos, tenant, weight, salt, n, then
    ) -> None:
        lora = self.current[NAMES[adapter]] if adapter < len(NAMES) else None
        if lora is not None and stale < 10:
            lora = self.issued[stale % len(self.issued)]
        lora_int_id = lora.lora_int_id if lora else 0
        sampling = SamplingParams(
            temperature=1.5 if sampled else 0.0, max_tokens=max_tokens, ignore_eos=ignore_eos
        )
        wanted = self.truth.tokens(lora.digest if lora else None, prompt, sampling)
        self.unwanted.discard(lora_int_id)
        for _ in range(n):
            request_id = f"r{next(self.numbers)}"
            self.asked[request_id] = Asked(lora, prompt, sampling, wanted, salt)
            self.beginnings.update((lora_int_id, salt, block) for block in blocks_of(prompt))
            self.core.handle(
                AddRequest(
                    EngineRequest(
                        request_id=request_id,
                        prompt_token_ids=PROMPTS[prompt],
                        sampling=sampling,
                        lora=lora,
                        tenant=tenant,
                        weight=weight,
                        salt=salt,
                    )
                )
            )
        self.serve(then)

    def step(self, steps) -> None:
        for _ in range(steps):
            self.core.step()
            self._take_outputs()

    def serve(self, steps) -> None:
        """Steps with a loader that is fast."""
        for _ in range(steps):
            while self.loader.pending:
                self.loader.finish(0)
            self.step(1)

    def finish_load(self, place) -> None:
        if self.loader.pending:
            self.loader.finish(place)

    def fail_load(self, place) -> None:
        if self.loader.pending:
            self.failed.add(self.loader.fail(place))

    def abort(self, place) -> None:
        open_ids = [name for name, asked in self.asked.items() if asked.ended is None]
        if not open_ids:
            return
        request_id = open_ids[place % len(open_ids)]
        self.asked[request_id].may_abort = True
        self.core.handle(AbortRequests([request_id]))

    def replace_in_place(self, name, content) -> None:
        """The name's folder gets other weights, whatever is loaded, waits or runs."""
        self._put(name, content)

    def load(self, name, level, pinned) -> None:
        lora = self.current[name]
        self.unwanted.discard(lora.lora_int_id)
        self._call(lambda i: AddLora(i, lora, level, pinned))

    def unload(self, place, drain_s) -> None:
        lora_int_id = self.issued[place % len(self.issued)].lora_int_id
        if drain_s == 0.0:
            for asked in self.asked.values():
                if asked.lora and asked.lora.lora_int_id == lora_int_id:
                    asked.may_abort = True
        self.unwanted.add(lora_int_id)
        self._call(lambda i: RemoveLora(i, lora_int_id, drain_s))

    def pin(self, place, pinned) -> None:
        known = [info.lora_int_id for info in self.core.stats().adapters]
        lora_int_id = [*known, self.issued[0].lora_int_id][place % (len(known) + 1)]
        self._call(lambda i: PinLora(i, lora_int_id, pinned))

    def _call(self, make) -> None:
        call_id = next(self.numbers)
        self.calls[call_id] = make(call_id)
        self.core.handle(self.calls[call_id])

    # -- what must hold --------------------------------------------------------------------------

    def _take_outputs(self) -> None:
        outputs = self.core.take_outputs()
        if outputs is None:
            return
        for delta in outputs.deltas:
            self._take_delta(delta)
        for reply in outputs.replies:
            self._take_reply(reply)

    def _take_delta(self, delta: RequestDelta) -> None:
        asked = self.asked[delta.request_id]
        assert asked.ended is None, "news of a request that has ended"
        asked.got += delta.token_ids
        asked.ended = delta.finish_reason
        assert delta.cached_tokens <= self._shared(asked), "a prefix that nobody shares with it"
        if asked.sampling.greedy:
            assert asked.got == asked.wanted[: len(asked.got)], f"{asked.lora}: not its weights"
        match delta.finish_reason:
            case "abort":
                assert asked.may_abort
            case "error":
                self._check_error(asked, delta)
            case "stop" | "length" if asked.sampling.greedy:
                assert asked.got == asked.wanted
            case None if asked.sampling.greedy:
                assert len(asked.got) < len(asked.wanted), "it goes on after its end"

    def _shared(self, asked: Asked) -> int:
        """The prompt's tokens that others have, too, under the same adapter and salt."""
        key = (asked.lora.lora_int_id if asked.lora else 0, asked.salt)
        return max(
            (len(b) for b in blocks_of(asked.prompt) if self.beginnings[(*key, b)] > 1), default=0
        )

    def _check_error(self, asked: Asked, delta: RequestDelta) -> None:
        assert asked.lora is not None, delta.error
        lora_int_id = asked.lora.lora_int_id
        causes = {
            404: asked.may_abort or self._is_leaving(lora_int_id),
            422: self._tampered(lora_int_id),
            503: lora_int_id in self.failed,
        }
        assert causes.get(delta.error_status), (delta.error_status, delta.error)

    def _is_leaving(self, lora_int_id: int) -> bool:
        return any(
            isinstance(call, RemoveLora) and call.lora_int_id == lora_int_id
            for call in self.calls.values()
        )

    def _take_reply(self, reply: Reply) -> None:
        call = self.calls.pop(reply.call_id)
        self.replies.append(reply.body)
        match call, reply.body:
            case AddLora(), AdapterReply(info):
                assert info.lora_int_id == call.lora.lora_int_id
                assert info.digest == call.lora.digest
                assert call.level == "host" or info.level == "slot"
            case PinLora(), AdapterReply(info):
                assert info.lora_int_id == call.lora_int_id
            case RemoveLora(), FreedReply():
                resident = {info.lora_int_id for info in self.core.stats().adapters}
                assert call.lora_int_id not in resident
            case ((AddLora() | PinLora()), CallError(status)):
                assert status in (404, 422, 503), reply.body
            case _:
                raise AssertionError(f"{reply.body} for {call}")

    def caches_agree(self) -> None:
        self._take_outputs()
        self.core.handle(CheckIntegrity(-1))
        outputs = self.core.take_outputs()
        assert outputs is not None
        assert [reply.body for reply in outputs.replies] == [IntegrityReply("")]
        resident = {info.lora_int_id for info in self.core.stats().adapters}
        leaving = {c.lora_int_id for c in self.calls.values() if isinstance(c, RemoveLora)}
        assert not resident & (self.unwanted - leaving), "an unloaded adapter came back"

    def end(self) -> None:
        """Everything ends by itself, and nothing is left when all is unloaded."""
        self._run_to_end()
        for lora_int_id in {lora.lora_int_id for lora in self.issued}:
            self._call(lambda i, lora_int_id=lora_int_id: RemoveLora(i, lora_int_id, 0.0))
        self._run_to_end()
        stats = self.core.stats()
        assert stats.adapters == []
        assert stats.kv_usage == 0
        assert self.core._scheduler.pool._by_adapter.keys() <= {0}, "prefix blocks outlive it"
        assert not self.adapters._known, "an adapter is known after all are gone"
        self.core.close()

    def _run_to_end(self) -> None:
        for _ in range(MAX_STEPS_TO_END):
            if not (self.core.has_work or self.loader.pending):
                break
            if self.loader.pending:
                self.loader.finish(0)
            self.core.step()
            self._take_outputs()
        self.caches_agree()
        waiting = [name for name, asked in self.asked.items() if asked.ended is None]
        assert (waiting, self.calls) == ([], {}), self.core.stats()


@pytest.fixture
def engine(truth, tmp_path):
    """``engine(slots, **shape)``: a machine whose acts are the test's own; ends as any other."""
    made: list[Scenario] = []

    def make(slots: tuple[int, int], **shape) -> Scenario:
        ordinary = {
            "spare_blocks": 40, "max_num_seqs": 5, "max_num_batched_tokens": MAX_MODEL_LEN,
            "quantum": 4, "prefix_caching": True, "chunked": True,
            "contents": range(len(CONTENTS)),
        }  # fmt: skip
        machine = Scenario(truth, tmp_path / "names", ordinary | shape | {"slots": slots})
        made.append(machine)
        return machine

    yield make
    for machine in made:
        machine.end()


def ask(engine: Scenario, adapter: int, **changes) -> None:
    ordinary = {
        "stale": 99, "prompt": 3, "max_tokens": MAX_TOKENS, "sampled": False, "ignore_eos": True,
        "tenant": "acme", "weight": 1.0, "salt": "", "n": 1, "then": 0,
    }  # fmt: skip
    engine.ask(adapter=adapter, **(ordinary | changes))


def keep_both_slots_busy(engine: Scenario) -> None:
    for adapter in (0, 1):
        ask(engine, adapter)
    engine.serve(3)
    assert engine.core.stats().running == 2


def test_an_adapter_unloaded_while_it_is_read_does_not_come_back(engine) -> None:
    machine = engine((2, 3))
    machine.load(NAMES[0], "host", pinned=False)
    machine.step(1)
    machine.unload(0, drain_s=0.0)
    machine.step(1)
    machine.finish_load(0)
    machine.step(2)
    machine.caches_agree()
    assert machine.core.stats().adapters == []


def test_requests_of_an_adapter_that_is_unloaded_while_it_is_read_are_answered(engine) -> None:
    machine = engine((2, 3))
    ask(machine, 0)
    machine.step(2)
    machine.unload(0, drain_s=DRAIN_LONG_S)
    machine.serve(20)
    assert [asked.ended for asked in machine.asked.values()] == ["length"]
    assert machine.calls == {}


def test_adapters_that_nobody_wants_any_more_keep_no_other_from_being_read(engine) -> None:
    machine = engine((2, 2), quantum=40)
    keep_both_slots_busy(machine)
    for adapter in (2, 3):  # as many as are read ahead
        ask(machine, adapter)
    machine.step(1)
    machine.serve(1)
    for _ in range(2):
        machine.abort(2)
    machine.replace_in_place(NAMES[2], 4)
    ask(machine, 2)
    machine.step(1)
    assert [lora for lora, _ in machine.loader.pending] == [machine.current[NAMES[2]]]


def test_an_adapter_that_waits_for_a_place_can_be_unpinned(engine) -> None:
    machine = engine((2, 2), quantum=40)
    keep_both_slots_busy(machine)
    ask(machine, 2)
    machine.serve(1)
    waiting = machine.current[NAMES[2]].lora_int_id
    machine._call(lambda i: PinLora(i, waiting, pinned=False))
    machine.caches_agree()
    assert [type(reply) for reply in machine.replies] == [CallError]


def test_an_unpin_leaves_no_pin_waiting(engine) -> None:
    machine = engine((2, 3))
    machine.load(NAMES[0], "host", pinned=False)
    machine.serve(2)
    machine.pin(0, pinned=True)
    machine.pin(0, pinned=False)
    machine.serve(2)
    assert machine.calls == {}


def test_a_load_waits_for_its_turn_where_all_places_are_in_use(engine) -> None:
    machine = engine((2, 2), quantum=2)
    keep_both_slots_busy(machine)
    machine.load(NAMES[2], "host", pinned=False)
    machine.serve(4)
    assert [type(reply) for reply in machine.replies] == [AdapterReply]


def test_a_pin_that_is_refused_loads_nothing(engine) -> None:
    machine = engine((1, 3))
    machine.load(NAMES[0], "slot", pinned=True)
    machine.serve(2)
    assert [type(reply) for reply in machine.replies] == [CallError]
    assert machine.core.stats().adapters == []


PLACE = st.integers(0, 30)

SHAPES = st.fixed_dictionaries({
    "slots": st.sampled_from([(2, 3), (2, 3), (2, 2), (1, 1), (1, 3)]),
    "spare_blocks": st.sampled_from([0, 2, 10, 40]),
    "max_num_seqs": st.integers(1, 5),
    "max_num_batched_tokens": st.sampled_from([5, 7, 16, MAX_MODEL_LEN]),
    "quantum": st.integers(1, 4),
    "prefix_caching": st.sampled_from([True, True, False]),
    "chunked": st.sampled_from([True, True, False]),
    "contents": st.permutations(range(len(CONTENTS))),
})  # fmt: skip

ASK = st.fixed_dictionaries({
    "adapter": st.integers(0, len(NAMES)),
    "stale": st.integers(0, 99),
    "prompt": st.integers(0, len(PROMPTS) - 1),
    "max_tokens": st.integers(1, MAX_TOKENS),
    "sampled": st.sampled_from([False, False, False, True]),
    "ignore_eos": st.booleans(),
    "tenant": st.sampled_from(["acme", "globex", ""]),
    "weight": st.sampled_from([0.5, 1.0, 3.0]),
    "salt": st.sampled_from(["", "", "a"]),
    "n": st.integers(1, 3),
    "then": st.integers(0, 8),
})  # fmt: skip

ACTS: dict[str, tuple[int, st.SearchStrategy[dict[str, object]]]] = {
    "ask": (6, ASK),
    "step": (2, st.fixed_dictionaries({"steps": st.integers(1, 8)})),
    "serve": (2, st.fixed_dictionaries({"steps": st.integers(1, 20)})),
    "finish_load": (2, st.fixed_dictionaries({"place": PLACE})),
    "fail_load": (1, st.fixed_dictionaries({"place": PLACE})),
    "abort": (2, st.fixed_dictionaries({"place": PLACE})),
    "replace_in_place": (1, st.fixed_dictionaries(
        {"name": st.sampled_from(NAMES), "content": st.integers(0, len(CONTENTS) - 1)})),
    "load": (2, st.fixed_dictionaries(
        {"name": st.sampled_from(NAMES), "level": st.sampled_from(["host", "slot"]),
         "pinned": st.sampled_from([False, False, True])})),
    "unload": (1, st.fixed_dictionaries(
        {"place": PLACE, "drain_s": st.sampled_from([0.0, DRAIN_LONG_S])})),
    "pin": (1, st.fixed_dictionaries({"place": PLACE, "pinned": st.booleans()})),
}  # fmt: skip
"""Each act with how often it is done, compared with the others."""

ACT = st.sampled_from([name for name, (often, _) in ACTS.items() for _ in range(often)]).flatmap(
    lambda name: st.tuples(st.just(name), ACTS[name][1])
)


def play(
    truth: Truth, root: Path, shape: Mapping[str, object], acts: Sequence[tuple[str, dict]]
) -> None:
    scenario = Scenario(truth, root, shape)
    for name, how in acts:
        getattr(scenario, name)(**how)
        scenario.caches_agree()
    scenario.end()


def play_many(truth: Truth, root: Path, examples: int, acts: int) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck))
    @given(shape=SHAPES, acts=st.lists(ACT, min_size=acts // 2, max_size=acts))
    def many(shape, acts) -> None:
        play(truth, root, shape, acts)

    many()


def test_random_use_gives_the_oracles_answers(truth, tmp_path) -> None:
    play_many(truth, tmp_path / "names", examples=15, acts=50)


@pytest.mark.full
def test_much_random_use_gives_the_oracles_answers(truth, tmp_path) -> None:
    play_many(truth, tmp_path / "names", examples=200, acts=100)


# -- the real loader, under the catalog's names ------------------------------------------------


class Tenants:
    """Clients of one engine: they ask by name, leave early, load, reload, unload and pin."""

    def __init__(self, truth: Truth, root: Path, seed: int) -> None:
        self.truth = truth
        self.root = root
        self.draw = random.Random(seed)
        self.stood_for: dict[str, set[str]] = {name: set() for name in ("hot", "cold", "shared")}
        """The digests that an admin's name has had."""
        self.answered = 0

    async def run(self, engine: LocalEngine, acts: int) -> None:
        ids = LoRAIdAllocator()
        registry = LoRAResolverRegistry([DirectoryResolver(self.root)], engine.info.base_spec, ids)
        self.generator = Generator(engine, fast_backend(load_tokenizer(str(self.truth.model))))
        self.catalog = AdapterCatalog(
            engine, registry, ids, served=["base"], adapter_wait_s=60.0, roots=[self.root]
        )
        tasks: list[asyncio.Task[None]] = []
        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            for _ in range(acts):
                tasks.append(group.create_task(self._act()))
                for _ in range(self.draw.randint(0, 12)):
                    await asyncio.sleep(0)  # a step of the engine
                if self.draw.random() < 0.15:
                    self.draw.choice(tasks).cancel()
        await engine.check_integrity()
        for view in self.catalog.view():
            await self.catalog.admin.unload(view.name)
        await engine.check_integrity()
        self.catalog.check_integrity()
        await self.catalog.close()
        await registry.close()

    async def _act(self) -> None:
        name = self.draw.choice(list(self.stood_for))
        act = self.draw.choice([*["ask"] * 8, "load", "load", "unload", "pin", "unpin"])
        try:
            match act:
                case "ask":
                    await self._ask(self.draw.choice(["base", "acme:v1", "globex:latest", name]))
                case "load":
                    await self._load(name)
                case "unload":
                    await self.catalog.admin.unload(name)
                case "pin" | "unpin":
                    await self.catalog.admin.pin(name, pinned=act == "pin")
        except MuralError as error:
            if error.status not in (404, 503):
                raise

    async def _load(self, name: str) -> None:
        content = self.draw.choice(self.truth.contents)
        self.stood_for[name].add(content.digest)
        folder = self.root / "pool" / content.folder.name
        await self.catalog.admin.load(name, str(folder), inplace=True, shared=True)

    async def _ask(self, name: str) -> None:
        prompt = self.draw.randrange(len(PROMPTS))
        sampling = SamplingParams(
            temperature=0, max_tokens=self.draw.randint(1, MAX_TOKENS), n=self.draw.randint(1, 3)
        )
        principal = Principal(tenant=None, rights=frozenset({ADMIN}))
        async with self.catalog.use(principal, name) as served:
            digest = served.lora.digest if served.lora else None
            assert name not in self.stood_for or digest in self.stood_for[name]
            request = GenerateRequest(
                request_id=f"{self.draw.getrandbits(64)}",
                prompt_token_ids=PROMPTS[prompt],
                sampling=sampling,
                lora=served.lora,
                tenant=self.draw.choice(["acme", "globex"]),
                salt=self.draw.choice(["", "x"]),
            )
            wanted = self.truth.tokens(digest, prompt, sampling)
            got: list[list[int]] = [[] for _ in range(sampling.n)]
            async with aclosing(self.generator.stream(request)) as updates:
                async for update in updates:
                    for sequence in update.sequences:
                        got[sequence.index] += sequence.token_ids
                        assert sequence.finish_reason != "abort"
            assert got == [wanted] * sampling.n, f"{name} did not answer as {digest}"
            self.answered += 1


def run_tenants(truth: Truth, root: Path, seed: int, acts: int) -> None:
    for content in truth.contents:
        shutil.copytree(content.folder, root / "pool" / content.folder.name)
    for place, name in enumerate(("acme", "globex")):
        shutil.copytree(truth.contents[place].folder, root / name / "default" / "v1")
    draw = random.Random(seed)

    async def run() -> int:
        engine = LocalEngine(
            build.build_core(
                EngineSettings(
                    model=str(truth.model),
                    dtype="float32",
                    cpu_threads=1,
                    max_model_len=MAX_MODEL_LEN,
                    block_size=BLOCK_SIZE,
                    kv_cache_memory_bytes=(1 + 2 * BLOCKS_PER_SEQUENCE) * BLOCK_BYTES,
                    max_num_seqs=draw.randint(2, 6),
                    max_num_batched_tokens=draw.choice([8, 16, 48]),
                    max_loras=2,
                    max_cpu_loras=3,
                    max_lora_rank=16,
                    adapter_quantum_tokens=2,
                )
            )
        )
        try:
            tenants = Tenants(truth, root, seed)
            await tenants.run(engine, acts)
            assert engine.alive
            return tenants.answered
        finally:
            await engine.close()

    assert asyncio.run(run()) > acts / 5


@pytest.mark.parametrize("seed", range(2))
def test_names_under_the_real_loader_answer_with_their_content(truth, tmp_path, seed) -> None:
    run_tenants(truth, tmp_path, seed, acts=120)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 22))
def test_many_names_under_the_real_loader(truth, tmp_path, seed) -> None:
    run_tenants(truth, tmp_path, seed, acts=400)
