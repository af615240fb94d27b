"""A server on free ports whose engine is a script: what it answers is up to the test."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import uvicorn.server
from safetensors.numpy import save_file
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mural_resolvers.base_spec import BaseSpec, ModuleSpec
from mural_resolvers.errors import AdapterNotFound, MuralError
from mural_resolvers.ports import listen
from mural_resolvers.request import LoRARequest
from mural_server.api.sampling import SamplingDefaults
from mural_server.api.server import build_state, serve_state
from mural_server.api.state import AppState
from mural_server.engine.client import EngineClient, EngineDead, EngineInfo
from mural_server.engine.messages import (
    AdapterInfo,
    AdapterLevel,
    EngineRequest,
    EngineStats,
    FinishReason,
    FreedBytes,
    RequestDelta,
    TokenLogprobs,
)
from mural_server.lora.checkpoint import LoadOptions, read_checkpoint
from mural_server.models.source import tokenizer_state
from mural_server.settings import ServerSettings
from mural_server.tokenizer import ModelTokenizer
from tests.tiny_models import SPECIAL_TOKENS, tiny_tokenizer

MAX_MODEL_LEN = 256

Script = Callable[[EngineRequest], list[bytes]]


def ids_of(data: bytes) -> list[int]:
    """Token ids of bytes, whatever characters they are."""
    byte_of = {chr(b): b for b in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    others = [b for b in range(256) if b not in byte_of.values()]
    byte_of |= {chr(256 + i): b for i, b in enumerate(others)}
    places = {
        byte_of[char]: place + len(SPECIAL_TOKENS)
        for place, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    return [places[byte] for byte in data]


class ScriptedEngine(EngineClient):
    """Answers each sequence with the byte strings of ``script``, one step each.

    ``hold()`` makes every step wait for ``release``. What was asked and aborted is kept.
    """

    def __init__(self, *, max_loras: int = 4) -> None:
        self.info = EngineInfo(
            model="/models/tiny",
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_loras=max_loras,
            max_cpu_loras=8,
            max_lora_rank=8,
            num_blocks=64,
            block_size=16,
            base_spec=BaseSpec(
                model_names=("tiny",),
                modules={"model.layers.0.self_attn.q_proj": ModuleSpec("linear", 8, 8)},
                vocab_size=len(SPECIAL_TOKENS) + 256,
                hidden_size=8,
                num_layers=1,
                max_lora_rank=8,
            ),
        )
        self.script: Script = lambda request: [b"hello", b" ", b"world"]
        self.finish_reason: FinishReason = "stop"
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.loads: list[LoRARequest] = []
        self.checks: list[LoRARequest] = []
        self.check_gate: asyncio.Event | None = None
        self.refusals: dict[str, MuralError] = {}
        self.resident: dict[int, AdapterInfo] = {}
        self.load_gate: asyncio.Event | None = None
        self.gate: asyncio.Event | None = None
        self.pause: Callable[[], Awaitable[None]] | None = None
        self.stepped = asyncio.Event()
        self.aborts = asyncio.Event()
        self.loading = asyncio.Event()
        self.removed = asyncio.Event()
        self.numbers = EngineStats(num_blocks=64, block_size=16, slots=max_loras)
        self._dead = asyncio.Event()
        self._reason = ""

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestDelta]:
        self.requests.append(request)
        finished = False
        try:
            if request.lora is not None and request.lora.lora_int_id not in self.resident:
                await self.add_lora(request.lora)
            steps = self.script(request)
            for place, data in enumerate(steps):
                if self.gate is not None and place > 0:
                    await self._gate()
                if not self.alive:
                    raise EngineDead(self._reason)
                last = place == len(steps) - 1
                yield self._delta(request, ids_of(data), first=place == 0, last=last)
                self.stepped.set()
            finished = True
        finally:
            if not finished:
                self.aborted.append(request.request_id)
                self.aborts.set()

    async def _gate(self) -> None:
        assert self.gate is not None
        waits = [asyncio.ensure_future(self.gate.wait()), asyncio.ensure_future(self._dead.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _delta(
        self, request: EngineRequest, ids: list[int], *, first: bool, last: bool
    ) -> RequestDelta:
        wanted, of_prompt = request.sampling.logprobs, request.sampling.prompt_logprobs
        if last and self.finish_reason == "stop":
            ids = [*ids, 2]  # the end of the sequence is a token, too
        return RequestDelta(
            request_id=request.request_id,
            token_ids=ids,
            logprobs=[] if wanted is None else [logprob(token, wanted) for token in ids],
            prompt_logprobs=(
                [None, *(logprob(token, of_prompt) for token in request.prompt_token_ids[1:])]
                if first and of_prompt is not None
                else []
            ),
            finish_reason=self.finish_reason if last else None,
            cached_tokens=3,
        )

    async def add_lora(
        self, lora: LoRARequest, *, level: AdapterLevel = "host", pinned: bool = False
    ) -> AdapterInfo:
        self.loads.append(lora)
        self.loading.set()
        if self.pause is not None:
            await self.pause()
        if self.load_gate is not None:
            await self.load_gate.wait()
        if lora.lora_name in self.refusals:
            raise self.refusals[lora.lora_name]
        old = self.resident.get(lora.lora_int_id)
        info = AdapterInfo(
            name=lora.lora_name,
            lora_int_id=lora.lora_int_id,
            digest=lora.digest,
            rank=4,
            bytes=100,
            level="slot" if level == "slot" or (old and old.level == "slot") else "host",
            pinned=pinned or (old is not None and old.pinned),
        )
        self.resident[lora.lora_int_id] = info
        return info

    async def remove_lora(self, lora_int_id: int, *, drain_timeout_s: float = 60.0) -> FreedBytes:
        if self.pause is not None:
            await self.pause()
        info = self.resident.pop(lora_int_id, None)
        self.removed.set()
        return FreedBytes() if info is None else FreedBytes(slot=7, host=info.bytes, kv_blocks=2)

    async def pin_lora(self, lora_int_id: int, *, pinned: bool) -> AdapterInfo:
        if lora_int_id not in self.resident:
            raise AdapterNotFound("not resident")
        self.resident[lora_int_id].pinned = pinned
        return self.resident[lora_int_id]

    async def check_lora(self, lora: LoRARequest) -> None:
        """The real judgement, in this process."""
        self.checks.append(lora)
        if self.check_gate is not None:
            await self.check_gate.wait()
        read_checkpoint(
            Path(lora.lora_path), self.info.base_spec, LoadOptions(dtype="float32"), lora.digest
        )

    def stats(self) -> EngineStats:
        self.numbers.adapters = list(self.resident.values())
        return self.numbers

    @property
    def alive(self) -> bool:
        return not self._dead.is_set()

    def die(self, reason: str = "killed by SIGKILL") -> None:
        self._reason = reason
        self._dead.set()

    async def wait_dead(self) -> str:
        await self._dead.wait()
        return self._reason

    async def drain(self, grace_s: float) -> None:
        self.finish_reason = "abort"
        if self.gate is not None:
            self.gate.set()

    async def close(self) -> None:
        self._dead.set()


def logprob(token: int, top: int) -> TokenLogprobs:
    """A made-up position: the token first, the ones after it next."""
    others = [(token + place, -0.5 - place) for place in range(top)]
    return TokenLogprobs(token, -0.5, 1, others)


UNUSED_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Of clients of plain ports: a context that knows the world's authorities takes 40 ms to make."""


class Server:
    """A running server, and clients of it."""

    def __init__(self, state: AppState, engine: ScriptedEngine, ports: list[int]) -> None:
        self.state = state
        self.engine = engine
        self.url = f"http://127.0.0.1:{ports[0]}"
        self.port = ports[0]
        self.control_port = ports[1]
        self.control_url = f"http://127.0.0.1:{ports[1]}"
        self.stop = asyncio.Event()
        self.exit_status: asyncio.Task[int]
        self.http = httpx.AsyncClient(base_url=self.url, timeout=20, verify=UNUSED_TLS)

    def client(self, key: str = "none") -> openai.AsyncOpenAI:
        http = openai.DefaultAsyncHttpxClient(verify=UNUSED_TLS)
        url = f"{self.url}/v1"
        return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)

    async def post(self, path: str, body: Any, key: str | None = None) -> httpx.Response:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        return await self.http.post(path, json=body, headers=headers)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.post("/v1/completions", {"model": "tiny", "prompt": "Hi"} | body)

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Hi"}]
        return await self.post(
            "/v1/chat/completions", {"model": "tiny", "messages": messages} | body
        )


StartServer = Callable[..., Awaitable[Server]]


class Hurried:
    """asyncio for uvicorn, which looks but ten times a second whether it shall end, and then waits
    as long again: a fifth of a second for each of hundreds of servers."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / 10)


@asynccontextmanager
async def running_server(engine: ScriptedEngine, settings: ServerSettings) -> AsyncIterator[Server]:
    settings.validate()
    uvicorn.server.asyncio = Hurried()  # type: ignore[attr-defined,assignment] # stands for the module
    sockets = [listen("127.0.0.1", 0, flag) for flag in ("--port", "--control-port")]
    for bound in sockets:
        # As uvloop does, which a server runs on; asyncio's own loop leaves it out for such sockets,
        # and every answer comes 40 ms late (Nagle's algorithm beside delayed acknowledgements).
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    ports = [bound.getsockname()[1] for bound in sockets]
    tokenizer = ModelTokenizer(tokenizer_state(tiny_tokenizer()))
    async with build_state(settings, engine, tokenizer, SamplingDefaults()) as state:
        server = Server(state, engine, ports)
        server.exit_status = asyncio.create_task(serve_state(state, sockets, server.stop))
        try:
            yield server
        finally:
            await server.http.aclose()
            server.stop.set()
            if engine.gate is not None:
                engine.gate.set()
            await server.exit_status
            for bound in sockets:
                bound.close()
        state.catalog.check_integrity()
        assert state.admission.open_sequences == 0


@pytest.fixture(name="byte_tokenizer")
def byte_tokenizer_fixture() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


@pytest.fixture
async def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
async def start_server(engine: ScriptedEngine) -> AsyncIterator[StartServer]:
    """``await start_server(**settings)``: a server that ends with the test."""
    async with AsyncExitStack() as held:

        async def start(**settings: Any) -> Server:
            chosen = ServerSettings(served_model_name=("tiny", "tiny-alias"), **settings)
            return await held.enter_async_context(running_server(engine, chosen))

        yield start


@pytest.fixture
async def server(start_server: StartServer, adapter_dir: Path) -> Server:
    """An open server with a directory of adapters and runtime updates on."""
    return await start_server(adapter_dir=str(adapter_dir), allow_runtime_lora_updating=True)


def write_adapter(folder: Path, seed: int, template: str | None = None) -> Path:
    """A small PEFT folder; another seed is other content."""
    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": "tiny",
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = np.random.default_rng(seed)
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file(
        {
            f"{prefix}.lora_A.weight": random.standard_normal((4, 8), dtype=np.float32),
            f"{prefix}.lora_B.weight": random.standard_normal((8, 4), dtype=np.float32),
        },
        folder / "adapter_model.safetensors",
    )
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def adapter_dir(tmp_path: Path) -> Path:
    """Tenants acme (v1, v2) and globex (v1), each version with weights of its own."""
    root = tmp_path / "adapters"
    for seed, name in enumerate(("acme/default/v1", "acme/default/v2", "globex/default/v1")):
        write_adapter(root / name, seed)
    return root


@pytest.fixture
def make_adapter() -> Callable[..., Path]:
    """``make_adapter(folder, seed, template=None)``."""
    return write_adapter


@pytest.fixture
def server_in_thread() -> Iterator[str]:
    """The base URL of an open server whose loop runs in a thread of its own."""
    started: Future[tuple[str, asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def serve() -> None:
        settings = ServerSettings(served_model_name=("tiny",))
        async with running_server(ScriptedEngine(), settings) as server:
            done = asyncio.Event()
            started.set_result((f"{server.url}/v1", asyncio.get_running_loop(), done))
            await done.wait()

    thread = Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    url, loop, done = started.result(timeout=60)
    yield url
    loop.call_soon_threadsafe(done.set)
    thread.join(timeout=60)
