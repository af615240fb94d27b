"""What crosses between the engine core and those who ask it: plain data, msgspec-encoded."""

from __future__ import annotations

from typing import Literal

import msgspec

from mural_resolvers.request import LoRARequest
from mural_server.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
AdapterLevel = Literal["host", "slot"]


class EngineRequest(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One sequence to generate (``n`` > 1 is fanned out before it gets here)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    lora: LoRARequest | None = None
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share against other tenants'."""
    salt: str = ""
    """Extra key of the prefix-block hash: the server's tenant salt and the client's cache_salt."""


class TokenLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities (natural) at one position, of the model before any sampling parameter."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top: list[tuple[int, float]]
    """The likeliest tokens, best first."""


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one request."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """One per token id, when asked for."""
    prompt_logprobs: list[TokenLogprobs | None] = []
    """Whole, with the first token; its entry 0 is None."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended it, when that was not the plain end-of-sequence."""
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    error: str = ""
    error_status: int = 500
    queued_s: float = 0.0
    """With the first token: how long the request waited before anything of it was computed."""
    step: int = 0
    """Number of the step: requests that share it shared a batch."""


class AdapterInfo(msgspec.Struct, kw_only=True):
    """A resident adapter."""

    name: str
    lora_int_id: int
    digest: str
    rank: int
    bytes: int
    level: AdapterLevel
    pinned: bool = False
    running: int = 0
    waiting: int = 0


class FreedBytes(msgspec.Struct, kw_only=True):
    """What an unload gave back."""

    slot: int = 0
    host: int = 0
    kv_blocks: int = 0
    """Prefix blocks that only this adapter's requests could have used."""
    disk: int = 0
    """Bytes in the disk cache that may leave it now; the core knows nothing of them."""


class EngineStats(msgspec.Struct, kw_only=True):
    """A snapshot of the core; counters only grow."""

    running: int = 0
    waiting: int = 0
    paused: int = 0
    kv_usage: float = 0.0
    """0 to 1."""
    num_blocks: int = 0
    block_size: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up."""
    prefix_hits: int = 0
    """Prompt tokens found."""
    preemptions: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    slots: int = 0
    running_adapters: list[str] = []
    waiting_adapters: list[str] = []
    adapters: list[AdapterInfo] = []
