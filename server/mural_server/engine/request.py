"""One sequence on its way through the engine."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from mural_resolvers.request import LoRARequest
from mural_server.engine.block_pool import PrefixKey, hash_blocks
from mural_server.engine.messages import EngineRequest, TokenLogprobs
from mural_server.sampling_params import SEED_BITS, SamplingParams


class State(Enum):
    """Where a request stands."""

    WAITING = auto()
    """Holds no KV blocks: new, or preempted."""
    PAUSED = auto()
    """Holds its KV blocks, but another adapter or group has its turn."""
    RUNNING = auto()
    FINISHED = auto()


class GroupKey(NamedTuple):
    """Requests that share fate in the scheduler: one tenant's, under one adapter."""

    tenant: str
    lora_int_id: int


@dataclass(slots=True, eq=False)
class Request:
    """The engine's state of one sequence. ``tokens`` is the prompt with the output behind it."""

    request_id: str
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    lora: LoRARequest | None
    group: GroupKey
    weight: float
    prefix_key: PrefixKey
    eos_token_ids: tuple[int, ...]
    seed: int
    arrival: int
    """Order of arrival, unique."""
    arrived_s: float
    """On the core's clock."""
    output: list[int] = field(default_factory=list)
    """The tokens behind the prompt."""
    started_s: float | None = None
    """When the first of it was computed."""
    state: State = State.WAITING
    num_computed: int = 0
    """Tokens whose KV stands in the pool."""
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    turn_steps: int = 0
    """Steps since it last began to run in which it got a token."""
    waiting_since: int = 0
    """The step at which it last began to wait or was paused."""
    cached_tokens: int = 0
    first_scheduled: bool = False
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)

    @classmethod
    def admit(
        cls,
        message: EngineRequest,
        *,
        eos_token_ids: tuple[int, ...],
        entropy: random.Random,
        arrival: int,
        arrived_s: float = 0.0,
    ) -> Request:
        """``entropy`` gives the seed of a request that names none."""
        lora_int_id = message.lora.lora_int_id if message.lora else 0
        seed = message.sampling.seed
        return cls(
            request_id=message.request_id,
            tokens=list(message.prompt_token_ids),
            prompt_len=len(message.prompt_token_ids),
            sampling=message.sampling,
            lora=message.lora,
            group=GroupKey(message.tenant, lora_int_id),
            weight=message.weight,
            prefix_key=PrefixKey(lora_int_id, message.salt),
            eos_token_ids=eos_token_ids,
            seed=entropy.getrandbits(SEED_BITS) if seed is None else seed,
            arrival=arrival,
            arrived_s=arrived_s,
        )

    def append(self, token_id: int) -> None:
        self.tokens.append(token_id)
        self.output.append(token_id)

    @property
    def lora_int_id(self) -> int:
        return self.group.lora_int_id

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until the prompt's log-probabilities are complete."""
        return (
            self.sampling.prompt_logprobs is not None
            and len(self.prompt_logprobs) < self.prompt_len
        )

    def update_hashes(self, block_size: int) -> None:
        """Hash the blocks that have become full since the last call."""
        if len(self.tokens) // block_size > len(self.block_hashes):
            self.block_hashes = hash_blocks(
                self.tokens, block_size, self.prefix_key, self.block_hashes
            )
