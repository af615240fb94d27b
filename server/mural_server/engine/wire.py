"""What is said over the border of the core: commands in, one message of outputs a step out."""

from __future__ import annotations

import msgspec

from mural_resolvers.errors import MuralError
from mural_resolvers.request import LoRARequest
from mural_server.engine.client import EngineInfo
from mural_server.engine.messages import (
    AdapterInfo,
    AdapterLevel,
    EngineRequest,
    EngineStats,
    FreedBytes,
    RequestDelta,
)
from mural_server.sampling_params import GenerationDefaults
from mural_server.tokenizer import TokenizerState


class AddRequest(msgspec.Struct, tag=True, frozen=True):
    request: EngineRequest


class AbortRequests(msgspec.Struct, tag=True, frozen=True):
    """``None``: all of them."""

    request_ids: list[str] | None


class AddLora(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    lora: LoRARequest
    level: AdapterLevel
    pinned: bool


class RemoveLora(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    lora_int_id: int
    drain_timeout_s: float


class PinLora(msgspec.Struct, tag=True, frozen=True):
    call_id: int
    lora_int_id: int
    pinned: bool


class CheckLora(msgspec.Struct, tag=True, frozen=True):
    """Answered with ``CheckedReply`` where it could be loaded."""

    call_id: int
    lora: LoRARequest


class CheckIntegrity(msgspec.Struct, tag=True, frozen=True):
    """Answered with an empty string, or with what is off."""

    call_id: int


class Shutdown(msgspec.Struct, tag=True, frozen=True):
    pass


Command = (
    AddRequest
    | AbortRequests
    | AddLora
    | RemoveLora
    | PinLora
    | CheckLora
    | CheckIntegrity
    | Shutdown
)


class CallError(msgspec.Struct, tag=True, frozen=True):
    status: int
    message: str
    retry_after_s: float | None = None
    code: str = ""

    @classmethod
    def of(cls, error: MuralError) -> CallError:
        return cls(error.status, error.message, error.retry_after_s, error.code)


class AdapterReply(msgspec.Struct, tag=True, frozen=True):
    info: AdapterInfo


class FreedReply(msgspec.Struct, tag=True, frozen=True):
    freed: FreedBytes


class CheckedReply(msgspec.Struct, tag=True, frozen=True):
    pass


class IntegrityReply(msgspec.Struct, tag=True, frozen=True):
    fault: str


ReplyBody = CallError | AdapterReply | FreedReply | CheckedReply | IntegrityReply


class Reply(msgspec.Struct, frozen=True):
    call_id: int
    body: ReplyBody


class Outputs(msgspec.Struct, omit_defaults=True):
    """One step's news."""

    deltas: list[RequestDelta] = []
    replies: list[Reply] = []
    stats: EngineStats | None = None


class Started(msgspec.Struct, tag=True, frozen=True):
    """The core's first message, and what its model says of texts."""

    info: EngineInfo
    tokenizer: TokenizerState
    defaults: GenerationDefaults


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The core's only message, when it cannot start."""

    message: str
