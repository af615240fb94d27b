"""The part of a client that is the same wherever the core runs: streams, calls, and its death."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable

from mural_resolvers.errors import InvalidInput, Unavailable, error_from_status
from mural_resolvers.request import LoRARequest
from mural_server.engine.client import EngineClient, EngineDead, EngineInfo
from mural_server.engine.messages import (
    AdapterInfo,
    AdapterLevel,
    EngineRequest,
    EngineStats,
    FreedBytes,
    RequestDelta,
)
from mural_server.engine.wire import (
    AbortRequests,
    AdapterReply,
    AddLora,
    AddRequest,
    CallError,
    CheckedReply,
    CheckIntegrity,
    CheckLora,
    Command,
    FreedReply,
    IntegrityReply,
    Outputs,
    PinLora,
    RemoveLora,
    ReplyBody,
)

DRAIN_POLL_S = 0.05
CALL_TIMEOUT_S = 600.0


class ConnectedClient(EngineClient):
    """Streams and calls over two functions: `_send` out, `_dispatch` in."""

    def __init__(self, info: EngineInfo) -> None:
        self.info = info
        self._streams: dict[str, asyncio.Queue[RequestDelta | None]] = {}
        self._calls: dict[int, asyncio.Future[ReplyBody]] = {}
        self._next_call = 0
        self._stats = EngineStats(num_blocks=info.num_blocks, block_size=info.block_size)
        self._death: str | None = None
        self._dead = asyncio.Event()

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Hand a command to the core without waiting."""

    def _dispatch(self, outputs: Outputs) -> None:
        for delta in outputs.deltas:
            queue = self._streams.get(delta.request_id)
            if queue is not None:
                queue.put_nowait(delta)
        for reply in outputs.replies:
            call = self._calls.pop(reply.call_id, None)
            if call is not None and not call.done():
                call.set_result(reply.body)
        if outputs.stats is not None:
            self._stats = outputs.stats

    def _die(self, reason: str) -> None:
        """Every open stream and call ends with `EngineDead` now."""
        if self._death is not None:
            return
        self._death = reason
        self._dead.set()
        for queue in self._streams.values():
            queue.put_nowait(None)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(EngineDead(reason))
        self._calls.clear()

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(self._death)

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        self._check_alive()
        if request.request_id in self._streams:
            raise InvalidInput(f"request id {request.request_id} is in use")
        queue: asyncio.Queue[RequestDelta | None] = asyncio.Queue()
        self._streams[request.request_id] = queue
        finished = False
        try:
            self._send(AddRequest(request))
            while not finished:
                delta = await queue.get()
                if delta is None:
                    self._check_alive()
                    continue
                finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[request.request_id]
            if not finished and self.alive:
                self._send(AbortRequests([request.request_id]))

    async def _call(self, make: Callable[[int], Command], timeout_s: float) -> ReplyBody:
        self._check_alive()
        call_id = self._next_call
        self._next_call += 1
        future = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(make(call_id))
            body: ReplyBody = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise Unavailable("The engine core does not answer.", retry_after_s=5.0) from None
        finally:
            self._calls.pop(call_id, None)
        if isinstance(body, CallError):
            raise error_from_status(body.status, body.message, body.retry_after_s, body.code)
        return body

    async def add_lora(
        self, lora: LoRARequest, *, level: AdapterLevel = "host", pinned: bool = False
    ) -> AdapterInfo:
        body = await self._call(lambda i: AddLora(i, lora, level, pinned), CALL_TIMEOUT_S)
        assert isinstance(body, AdapterReply)
        return body.info

    async def remove_lora(self, lora_int_id: int, *, drain_timeout_s: float = 60.0) -> FreedBytes:
        body = await self._call(
            lambda i: RemoveLora(i, lora_int_id, drain_timeout_s), drain_timeout_s + CALL_TIMEOUT_S
        )
        assert isinstance(body, FreedReply)
        return body.freed

    async def pin_lora(self, lora_int_id: int, *, pinned: bool) -> AdapterInfo:
        body = await self._call(lambda i: PinLora(i, lora_int_id, pinned), CALL_TIMEOUT_S)
        assert isinstance(body, AdapterReply)
        return body.info

    async def check_lora(self, lora: LoRARequest) -> None:
        body = await self._call(lambda i: CheckLora(i, lora), CALL_TIMEOUT_S)
        assert isinstance(body, CheckedReply)

    async def check_integrity(self) -> None:
        """Raise `AssertionError` when a cache of the core is not as it must be."""
        body = await self._call(CheckIntegrity, CALL_TIMEOUT_S)
        assert isinstance(body, IntegrityReply)
        if body.fault:
            raise AssertionError(body.fault)

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def alive(self) -> bool:
        return self._death is None

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self._death or ""

    async def drain(self, grace_s: float) -> None:
        deadline = asyncio.get_running_loop().time() + grace_s
        while self._streams and self.alive:
            if asyncio.get_running_loop().time() >= deadline:
                self._send(AbortRequests(None))
                return
            await asyncio.sleep(DRAIN_POLL_S)
