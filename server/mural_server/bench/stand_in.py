"""A server's catalog over a stand-in engine that holds every adapter at once."""

from __future__ import annotations

from collections.abc import AsyncIterator

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_server.catalog import AdapterCatalog
from mural_server.engine.client import EngineClient, EngineInfo
from mural_server.engine.messages import (
    AdapterInfo,
    AdapterLevel,
    EngineRequest,
    EngineStats,
    FreedBytes,
    RequestDelta,
)

__all__ = ["catalog_of"]


class StandIn(EngineClient):
    """Loads at once and never evicts; it generates nothing."""

    def __init__(self, base: BaseSpec) -> None:
        self.info = EngineInfo(
            model="bench",
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            max_loras=8,
            max_cpu_loras=64,
            max_lora_rank=8,
            num_blocks=1,
            block_size=16,
            base_spec=base,
        )
        self._resident: dict[int, AdapterInfo] = {}

    async def add_lora(
        self, lora: LoRARequest, *, level: AdapterLevel = "host", pinned: bool = False
    ) -> AdapterInfo:
        info = AdapterInfo(
            name=lora.lora_name,
            lora_int_id=lora.lora_int_id,
            digest=lora.digest,
            rank=8,
            bytes=1,
            level=level,
        )
        self._resident[lora.lora_int_id] = info
        return info

    def stats(self) -> EngineStats:
        return EngineStats(adapters=list(self._resident.values()))

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        raise NotImplementedError

    async def remove_lora(self, lora_int_id: int, *, drain_timeout_s: float = 60.0) -> FreedBytes:
        del self._resident[lora_int_id]
        return FreedBytes()

    async def pin_lora(self, lora_int_id: int, *, pinned: bool) -> AdapterInfo:
        return self._resident[lora_int_id]

    async def check_lora(self, lora: LoRARequest) -> None:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        return True

    async def wait_dead(self) -> str:
        raise NotImplementedError

    async def drain(self, grace_s: float) -> None:
        return

    async def close(self) -> None:
        return


def catalog_of(registry: LoRAResolverRegistry, base: BaseSpec) -> AdapterCatalog:
    """A catalog whose look-ups are those of a server."""
    return AdapterCatalog(
        StandIn(base), registry, LoRAIdAllocator(), served=("bench",), adapter_wait_s=60
    )
