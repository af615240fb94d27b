"""The engine's answers against transformers and PEFT in float32, base and adapters in one batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from mural_resolvers.request import LoRARequest
from mural_server import LLM, SamplingParams

if TYPE_CHECKING:
    from tests.mural_server.conftest import OracleOf, PeftOracle

FAMILIES = ["llama", "llama_untied", "llama3", "mistral", "qwen2", "qwen3", "gemma3"]
NAMES = ["all", "query_value", "patterns", "gate_one_layer"]
TOKENS = 10

SHAPES: dict[str, dict[str, object]] = {
    "default": {},
    "small chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 4},
    "whole prompts": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128,
                      "max_model_len": 128},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    "one slot": {"max_loras": 1, "adapter_quantum_tokens": 2},
    "two slots, small chunks": {"max_loras": 2, "adapter_quantum_tokens": 1,
                                "max_num_batched_tokens": 9, "max_num_seqs": 8},
    "little host memory": {"max_loras": 1, "max_cpu_loras": 1, "adapter_quantum_tokens": 3},
    "reference operators": {"ops": "reference"},
}  # fmt: skip


def prompts_of(count: int, seed: int = 0) -> list[list[int]]:
    """Prompts of which some begin alike, so that prefix blocks are shared where they may be."""
    draw = random.Random(seed)
    shared = [draw.randrange(3, 250) for _ in range(40)]
    return [
        shared[: draw.choice([0, 16, 33])]
        + [draw.randrange(3, 250) for _ in range(draw.randint(1, 30))]
        for _ in range(count)
    ]


def check_answers(
    llm: LLM,
    oracle: PeftOracle,
    folders: list[Path | None],
    prompts: list[list[int]],
    rounds: int = 2,
) -> None:
    """Every prompt under every adapter, all in one call; twice, so that prefix blocks are met."""
    cases = [(folder, prompt) for prompt in prompts for folder in folders]
    adapters = {
        folder: LoRARequest(folder.name, i, str(folder)) if folder else None
        for i, folder in enumerate(folders, start=1)
    }
    for _ in range(rounds):
        outputs = llm.generate(
            [prompt for _, prompt in cases],
            SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0),
            [adapters[folder] for folder, _ in cases],
            use_tqdm=False,
        )
        for (folder, prompt), output in zip(cases, outputs, strict=True):
            wanted = oracle.answer(folder, prompt, TOKENS)
            [got] = output.outputs
            where = f"{folder.name if folder else 'base'}, {len(prompt)} prompt tokens"
            assert got.token_ids == wanted.token_ids, where
            logprobs = [entry.logprob for entry in got.logprobs]
            assert logprobs == pytest.approx(wanted.logprobs, abs=1e-3), where
        llm.check_integrity()


def run(oracle: PeftOracle, names: list[str], **shape: Any) -> None:
    defaults: dict[str, Any] = {
        "max_model_len": 256,
        "kv_cache_memory_bytes": 8 << 20,
        "max_num_seqs": 8,
    }
    folders = [None, *(oracle.folder(name) for name in names)]
    with LLM(str(oracle.path), dtype="float32", cpu_threads=1, **(defaults | shape)) as llm:
        check_answers(llm, oracle, folders, prompts_of(3))


@pytest.mark.parametrize("family", FAMILIES)
def test_base_and_adapters_mixed_in_one_batch_answer_as_peft(
    family: str, peft_oracle: OracleOf
) -> None:
    run(peft_oracle(family), NAMES, max_num_batched_tokens=64)


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_do_not_depend_on_how_the_engine_is_set_up(
    shape: str, peft_oracle: OracleOf
) -> None:
    run(peft_oracle("llama"), NAMES, **SHAPES[shape])


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_family_in_every_shape(family: str, shape: str, peft_oracle: OracleOf) -> None:
    run(peft_oracle(family), NAMES, **SHAPES[shape])


@pytest.mark.parametrize("family", ["llama_untied", "gemma3"])
def test_adapters_on_embedding_and_output_answer_as_peft(
    family: str, peft_oracle: OracleOf
) -> None:
    run(peft_oracle(family), ["embedding", "head", "all"], max_num_batched_tokens=16)


def test_preemption_under_little_memory_changes_no_answer(
    peft_oracle: OracleOf,
) -> None:
    oracle = peft_oracle("llama")
    folders = [None, oracle.folder("all"), oracle.folder("query_value")]
    block = 2 * 3 * 2 * 16 * 16 * 4  # keys and values, layers, kv heads, tokens, head_dim, bytes
    with LLM(
        str(oracle.path), dtype="float32", cpu_threads=1, max_model_len=96, max_loras=1,
        adapter_quantum_tokens=2, kv_cache_memory_bytes=10 * block,
    ) as llm:  # fmt: skip
        check_answers(llm, oracle, folders, prompts_of(4, seed=1))
        assert llm.stats().preemptions > 0


def test_prompt_logprobs_are_those_of_the_adapter(peft_oracle: OracleOf) -> None:
    oracle = peft_oracle("qwen3")
    folders = [None, oracle.folder("all")]
    [prompt] = prompts_of(1, seed=3)
    prompt = prompt + prompts_of(1, seed=4)[0]
    with LLM(str(oracle.path), dtype="float32", cpu_threads=1, max_num_batched_tokens=20) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [prompt] * 2,
                SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2),
                [LoRARequest("x", 1, str(f)) if f else None for f in folders],
                use_tqdm=False,
            )
            for folder, output in zip(folders, outputs, strict=True):
                assert output.prompt_logprobs[0] is None
                got = [entry.logprob for entry in output.prompt_logprobs[1:] if entry]
                assert got == pytest.approx(
                    oracle.answer(folder, prompt, 1).prompt_logprobs, abs=1e-3
                )


def test_the_same_seed_gives_the_same_text_whatever_the_batch(
    peft_oracle: OracleOf,
) -> None:
    oracle = peft_oracle("llama")
    prompt = prompts_of(1)[0]
    lora = LoRARequest("x", 1, str(oracle.folder("all")))
    seeded = SamplingParams(temperature=1.5, top_p=0.95, seed=7, max_tokens=20, ignore_eos=True)
    noisy = SamplingParams(temperature=1.5, max_tokens=20, ignore_eos=True)
    with LLM(str(oracle.path), dtype="float32", cpu_threads=1) as llm:
        [alone] = llm.generate(prompt, seeded, lora, use_tqdm=False)
        crowd = llm.generate(
            [*prompts_of(6, seed=9), prompt],
            [noisy] * 6 + [seeded],
            [lora, None, lora, None, lora, None, lora],
            use_tqdm=False,
        )
        assert crowd[-1].outputs[0].token_ids == alone.outputs[0].token_ids


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_bfloat16_stays_near_float32(family: str, peft_oracle: OracleOf) -> None:
    """Log-probabilities of the float32 answer's tokens, forced as a prompt: within 0.5 of it.

    The random models' logits spread over tens, and bfloat16 holds 8 bits.
    """
    oracle = peft_oracle(family)
    folder = oracle.folder("all")
    prompt = prompts_of(1)[0]
    wanted = oracle.answer(folder, prompt, TOKENS)
    with LLM(str(oracle.path), dtype="bfloat16", cpu_threads=1) as llm:
        [output] = llm.generate(
            [prompt + wanted.token_ids],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
            LoRARequest("x", 1, str(folder)),
            use_tqdm=False,
        )
    got = [entry.logprob for entry in output.prompt_logprobs[len(prompt) :] if entry]
    difference = (torch.tensor(got) - torch.tensor(wanted.logprobs)).abs()
    assert difference.mean() < 0.5
