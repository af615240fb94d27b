"""Every family gives transformers' logits, however the work is cut into steps."""

from __future__ import annotations

import pytest
import torch

LOGITS_ATOL = 1e-4
LOGPROBS_ATOL = 1e-3
FAMILIES = [
    "llama",
    "llama_untied",
    "llama_biased",
    "llama3",
    "llama_yarn",
    "llama_linear",
    "llama_dynamic",
    "mistral",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "gemma3",
    "gemma3_softcap",
]


def random_tokens(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 259, (length,), generator=generator).tolist()


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(actual, expected, atol=LOGITS_ATOL * scale, rtol=0)
    torch.testing.assert_close(
        actual.log_softmax(-1), expected.log_softmax(-1), atol=LOGPROBS_ATOL, rtol=0
    )
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_prefilled_whole_side_by_side(
    family: str, tiny_model, load, paged, new_sequence, oracle_logits
) -> None:
    path = tiny_model(family)
    runner = paged(load(path))
    prompts = [random_tokens(length, seed) for seed, length in enumerate((5, 41, 16))]
    results = runner.step([(new_sequence(prompt), len(prompt)) for prompt in prompts])
    for prompt, logits in zip(prompts, results, strict=True):
        assert_same(logits, oracle_logits(path, prompt))


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_and_decodes_of_several_sequences_in_shared_steps(
    family: str, tiny_model, load, paged, new_sequence, oracle_logits
) -> None:
    path = tiny_model(family)
    runner = paged(load(path))
    texts = [random_tokens(length, seed) for seed, length in enumerate((23, 48, 19), start=10)]
    first, second, third = sequences = [new_sequence(text) for text in texts]
    steps = [
        [(first, 17), (second, 9)],
        [(first, 1), (second, 20), (third, 3)],
        [(first, 1), (third, 13), (second, 14)],
        *[[(first, 1), (second, 1), (third, 1)]] * 3,
        [(first, 1), (second, 1)],
        [(second, 1)],
    ]
    parts: dict[int, list[torch.Tensor]] = {id(sequence): [] for sequence in sequences}
    for work in steps:
        for (sequence, _), logits in zip(work, runner.step(work), strict=True):
            parts[id(sequence)].append(logits)
    for sequence, text in zip(sequences, texts, strict=True):
        assert sequence.computed == len(text)
        assert_same(torch.cat(parts[id(sequence)]), oracle_logits(path, text))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_bfloat16_errs_no_more_than_twice_what_transformers_does(
    family: str, tiny_model, load, paged, new_sequence, oracle_logits
) -> None:
    path = tiny_model(family)
    text = random_tokens(40, seed=4)
    runner = paged(load(path, torch.bfloat16))
    sequence = new_sequence(text)
    logits = torch.cat([runner.step([(sequence, count)])[0] for count in (20, 13, *[1] * 7)])
    exact = oracle_logits(path, text).log_softmax(-1)
    theirs = oracle_logits(path, text, torch.bfloat16).float().log_softmax(-1)
    ours = logits.float().log_softmax(-1)
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()
    assert (ours - exact).abs().max() <= 2 * (theirs - exact).abs().max()


def test_yarn_serves_the_stretched_context(tiny_model, load) -> None:
    assert load(tiny_model("llama_yarn")).max_position == 512
