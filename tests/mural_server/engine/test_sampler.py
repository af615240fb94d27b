"""The sampler against transformers' logits processors, and what it promises about batches."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from mural_resolvers.errors import InvalidInput
from mural_server.engine.sampler import (
    NonFiniteLogits,
    SampledToken,
    Sampler,
    check_stop,
    check_token_ids,
    prompt_logprobs,
    uniforms,
)
from mural_server.sampling_params import SamplingParams

EOS = 7
GREEDY = SamplingParams(temperature=0.0)


@dataclass(eq=False)
class Row:
    sampling: SamplingParams = GREEDY
    tokens: list[int] = field(default_factory=lambda: [1, 2, 3])
    prompt_len: int = 3
    eos_token_ids: frozenset[int] = frozenset({EOS})
    seed: int = 0


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def token_ids(sampled: list[SampledToken]) -> list[int]:
    assert all(s.error is None for s in sampled)
    return [s.token_id for s in sampled]


def oracle_probabilities(row: Row, logits: torch.Tensor) -> torch.Tensor:
    """[vocab] float64: what transformers would draw from, and OpenAI's two penalties."""
    p = row.sampling
    processors = LogitsProcessorList()
    if p.logit_bias:
        bias = [[[token], float(value)] for token, value in p.logit_bias.items()]
        processors.append(SequenceBiasLogitsProcessor(bias))
    if p.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    ids = torch.tensor([row.tokens])
    scores = processors(ids, logits[None].double())
    for token, count in Counter(row.tokens[row.prompt_len :]).items():
        scores[0, token] -= count * p.frequency_penalty + p.presence_penalty
    processors = LogitsProcessorList()
    if p.min_tokens:
        stops = sorted({*row.eos_token_ids, *p.stop_token_ids})
        processors.append(MinNewTokensLengthLogitsProcessor(row.prompt_len, p.min_tokens, stops))
    processors.append(TemperatureLogitsWarper(p.temperature))
    if p.top_k > 0:
        processors.append(TopKLogitsWarper(p.top_k))
    if p.top_p < 1.0:
        processors.append(TopPLogitsWarper(p.top_p))
    if p.min_p > 0.0:
        processors.append(MinPLogitsWarper(p.min_p))
    return processors(ids, scores)[0].softmax(-1)


def assert_drawn_as_the_oracle_would(row: Row, logits: torch.Tensor, token: int) -> None:
    """The token is where the oracle's cumulative distribution crosses the row's noise."""
    probabilities = oracle_probabilities(row, logits)
    position = len(row.tokens) - row.prompt_len
    noise = uniforms(np.array([row.seed], np.uint64), np.array([position], np.uint64))[0]
    reached = probabilities.cumsum(0)
    assert probabilities[token] > 0
    assert reached[token] - probabilities[token] - 1e-5 <= noise <= reached[token] + 1e-5


# -- greedy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest(dtype: torch.dtype) -> None:
    logits = random_logits(5, 1000).to(dtype)
    logits[2, [400, 17, 900]] = 50.0
    sampled = Sampler().sample(logits, [Row() for _ in range(5)])
    assert token_ids(sampled) == logits.float().argmax(-1).tolist()
    assert sampled[2].token_id == 17


def test_an_empty_batch_gives_nothing() -> None:
    assert Sampler().sample(torch.empty(0, 10), []) == []


def test_a_row_count_that_differs_is_refused() -> None:
    with pytest.raises(ValueError, match="2 rows of logits for 1 sequences"):
        Sampler().sample(torch.zeros(2, 10), [Row()])


def test_the_given_logits_are_not_changed() -> None:
    logits = random_logits(3, 300)
    before = logits.clone()
    params = SamplingParams(
        logit_bias={1: 5.0}, repetition_penalty=2.0, min_tokens=4, top_k=3, temperature=0.5
    )
    greedy = SamplingParams(temperature=0.0, logit_bias={1: 5.0})
    Sampler().sample(logits, [Row(params), Row(greedy), Row(SamplingParams())])
    assert torch.equal(logits, before)


# -- drawing, against transformers ---------------------------------------------------------------

FILTERS = {
    "nothing filtered": SamplingParams(),
    "temperature": SamplingParams(temperature=0.7),
    "hot": SamplingParams(temperature=3.0),
    "top-k": SamplingParams(top_k=20),
    "top-k of one": SamplingParams(top_k=1),
    "top-k above the candidates": SamplingParams(top_k=700),
    "top-k above the candidates, top-p": SamplingParams(top_k=700, top_p=0.8),
    "top-k above the vocabulary": SamplingParams(top_k=10_000_000, top_p=0.9),
    "top-p": SamplingParams(top_p=0.3, temperature=0.6),
    "top-p over more than the candidates": SamplingParams(top_p=0.97, temperature=1.5),
    "tiny top-p": SamplingParams(top_p=1e-9),
    "min-p": SamplingParams(min_p=0.1),
    "min-p over more than the candidates": SamplingParams(min_p=1e-4, temperature=2.0),
    "min-p of one": SamplingParams(min_p=1.0),
    "all three": SamplingParams(top_k=50, top_p=0.8, min_p=0.02, temperature=1.2),
    "top-p and min-p": SamplingParams(top_p=0.99, min_p=0.001, temperature=1.5),
    "all three, over all": SamplingParams(top_k=900, top_p=0.99, min_p=1e-5, temperature=2.0),
}


@pytest.mark.parametrize("vocab", [50, 256, 257, 1009, 20_000, 20_480])
@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
def test_tokens_are_drawn_from_the_distribution_of_transformers(
    params: SamplingParams, vocab: int
) -> None:
    logits = random_logits(12, vocab, seed=vocab)
    rows = [Row(params, seed=seed) for seed in range(12)]
    for row, line, token in zip(
        rows, logits, token_ids(Sampler().sample(logits, rows)), strict=True
    ):
        assert_drawn_as_the_oracle_would(row, line, token)


def test_tokens_that_tie_with_the_kth_stay_as_in_transformers() -> None:
    logits = torch.full((600, 2000), -5.0)
    logits[:, 100:1300] = 4.0
    rows = [Row(SamplingParams(top_k=5), seed=seed) for seed in range(600)]
    drawn = token_ids(Sampler().sample(logits, rows))
    assert all(100 <= token < 1300 for token in drawn)
    assert len(set(drawn)) > 300


@pytest.mark.parametrize(("tied", "top_p"), [(range(50, 150), 0.3), (range(2000), 0.99)])
def test_tokens_that_tie_with_the_last_of_top_p_stay(tied: range, top_p: float) -> None:
    logits = torch.full((800, 2000), 0.0)
    logits[:, 50:150] = 4.0
    rows = [Row(SamplingParams(top_p=top_p), seed=seed) for seed in range(800)]
    drawn = set(token_ids(Sampler().sample(logits.bfloat16(), rows)))
    assert drawn <= set(tied)
    assert len(drawn) > 95
    assert (max(drawn) > 1900) == (max(tied) > 1900)


@given(
    seed=st.integers(0, 2**63 - 1),
    tokens=st.lists(st.integers(0, 49), min_size=4, max_size=30),
    prompt_len=st.integers(1, 4),
    params=st.builds(
        SamplingParams,
        temperature=st.floats(0.05, 4.0),
        top_k=st.sampled_from([0, -1, 1, 5, 40, 300]),
        top_p=st.sampled_from([1.0, 0.9, 0.4]),
        min_p=st.sampled_from([0.0, 0.01, 0.3]),
        repetition_penalty=st.floats(0.5, 3.0),
        presence_penalty=st.floats(-2.0, 2.0),
        frequency_penalty=st.floats(-2.0, 2.0),
        logit_bias=st.dictionaries(st.integers(0, 49), st.floats(-5.0, 5.0), max_size=5),
        min_tokens=st.integers(0, 16),
        stop_token_ids=st.lists(st.integers(0, 49), max_size=3).map(tuple),
    ),
)
@settings(max_examples=100, deadline=None)
def test_every_parameter_acts_as_in_transformers_and_openai(
    seed: int, tokens: list[int], prompt_len: int, params: SamplingParams
) -> None:
    row = Row(params, tokens=tokens, prompt_len=prompt_len, seed=seed)
    logits = random_logits(1, 500, seed=seed % 1000)
    [token] = token_ids(Sampler().sample(logits, [row]))
    assert_drawn_as_the_oracle_would(row, logits[0], token)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(top_k=40), SamplingParams(top_p=0.9, temperature=1.3)],
    ids=["unfiltered", "top-k", "top-p"],
)
def test_the_frequencies_of_many_seeds_fit_the_distribution(params: SamplingParams) -> None:
    """Chi-square over ten bins about equally likely, against the 99.9 % quantile."""
    line = random_logits(1, 1000, scale=1.5)[0]
    count = 4_000
    rows = [Row(params, seed=seed) for seed in range(count)]
    drawn = torch.tensor(token_ids(Sampler().sample(line.expand(count, -1), rows)))
    probabilities = oracle_probabilities(rows[0], line)
    bins = (probabilities.cumsum(0) * 10).ceil().clamp(1, 10).long() - 1
    expected = torch.zeros(10, dtype=torch.float64).index_add_(0, bins, probabilities) * count
    observed = torch.bincount(bins[drawn], minlength=10)
    assert bool((observed[expected == 0] == 0).all())
    observed, expected = observed[expected > 0], expected[expected > 0]
    assert float(((observed - expected) ** 2 / expected).sum()) < 27.9


def test_a_flat_distribution_over_a_large_vocabulary_is_drawn_evenly_to_its_end() -> None:
    vocab, count = 151_936, 400
    logits = torch.zeros(1, vocab).expand(count, -1)
    rows = [Row(SamplingParams(), seed=seed) for seed in range(count)]
    drawn = np.array(token_ids(Sampler().sample(logits, rows)))
    noise = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, np.uint64))
    assert np.abs(drawn - noise * vocab).max() <= 1.0


def test_a_token_of_no_probability_is_never_drawn_at_either_end_of_the_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.full((1, 3000), float("-inf"))
    logits[0, 1000:1200] = 0.1
    every = [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.99)]
    for noise, token in ((0.0, 1000), (1.0, 1199)):
        monkeypatch.setattr(
            "mural_server.engine.sampler.uniforms", lambda s, _, u=noise: np.full(len(s), u)
        )
        assert token_ids(Sampler().sample(logits, [Row(every[0])])) == [token]
        assert token_ids(Sampler().sample(logits, [Row(every[1])])) == [token]
        [kept] = token_ids(Sampler().sample(logits, [Row(every[2])]))
        assert 1000 <= kept < 1200


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 100.0])
@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_extreme_temperatures_stay_in_range(temperature: float, top_p: float) -> None:
    logits = random_logits(4, 5000).bfloat16()
    rows = [Row(SamplingParams(temperature=temperature, top_p=top_p), seed=s) for s in range(4)]
    drawn = token_ids(Sampler().sample(logits, rows))
    if temperature < 1e-3:
        best = logits.float().amax(-1)
        assert [float(logits[i, token]) for i, token in enumerate(drawn)] == best.tolist()


# -- noise ---------------------------------------------------------------------------------------


def test_the_noise_is_uniform_and_depends_on_seed_and_position() -> None:
    seeds, positions = np.meshgrid(
        np.arange(200, dtype=np.uint64), np.arange(200, dtype=np.uint64), indexing="ij"
    )
    noise = uniforms(seeds.ravel(), positions.ravel())
    assert len(np.unique(noise)) == noise.size
    assert noise.min() >= 0.0
    assert noise.max() < 1.0
    observed, _ = np.histogram(noise, bins=10, range=(0.0, 1.0))
    assert float(((observed - 4000) ** 2 / 4000).sum()) < 27.9
    square = noise.reshape(200, 200)
    for a, b in ((square[:-1], square[1:]), (square[:, :-1], square[:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_the_noise_does_not_change_between_versions() -> None:
    """Texts that people keep with their seeds depend on these numbers."""
    noise = uniforms(np.array([0, 1, 2**63 - 1], np.uint64), np.array([0, 5, 1000], np.uint64))
    assert noise.tolist() == [0.6524484863740322, 0.7743991716672016, 0.260144116597694]


# -- batches -------------------------------------------------------------------------------------

ANY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 3, 300]),
    top_p=st.sampled_from([1.0, 0.95, 0.5]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([{}, {3: 4.0, 900: -2.0}]),
    min_tokens=st.sampled_from([0, 2]),
    logprobs=st.sampled_from([None, 0, 4]),
)


@given(
    everyone=st.lists(ANY_PARAMS, min_size=2, max_size=6),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    vocab=st.sampled_from([1009, 16_384]),
)
@settings(max_examples=60, deadline=None)
def test_a_row_gets_the_same_tokens_alone_and_among_rows_that_come_and_go(
    everyone: list[SamplingParams], data: st.DataObject, dtype: torch.dtype, vocab: int
) -> None:
    together = [Row(params, seed=i) for i, params in enumerate(everyone)]
    alone = [Row(params, seed=i) for i, params in enumerate(everyone)]
    shared, own = Sampler(), [Sampler() for _ in everyone]
    for step in range(5):
        logits = random_logits(len(everyone), vocab, seed=step).to(dtype)
        present = data.draw(st.permutations(range(len(everyone))))
        present = present[: data.draw(st.integers(1, len(present)))]
        found = shared.sample(logits[present], [together[i] for i in present])
        for i, sampled in zip(present, found, strict=True):
            [expected] = own[i].sample(logits[i : i + 1], [alone[i]])
            assert sampled == expected
            together[i].tokens.append(sampled.token_id)
            alone[i].tokens.append(expected.token_id)


def test_nothing_is_rebuilt_while_the_rows_stay_and_only_the_new_is_when_one_joins() -> None:
    params = SamplingParams(temperature=0.5, repetition_penalty=1.2, min_tokens=2)
    rows = [Row(params, seed=i) for i in range(3)]
    sampler = Sampler()

    def step(present: list[Row]) -> Any:
        sampled = sampler.sample(random_logits(len(present), 100), present)
        for row, token in zip(present, token_ids(sampled), strict=True):
            row.tokens.append(token)
        return sampler._batch

    first = step(rows[:2])
    counts = first.counts()
    assert step(rows[:2]) is first
    passed_min_tokens = step(rows[:2])
    assert passed_min_tokens is not first
    joined = step(rows)
    assert joined is not passed_min_tokens
    assert all(joined.counts()[key] is counts[key] for key in counts)


# -- penalties, bias, min_tokens -----------------------------------------------------------------


def test_presence_and_frequency_look_at_the_output_only() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4], logits[0, 5] = 2.0, 1.5
    params = SamplingParams(temperature=0.0, presence_penalty=0.4, frequency_penalty=0.2)
    assert token_ids(Sampler().sample(logits, [Row(params, [4, 4, 4], 3)])) == [4]
    assert token_ids(Sampler().sample(logits, [Row(params, [1, 4], 1)])) == [5]


def test_the_repetition_penalty_looks_at_the_prompt_too() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 4], logits[0, 5] = 2.0, 1.5
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    assert token_ids(Sampler().sample(logits, [Row(params, [4], 1)])) == [5]


def test_min_tokens_masks_end_of_sequence_and_stop_ids_until_it_is_reached() -> None:
    logits = torch.zeros(1, 20)
    logits[0, EOS], logits[0, 11], logits[0, 2] = 9.0, 8.0, 1.0
    row = Row(SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(11,)))
    sampler = Sampler()
    for expected in (2, 2, EOS):
        assert token_ids(sampler.sample(logits, [row])) == [expected]
        row.tokens.append(expected)


def test_min_tokens_lets_an_end_of_sequence_pass_that_ends_nothing() -> None:
    logits = torch.zeros(1, 20)
    logits[0, EOS] = 9.0
    row = Row(SamplingParams(temperature=0.0, min_tokens=2, ignore_eos=True))
    assert token_ids(Sampler().sample(logits, [row])) == [EOS]


def test_a_token_id_that_the_model_lacks_is_refused() -> None:
    check_token_ids(SamplingParams(logit_bias={9: 1.0}, stop_token_ids=(9,)), 10)
    with pytest.raises(InvalidInput, match="logit_bias: token id 10 is not below 10"):
        check_token_ids(SamplingParams(logit_bias={10: 1.0}), 10)
    with pytest.raises(InvalidInput, match="stop_token_ids: token id 12"):
        check_token_ids(SamplingParams(stop_token_ids=(1, 12)), 10)


# -- log-probabilities ---------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_model_whatever_the_parameters() -> None:
    logits = random_logits(3, 2000).bfloat16()
    hot = SamplingParams(temperature=2.0, top_k=3, logit_bias={5: 90.0}, logprobs=4)
    rows = [Row(hot, seed=1), Row(SamplingParams(temperature=0.0, logprobs=0)), Row()]
    first, second, third = Sampler().sample(logits, rows)
    expected = torch.log_softmax(logits.float(), -1)
    assert first.logprobs is not None
    assert first.token_id == first.logprobs.token_id == 5
    assert first.logprobs.logprob == pytest.approx(float(expected[0, 5]))
    assert first.logprobs.rank == int((expected[0] > expected[0, 5]).sum()) + 1
    top = expected[0].topk(4)
    assert [value for _, value in first.logprobs.top] == pytest.approx(top.values.tolist())
    assert [float(expected[0, t]) for t, _ in first.logprobs.top] == top.values.tolist()
    assert second.logprobs is not None
    assert (second.logprobs.rank, second.logprobs.top) == (1, [])
    assert third.logprobs is None


def test_logprobs_of_a_vocabulary_smaller_than_what_is_asked() -> None:
    [sampled] = Sampler().sample(torch.zeros(1, 5), [Row(SamplingParams(logprobs=20))])
    assert sampled.logprobs is not None
    assert len(sampled.logprobs.top) == 5


def test_prompt_logprobs_score_the_tokens_that_follow() -> None:
    logits = random_logits(4, 1500)
    found = prompt_logprobs(logits, [3, 1499, 0, 3], 2)
    expected = torch.log_softmax(logits, -1)
    assert [entry.token_id for entry in found] == [3, 1499, 0, 3]
    for i, entry in enumerate(found):
        assert entry.logprob == pytest.approx(float(expected[i, entry.token_id]))
        assert entry.rank == int((expected[i] > expected[i, entry.token_id]).sum()) + 1
        assert [t for t, _ in entry.top] == expected[i].topk(2).indices.tolist()


# -- logits that mean nothing --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "all -inf"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, logprobs=2),
        SamplingParams(temperature=0.0, logit_bias={1: 1.0}),
        SamplingParams(logprobs=2),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=300),
        SamplingParams(min_p=0.2, repetition_penalty=1.1),
    ],
)
def test_a_row_of_bad_logits_is_an_error_of_its_own(
    params: SamplingParams, bad: float | str, dtype: torch.dtype
) -> None:
    logits = random_logits(3, 2000).to(dtype)
    good = Sampler().sample(logits[[0, 2]], [Row(params, seed=0), Row(params, seed=2)])
    if isinstance(bad, str):
        logits[1] = -math.inf
    else:
        logits[1, 1234] = bad
    first, second, third = Sampler().sample(logits, [Row(params, seed=i) for i in range(3)])
    assert [first, third] == good
    assert second.token_id == -1
    assert isinstance(second.error, NonFiniteLogits)
    assert second.logprobs is None


# -- when to stop --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        (SamplingParams(), [1, 2], None),
        (SamplingParams(), [1, EOS], ("stop", None)),
        (SamplingParams(ignore_eos=True), [1, EOS], None),
        (SamplingParams(ignore_eos=True, stop_token_ids=(EOS,)), [EOS], ("stop", EOS)),
        (SamplingParams(stop_token_ids=(5,)), [1, 5], ("stop", 5)),
        (SamplingParams(stop_token_ids=(EOS,)), [EOS], ("stop", None)),
        (SamplingParams(min_tokens=3, stop_token_ids=(5,)), [1, 5], None),
        (SamplingParams(max_tokens=2), [1, 2], ("length", None)),
        (SamplingParams(max_tokens=2), [1, EOS], ("stop", None)),
        (SamplingParams(max_tokens=None), [1] * 89, None),
        (SamplingParams(max_tokens=None), [1] * 90, ("length", None)),
        (SamplingParams(max_tokens=None, min_tokens=95), [1] * 90, ("length", None)),
    ],
)
def test_a_sequence_ends_at_its_stop_tokens_and_limits(
    params: SamplingParams, output: list[int], expected: tuple[str, int | None] | None
) -> None:
    assert check_stop(params, output, {EOS}, max_model_len=100, prompt_len=10) == expected
