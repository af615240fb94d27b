"""Offline use: the same engine core, driven in this process."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TypedDict, TypeVar

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from typing_extensions import Unpack

from mural_resolvers.conversion import converted
from mural_resolvers.errors import AdapterNotFound, InvalidInput
from mural_resolvers.limits import DEFAULT_LIMITS
from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.request import LoRAIdAllocator, LoRARequest
from mural_resolvers.resolver import LoRAResolver
from mural_resolvers.sources import (
    SourcesConfig,
    directory_source,
    open_registry,
    read_sources,
)
from mural_resolvers.tenants import ANYONE
from mural_server.engine.build import build_core
from mural_server.engine.client import EngineInfo
from mural_server.engine.local import LocalEngine
from mural_server.engine.messages import EngineStats, TokenLogprobs
from mural_server.generation import GenerateRequest, Generator
from mural_server.models.location import default_model_path
from mural_server.models.source import fast_backend, load_tokenizer
from mural_server.sampling_params import SamplingParams
from mural_server.settings import EngineSettings, SettingsError

__all__ = ["LLM", "CompletionOutput", "EngineOptions", "RequestOutput"]

T = TypeVar("T")
Prompt = str | Sequence[int]
Lora = LoRARequest | str | None
Message = Mapping[str, str]


class EngineOptions(TypedDict, total=False):
    """`EngineSettings` but for the model; what is left out has its default."""

    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    kv_cache_memory_bytes: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    cpu_threads: int
    enable_lora: bool
    max_loras: int
    max_cpu_loras: int
    max_cpu_lora_bytes: int
    max_lora_rank: int
    lora_target_modules: tuple[str, ...]
    allow_bin_adapters: bool
    loader_nice: int
    adapter_quantum_tokens: int
    seed: int
    ops: str


class CompletionOutput(msgspec.Struct, kw_only=True):
    """One of a prompt's n answers."""

    index: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    steps: list[int] = []
    """The engine's step of each token: answers that share one were computed in one batch."""
    token_times_s: list[float] = []
    """When each token came, on the clock of `time.perf_counter`."""


class RequestOutput(msgspec.Struct, kw_only=True):
    """A prompt with all of its answers."""

    prompt: str | None
    prompt_token_ids: list[int]
    lora_request: LoRARequest | None
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] = []
    cached_tokens: int = 0
    arrived_s: float = 0.0
    """When it was handed to the engine, on the same clock as ``token_times_s``."""


class LLM:
    """An engine with its model, for batches of prompts.

    ``model``: a Hugging Face directory or GGUF file; None: the packaged SmolLM2. Adapters are
    given by `LoRARequest` (a folder; its id is worked out anew from the content, so that an id
    used twice cannot mix two adapters up) or by name, looked up in ``adapter_dir``, in the sources
    of the YAML file ``adapter_sources``, then by ``resolvers``. Raises `SettingsError` for
    settings that cannot work, `InvalidInput` for sources that cannot. Use it as a context
    manager, or call `close`.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        adapter_dir: str | Path | None = None,
        adapter_sources: str | Path | None = None,
        resolvers: Sequence[LoRAResolver] = (),
        **options: Unpack[EngineOptions],
    ) -> None:
        path = model or default_model_path()
        try:
            settings = converted({"model": path, **options}, EngineSettings, strict=True)
        except InvalidInput as error:
            raise SettingsError(error.message) from None
        self._ids = LoRAIdAllocator()
        self._counter = itertools.count()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        self._thread.start()
        try:
            sources = _sources(adapter_dir, adapter_sources)
            self.tokenizer = load_tokenizer(path)
            backend = fast_backend(self.tokenizer)
            self._engine = self._run(_start(settings))
        except BaseException:
            self._stop_loop()
            raise
        self._generator = Generator(self._engine, backend)
        try:
            self._registry = open_registry(
                sources, self.info.base_spec, self._ids, resolvers=resolvers
            )
        except BaseException:
            self._run(self._engine.close())
            self._stop_loop()
            raise

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Lora | Sequence[Lora] = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts (texts or token ids) side by side; answers in the prompts' order.

        ``sampling_params`` and ``lora_request``: one for all, or one per prompt. Raises the
        `MuralError` of the first request that fails, after which the others are aborted.
        """
        wanted: list[Prompt] = [prompts] if _is_one(prompts) else list(prompts)  # type: ignore[arg-type,list-item]  # narrowed by _is_one
        params = _spread(sampling_params or SamplingParams(), len(wanted), "sampling_params")
        adapters: list[Lora] = _spread(lora_request, len(wanted), "lora_request")
        return self._run(self._generate(wanted, params, adapters, show_progress=use_tqdm))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Lora | Sequence[Lora] = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """As `generate`, with the model's chat template around one or several conversations."""
        many = messages if messages and not isinstance(messages[0], Mapping) else [messages]
        prompts: list[Prompt] = []
        for conversation in many:
            text = self.tokenizer.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=add_generation_prompt
            )
            # The template has written the special tokens itself.
            prompts.append(self.tokenizer.encode(text, add_special_tokens=False))
        return self.generate(prompts, sampling_params, lora_request, use_tqdm=use_tqdm)

    def stats(self) -> EngineStats:
        """The core's counters and its adapters."""
        return self._engine.stats()

    def check_integrity(self) -> None:
        """Raise `AssertionError` when a cache of the engine is not as it must be."""
        self._run(self._engine.check_integrity())

    def unload(self, lora_request: LoRARequest | str) -> int:
        """Drain and free an adapter; returns the bytes of host memory and slot that were freed."""
        return self._run(self._unload(lora_request))

    def close(self) -> None:
        """End the engine; safe to call twice."""
        if self._loop.is_closed():
            return
        self._run(self._close())
        self._stop_loop()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, work: Coroutine[object, object, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await self._registry.close()
        await self._engine.close()

    async def _unload(self, lora: LoRARequest | str) -> int:
        request = await self._adapter(lora)
        if request is None:
            raise AdapterNotFound("There is no adapter to unload.")
        freed = await self._engine.remove_lora(request.lora_int_id)
        return freed.slot + freed.host

    async def _adapter(self, lora: Lora) -> LoRARequest | None:
        if lora is None:
            return None
        if isinstance(lora, str):
            return await self._registry.get(ANYONE, parse_name(lora))
        limits = replace(DEFAULT_LIMITS, admit_bin=True)
        folder = Path(lora.lora_path)
        manifest = await asyncio.to_thread(build_manifest, folder, limits)
        return LoRARequest(
            lora_name=lora.lora_name,
            lora_int_id=self._ids.id_for(manifest.digest),
            lora_path=lora.lora_path,
            digest=manifest.digest,
        )

    async def _generate(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        adapters: Sequence[Lora],
        *,
        show_progress: bool,
    ) -> list[RequestOutput]:
        known = {lora: await self._adapter(lora) for lora in dict.fromkeys(adapters)}
        async with AsyncExitStack() as held:
            for lora, found in known.items():
                if isinstance(lora, str) and found is not None:
                    path = await held.enter_async_context(self._registry.lease(ANYONE, found))
                    known[lora] = msgspec.structs.replace(found, lora_path=str(path))
            loras = [known[lora] for lora in adapters]
            return await self._ask_all(prompts, params, loras, show_progress=show_progress)

    async def _ask_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        adapters: Sequence[LoRARequest | None],
        *,
        show_progress: bool,
    ) -> list[RequestOutput]:
        with _progress(show_progress) as progress:
            bar = progress.add_task("prompts", total=len(prompts))
            tasks = [
                asyncio.create_task(self._one(prompt, sampling, lora))
                for prompt, sampling, lora in zip(prompts, params, adapters, strict=True)
            ]
            for task in tasks:
                task.add_done_callback(lambda _: progress.advance(bar))
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        lora: LoRARequest | None,
    ) -> RequestOutput:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        output = RequestOutput(
            prompt=text,
            prompt_token_ids=ids,
            lora_request=lora,
            outputs=[CompletionOutput(index=i) for i in range(sampling.n)],
            arrived_s=time.perf_counter(),
        )
        request = GenerateRequest(
            request_id=f"offline-{next(self._counter)}",
            prompt_token_ids=ids,
            sampling=sampling,
            lora=lora,
        )
        async with aclosing(self._generator.stream(request)) as updates:
            async for update in updates:
                now = time.perf_counter()
                output.prompt_logprobs = update.prompt_logprobs or output.prompt_logprobs
                output.cached_tokens = max(output.cached_tokens, update.cached_tokens)
                for sequence in update.sequences:
                    answer = output.outputs[sequence.index]
                    answer.text += sequence.text
                    answer.token_ids += sequence.token_ids
                    answer.logprobs += sequence.logprobs
                    answer.steps += [update.step] * len(sequence.token_ids)
                    answer.token_times_s += [now] * len(sequence.token_ids)
                    answer.finish_reason = sequence.finish_reason
                    answer.stop_reason = sequence.stop_reason
        return output


def _sources(adapter_dir: str | Path | None, adapter_sources: str | Path | None) -> SourcesConfig:
    config = SourcesConfig() if adapter_sources is None else read_sources(Path(adapter_sources))
    if adapter_dir is None:
        return config
    return replace(config, resolvers=(directory_source(str(adapter_dir)), *config.resolvers))


async def _start(settings: EngineSettings) -> LocalEngine:
    return LocalEngine(build_core(settings))


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    return isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))


def _spread(value: T | Sequence[T], count: int, name: str) -> list[T]:
    """One value for each of ``count`` prompts."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != count:
            raise ValueError(f"{len(value)} {name} for {count} prompts: give one each, or one")
        return list(value)
    return [value] * count


def _progress(show: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        disable=not show,
        transient=True,
    )
