"""PEFT's ``generate(adapter_names=[...])`` as a contender: what most people would run instead.

It is given its best: one batch of prompts of one length, the KV cache on, no gradient, the
model's and the adapters' weights in the same dtype as Mural's, as many threads, and the faster of
its two attention implementations.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GenerationConfig, GgufConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

from mural_server.bench.adapters import DTYPES, adapter_folder
from mural_server.bench.setup import BenchError, Job, Setup
from mural_server.bench.timing import RequestTimes, Sample

__all__ = ["PeftBaseline"]

BASE = "__base__"
"""PEFT's name for no adapter."""
ATTENTIONS = ("sdpa", "eager")


class PeftBaseline:
    """transformers with PEFT's adapters in this process; see `Contender`."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        self._count = setup.sizes.output_tokens
        base = _load_base(setup)
        # What a call leaves open is taken from the model's own, by which an id could end an answer.
        base.generation_config = GenerationConfig()
        self._base = base
        self._model = self._with_adapters(base, setup)

    def _with_adapters(self, base: PreTrainedModel, setup: Setup) -> PeftModel:
        first, *others = setup.adapters[: setup.sizes.slots]
        # Without the switch PEFT would keep the adapters in float32 beside a bfloat16 base.
        model = PeftModel.from_pretrained(
            base, str(adapter_folder(setup, first)), _key(first), autocast_adapter_dtype=False
        )
        for name in others:
            model.load_adapter(
                str(adapter_folder(setup, name)), _key(name), autocast_adapter_dtype=False
            )
        return model.eval()

    def start(self, jobs: list[Job]) -> list[str]:
        rates = {}
        for attention in ATTENTIONS:
            self._base.set_attn_implementation(attention)
            self.run(jobs)
            rates[attention] = self.run(jobs).tokens_per_s
        best = max(rates, key=rates.__getitem__)
        self._base.set_attn_implementation(best)
        tried = ", ".join(f"{name} {rate:.0f} tok/s" for name, rate in rates.items())
        return [f"PEFT: attention {best} (tried once: {tried})"]

    def settle(self, jobs: list[Job]) -> None:
        self._generate(jobs, 2)

    def run(self, jobs: list[Job]) -> Sample:
        return self._generate(jobs, self._count)

    @torch.inference_mode()
    def _generate(self, jobs: list[Job], count: int) -> Sample:
        prompts = torch.tensor([job.prompt for job in jobs])
        clock = _TokenClock()
        sent = time.perf_counter()
        found = self._model.generate(
            input_ids=prompts,
            attention_mask=torch.ones_like(prompts),
            adapter_names=[_key(job.adapter) if job.adapter else BASE for job in jobs],
            generation_config=GenerationConfig(
                max_new_tokens=count, do_sample=False, use_cache=True, pad_token_id=0
            ),
            streamer=clock,
        )
        seconds = time.perf_counter() - sent
        given = found.shape[1] - prompts.shape[1]
        if given != count or len(clock.times) != count:
            raise BenchError(f"PEFT generated {given} tokens instead of {count}.")
        return Sample(
            seconds=seconds,
            requests=[RequestTimes(sent, clock.times, count) for _ in jobs],
            token_ids=found[:, prompts.shape[1] :].tolist(),
        )

    def check(self) -> None:
        """It keeps nothing between two rounds."""

    def close(self) -> None:
        """It ends with its process."""


class _TokenClock(BaseStreamer):  # type: ignore[misc]  # transformers carries no types
    """Notes when each of the batch's steps has given its tokens."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        # The prompt comes first.
        if self._prompt_seen:
            self.times.append(time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing is held back."""


def _load_base(setup: Setup) -> PreTrainedModel:
    disable_progress_bar()
    path = Path(setup.model)
    folder, kept = path, {}
    if path.is_file():
        # Plain linears: packed weights, where their kernels are installed, would be slower here.
        folder = path.parent
        kept = {"gguf_file": path.name, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=DTYPES[setup.dtype], local_files_only=True, **kept
    ).eval()


def _key(adapter: str) -> str:
    """PEFT makes its adapters' names parts of module names, which take neither ``:`` nor ``.``."""
    return adapter.replace(":", "_").replace(".", "_")
