"""From settings to a core that runs: chooses what was left open and says why."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.limits import DEFAULT_LIMITS
from mural_server.engine.adapters import Adapters
from mural_server.engine.block_pool import BlockPool
from mural_server.engine.client import EngineInfo
from mural_server.engine.core import EngineCore
from mural_server.engine.memory import available_bytes, keep_freed_memory, readable, resident_bytes
from mural_server.engine.runner import ModelRunner, allocate_kv, kv_bytes_per_block
from mural_server.engine.sampler import Sampler
from mural_server.engine.scheduler import Scheduler
from mural_server.engine.slot_share import SlotShare
from mural_server.lora.base_copies import BaseDigests
from mural_server.lora.checkpoint import LoadOptions
from mural_server.lora.config import LoRAConfig
from mural_server.lora.loader import AdapterLoader
from mural_server.lora.manager import LRUCacheLoRAModelManager
from mural_server.models.base import CausalLM
from mural_server.models.loader import load_model
from mural_server.models.location import model_name
from mural_server.models.source import eos_token_ids
from mural_server.ops.select import select_ops
from mural_server.settings import EngineSettings, SettingsError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Sizes(NamedTuple):
    """How the KV memory was cut."""

    num_blocks: int
    max_model_len: int
    kv_bytes: int


def build_core(settings: EngineSettings) -> EngineCore:
    """Load the model and allocate everything.

    Raises `SettingsError` with a sentence that says what to change, and what `load_model` raises.
    """
    settings.validate()
    # oneDNN keeps a primitive for every number of rows it has seen; the default is too small.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    keep_freed_memory()
    threads = settings.cpu_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    dtype_name = settings.resolved_dtype(cpu_flags())
    dtype = _DTYPES[dtype_name]
    ops, ops_reason = select_ops(dtype, wanted=None if settings.ops == "auto" else settings.ops)
    before = resident_bytes()
    model = load_model(settings.model, dtype=dtype, ops=ops)
    base_bytes = max(0, resident_bytes() - before)
    free_bytes = available_bytes()
    sizes = cut_kv(model, settings, dtype, free_bytes)
    kv = allocate_kv(model, sizes.num_blocks, settings.block_size, dtype)
    spec = model.base_spec((model_name(settings.model),), settings.max_lora_rank)
    host_bytes = settings.resolved_cpu_lora_bytes(available_bytes()) if settings.enable_lora else 0
    adapters = (
        _build_adapters(model, spec, settings, dtype, host_bytes) if settings.enable_lora else None
    )
    pool = BlockPool(
        sizes.num_blocks, settings.block_size, enable_prefix_caching=settings.enable_prefix_caching
    )
    max_loras = settings.max_loras if settings.enable_lora else 0
    scheduler = Scheduler(
        pool,
        SlotShare(max_loras, settings.adapter_quantum_tokens),
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        enable_chunked_prefill=settings.enable_chunked_prefill,
    )
    info = EngineInfo(
        model=settings.model,
        dtype=dtype_name,
        max_model_len=sizes.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_loras=max_loras,
        max_cpu_loras=settings.max_cpu_loras if settings.enable_lora else 0,
        max_cpu_lora_bytes=host_bytes,
        max_lora_rank=settings.max_lora_rank,
        num_blocks=sizes.num_blocks,
        block_size=settings.block_size,
        base_spec=spec,
        chosen=[
            f"model {type(model).__name__} in {dtype_name}, {readable(base_bytes)}",
            f"operators {ops_reason}; {threads} threads",
            f"KV cache {readable(sizes.kv_bytes)}: {sizes.num_blocks - 1} blocks of "
            f"{settings.block_size} tokens, sequences of up to {sizes.max_model_len} tokens"
            + _shortage(sizes.kv_bytes, free_bytes),
            _adapter_line(settings, host_bytes),
        ],
    )
    return EngineCore(
        info,
        scheduler,
        ModelRunner(model, kv, settings.block_size, Sampler(), adapters),
        adapters,
        eos_token_ids=eos_token_ids(settings.model),
        entropy=random.Random(settings.seed),
    )


def cpu_flags() -> frozenset[str]:
    """What the CPU can do, as the kernel names it; empty where it does not say."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cut_kv(model: CausalLM, settings: EngineSettings, dtype: torch.dtype, free_bytes: int) -> Sizes:
    """How many blocks, for how long sequences; raise `SettingsError` if the memory is too small."""
    per_block = kv_bytes_per_block(model, settings.block_size, dtype)
    kv_bytes = settings.resolved_kv_bytes(free_bytes)
    num_blocks = kv_bytes // per_block  # block 0 among them, which is never used
    if settings.kv_cache_memory_bytes is None:
        num_blocks = min(num_blocks, _most_useful_blocks(model, settings))
    held = (num_blocks - 1) * settings.block_size
    wanted = settings.max_model_len or model.max_position
    if wanted > model.max_position:
        raise SettingsError(
            f"max_model_len is {wanted}, but the model knows positions up to "
            f"{model.max_position}: set max_model_len to that or less."
        )
    if settings.max_model_len is None:
        wanted = min(wanted, held)
    if held < max(2, wanted):
        needed = (-(-max(2, wanted) // settings.block_size) + 1) * per_block
        or_shorter = "" if settings.max_model_len is None else ", or lower max_model_len"
        raise SettingsError(
            f"The KV memory of {readable(kv_bytes)} holds {max(0, held)} tokens, fewer than one "
            f"sequence of {max(2, wanted)}: set kv_cache_memory_bytes to {needed} or "
            f"more{or_shorter}."
        )
    if not settings.enable_chunked_prefill and settings.max_num_batched_tokens < wanted:
        raise SettingsError(
            f"Without chunked prefill max_num_batched_tokens ({settings.max_num_batched_tokens}) "
            f"must be at least max_model_len ({wanted}): raise the first or lower the second."
        )
    return Sizes(num_blocks, wanted, num_blocks * per_block)


def _shortage(kv_bytes: int, free_bytes: int) -> str:
    """A warning where the KV blocks, which take memory as they fill, outgrow what is free."""
    # No refusal: what a container counts as used can be page cache, which gives way.
    if kv_bytes <= free_bytes:
        return ""
    return (
        f". MORE THAN THE {readable(free_bytes)} THAT ARE FREE: as it fills, the kernel may kill "
        "the engine core"
    )


def _most_useful_blocks(model: CausalLM, settings: EngineSettings) -> int:
    """Room for every row at full length, and three times as much for pauses and prefixes."""
    longest = settings.max_model_len or model.max_position
    return 4 * settings.max_num_seqs * -(-longest // settings.block_size) + 1


def _build_adapters(
    model: CausalLM,
    spec: BaseSpec,
    settings: EngineSettings,
    dtype: torch.dtype,
    host_bytes: int,
) -> Adapters:
    config = LoRAConfig(
        max_loras=settings.max_loras,
        max_cpu_loras=settings.max_cpu_loras,
        max_lora_rank=settings.max_lora_rank,
        dtype=dtype,
        target_modules=settings.lora_target_modules,
        max_cpu_lora_bytes=host_bytes,
    )
    manager = LRUCacheLoRAModelManager(
        model,
        spec,
        config,
        model.ops,
        packed_modules_mapping=model.packed_modules_mapping,
        max_rows=settings.max_num_batched_tokens + settings.max_num_seqs,
    )
    options = LoadOptions(
        dtype="bfloat16" if dtype is torch.bfloat16 else "float32",
        target_modules=settings.lora_target_modules,
        limits=replace(DEFAULT_LIMITS, admit_bin=settings.allow_bin_adapters),
        max_payload_bytes=config.max_cpu_lora_bytes,
    )
    base_digest = BaseDigests(model.base_weight)
    loader = AdapterLoader(spec, options, base_digest=base_digest, nice=settings.loader_nice)
    # A process of its own: what is uploaded may kill it, and no load waits for that.
    checker = AdapterLoader(spec, options, base_digest=base_digest, nice=19, eager=False)
    return Adapters(manager, loader, checker)


def _adapter_line(settings: EngineSettings, host_bytes: int) -> str:
    if not settings.enable_lora:
        return "adapters off"
    return (
        f"adapters {settings.max_loras} slots of up to rank {settings.max_lora_rank}; up to "
        f"{settings.max_cpu_loras} in {readable(host_bytes)} of host memory"
    )
