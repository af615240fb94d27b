"""How the rest of the server talks to an engine core, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator

import msgspec

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import Unavailable
from mural_resolvers.request import LoRARequest
from mural_server.engine.messages import (
    AdapterInfo,
    AdapterLevel,
    EngineRequest,
    EngineStats,
    FreedBytes,
    RequestDelta,
)


class EngineDead(Unavailable):
    """The core's process is gone; nothing more will be answered by it."""


class EngineInfo(msgspec.Struct, kw_only=True):
    """What a started core is: fixed for its life."""

    model: str
    """The path or name that it was started with."""
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    """0: adapters are off."""
    max_cpu_loras: int
    max_lora_rank: int
    max_cpu_lora_bytes: int = 0
    """Host memory for registered adapters."""
    num_blocks: int
    block_size: int
    base_spec: BaseSpec
    chosen: list[str] = []
    """Lines for the log at start: what was chosen and why."""


class EngineClient(ABC):
    """For one event loop. Every call raises `EngineDead` once the core died."""

    info: EngineInfo

    @abstractmethod
    def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        """Stream one sequence. An adapter the core does not hold is loaded first.

        The last delta has a ``finish_reason``; with ``"error"`` it carries ``error`` and
        ``error_status``. Closing the iterator early aborts the sequence, whose blocks are free
        within a step.
        """

    @abstractmethod
    async def add_lora(
        self, lora: LoRARequest, *, level: AdapterLevel = "host", pinned: bool = False
    ) -> AdapterInfo:
        """Make an adapter resident; idempotent. Raises `UnusableAdapter`, `Unavailable`."""

    @abstractmethod
    async def remove_lora(self, lora_int_id: int, *, drain_timeout_s: float = 60.0) -> FreedBytes:
        """Let its requests finish (new ones wait in vain: 404), then free all it holds.

        After ``drain_timeout_s`` what is still running is aborted. Unknown ids free nothing.
        """

    @abstractmethod
    async def pin_lora(self, lora_int_id: int, *, pinned: bool) -> AdapterInfo:
        """Keep it resident, or let it be evicted again. Raises `AdapterNotFound`."""

    @abstractmethod
    async def check_lora(self, lora: LoRARequest) -> None:
        """Read and judge an adapter's folder as a load would, and keep nothing of it.

        Loads go on meanwhile. Raises `UnusableAdapter`, `TooLarge`, `Unavailable`.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """The latest snapshot that the core pushed; at most a second old."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """False once the core died."""

    @abstractmethod
    async def wait_dead(self) -> str:
        """Return, when the core has died, the reason."""

    @abstractmethod
    async def drain(self, grace_s: float) -> None:
        """Wait until no request runs or waits, for ``grace_s`` at most, then abort the rest."""

    @abstractmethod
    async def close(self) -> None:
        """End the core; bounded."""
