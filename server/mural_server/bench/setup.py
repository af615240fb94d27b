"""What is measured: sizes, seeds, and the requests of each group."""

from __future__ import annotations

import random
from typing import Literal, NamedTuple, TypedDict

import msgspec

from mural_resolvers.errors import MuralError
from mural_server.settings import EngineSettings

__all__ = [
    "GROUPS",
    "QUICK",
    "BenchError",
    "ComputeDType",
    "Group",
    "Job",
    "Setup",
    "Sizes",
    "engine_options",
    "engine_settings",
    "group_jobs",
    "settling_jobs",
]

Group = Literal["base", "one", "mixed", "churn"]
ComputeDType = Literal["float32", "bfloat16"]
GROUPS: tuple[Group, ...] = ("base", "one", "mixed", "churn")

TENANT = "bench"
FIRST_PLAIN_TOKEN = 3
"""Below are most models' special tokens."""


class BenchError(MuralError):
    """A measurement that could not be made, and why."""


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """How much is asked for."""

    concurrency: int = 16
    prompt_tokens: int = 128
    output_tokens: int = 64
    rounds: int = 5
    rank: int = 16
    slots: int = 8
    """``max_loras``, and the adapters of the group "mixed"."""
    churn_adapters: int = 24
    host_adapters: int = 12
    """``max_cpu_loras``: fewer than the adapters of "churn", so that they are loaded anew."""
    window_steps: int = 32
    """Decode steps timed in a row with, and without, loads beside them."""
    windows: int = 10
    turns: int = 4
    """Requests that a client of the slots' measurement sends one after another."""


QUICK = Sizes(
    concurrency=4,
    prompt_tokens=12,
    output_tokens=6,
    rounds=1,
    rank=4,
    slots=2,
    churn_adapters=6,
    host_adapters=3,
    window_steps=4,
    windows=2,
    turns=2,
)
"""Shows that everything works; its times say nothing."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What every engine is started with."""

    model: str
    dtype: ComputeDType = "bfloat16"
    threads: int = 2
    seed: int = 0
    sizes: Sizes = Sizes()
    vocab_size: int
    adapter_dir: str
    """``bench/default/v0`` and so on, as the directory resolver wants them."""

    @property
    def adapters(self) -> list[str]:
        """Names of all: first those of "mixed" (the first of them being "one"'s), then churn's."""
        return [_name(i) for i in range(self.sizes.slots + self.sizes.churn_adapters)]

    @property
    def churning(self) -> list[str]:
        """Those that are loaded cold."""
        return self.adapters[self.sizes.slots :]


class Job(NamedTuple):
    """A request: a prompt of token ids, and an adapter's name or None for the base."""

    prompt: list[int]
    adapter: str | None


class EngineFields(TypedDict):
    """The options that every measurement sets."""

    dtype: ComputeDType
    cpu_threads: int
    max_num_seqs: int
    max_loras: int
    max_cpu_loras: int
    max_lora_rank: int


def engine_options(setup: Setup) -> EngineFields:
    """The engine's settings but for the model; everything else is as users get it."""
    sizes = setup.sizes
    return EngineFields(
        dtype=setup.dtype,
        cpu_threads=setup.threads,
        max_num_seqs=sizes.concurrency,
        max_loras=sizes.slots,
        max_cpu_loras=sizes.host_adapters,
        max_lora_rank=max(64, sizes.rank),
    )


def engine_settings(setup: Setup) -> EngineSettings:
    return EngineSettings(model=setup.model, **engine_options(setup))


def group_jobs(setup: Setup, group: Group, turn: int) -> list[Job]:
    """One round's requests, ``concurrency`` of them, with prompts of no other round or group.

    Nothing of a prompt can be in a prefix cache, since PEFT has none.
    """
    draw = random.Random(f"{setup.seed} {group} {turn}")
    return [
        Job(random_prompt(setup, draw), adapter) for adapter in _group_adapters(setup, group, turn)
    ]


def settling_jobs(setup: Setup, jobs: list[Job], turn: int) -> list[Job]:
    """As many requests under the same adapters with other prompts: run untimed, they leave the
    adapters in slots.
    """
    draw = random.Random(f"{setup.seed} settling {turn} {jobs[0].prompt[:4]}")
    return [Job(random_prompt(setup, draw), job.adapter) for job in jobs]


def random_prompt(setup: Setup, draw: random.Random) -> list[int]:
    return [
        draw.randrange(FIRST_PLAIN_TOKEN, setup.vocab_size)
        for _ in range(setup.sizes.prompt_tokens)
    ]


def _group_adapters(setup: Setup, group: Group, turn: int) -> list[str | None]:
    sizes = setup.sizes
    places = range(sizes.concurrency)
    match group:
        case "base":
            return [None for _ in places]
        case "one":
            return [setup.adapters[0] for _ in places]
        case "mixed":
            return [setup.adapters[i % sizes.slots] for i in places]
        case "churn":
            # The window moves on each round: what was used last comes last.
            first = turn * sizes.concurrency
            return [setup.churning[(first + i) % sizes.churn_adapters] for i in places]


def _name(index: int) -> str:
    return f"{TENANT}:v{index}"
