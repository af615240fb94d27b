"""From logits to tokens, for a whole batch at once, and when a sequence has said enough.

Every row is drawn by inverting the cumulative distribution *in the order of the vocabulary* at
one uniform number that depends on the row's seed and position alone. So a row's token does not
depend on which rows stand beside it, nor on which of the three ways below found it:

- nothing is filtered: sums of 64 neighbouring tokens are accumulated first, then the 64 inside;
- top-k, top-p or min-p: the 256 likeliest tokens (`NUM_CANDIDATES`) nearly always hold all that
  is kept;
- where they do not: that row alone is cut over the whole vocabulary.

The parameters act in the order of transformers: logit bias, repetition, presence and frequency
penalties, min_tokens, temperature, top-k, top-p, min-p. What ties with the last token kept is
kept, by top-p too: so the order in which a sort leaves ties, of which bfloat16 makes many, does
not matter.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mural_resolvers.errors import InvalidInput, MuralError
from mural_server.engine.messages import TokenLogprobs
from mural_server.sampling_params import MAX_LOGPROBS, SamplingParams

__all__ = [
    "NonFiniteLogits",
    "SampleRow",
    "SampledToken",
    "Sampler",
    "check_stop",
    "check_token_ids",
    "prompt_logprobs",
    "uniforms",
]

NUM_CANDIDATES = 256
"""How many of the likeliest tokens are looked at before a row is cut over all of them."""
SUM_BLOCK = 64
TOP_BLOCK = 16
GOLDEN = np.uint64(0x9E3779B97F4A7C15)

Uint64s: TypeAlias = npt.NDArray[np.uint64]


class NonFiniteLogits(MuralError):
    """The model gave NaN or infinity for this row: its token means nothing."""

    code = "non_finite_logits"

    def __init__(self) -> None:
        super().__init__("the model's logits are not finite")


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A row's next token. Where ``error`` is set, ``token_id`` is -1."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: NonFiniteLogits | None = None


class SampleRow(Protocol):
    """One sequence as the sampler sees it, the same object in every step.

    What a row needs is kept while it stays in the batch, so ``tokens`` only ever grows.
    """

    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def tokens(self) -> Sequence[int]:
        """The prompt with the output behind it."""
        ...

    @property
    def prompt_len(self) -> int: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def seed(self) -> int:
        """In [0, 2**63); drawn at random at admission for a request that brings none."""
        ...


def _position(row: SampleRow) -> int:
    """Index in the output of the token to be sampled."""
    return len(row.tokens) - row.prompt_len


def _masks_stops(row: SampleRow) -> bool:
    """Whether min_tokens still forbids the tokens that would end the sequence."""
    return _position(row) < row.sampling.min_tokens


def _stop_ids(row: SampleRow) -> set[int]:
    eos = () if row.sampling.ignore_eos else row.eos_token_ids
    return {*eos, *row.sampling.stop_token_ids}


def _is_penalised(params: SamplingParams) -> bool:
    penalties = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
    return penalties != (1.0, 0.0, 0.0)


def _is_edited(row: SampleRow) -> bool:
    """Whether the logits change before they are compared."""
    params = row.sampling
    return _is_penalised(params) or _masks_stops(row) or bool(params.logit_bias)


def _kind(params: SamplingParams) -> Literal["greedy", "unfiltered", "filtered"]:
    if params.greedy:
        return "greedy"
    filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    return "filtered" if filtered else "unfiltered"


class _TokenCounts:
    """The distinct tokens of a sequence and how often each stands in the output."""

    def __init__(self, row: SampleRow) -> None:
        # Only the repetition penalty looks at the prompt.
        looks_back = row.sampling.repetition_penalty != 1.0
        prompt = row.tokens[: row.prompt_len] if looks_back else ()
        self._index = {token: i for i, token in enumerate(dict.fromkeys(prompt))}
        self._ids = array("q", self._index)
        self._counts = array("q", bytes(8 * len(self._ids)))
        self._seen = row.prompt_len

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens[self._seen :]:
            at = self._index.setdefault(token, len(self._ids))
            if at == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[at] += 1
        self._seen = len(tokens)

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """A view; drop it before the next `advance`, which may move the memory."""
        return np.frombuffer(self._ids, dtype=np.int64)

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """A view, as ``ids``."""
        return np.frombuffer(self._counts, dtype=np.int64)


def _mix64(x: Uint64s) -> Uint64s:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Uint64s = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: Uint64s, positions: Uint64s) -> npt.NDArray[np.float64]:
    """Give one number in [0, 1) for each (seed, position): the SplitMix64 stream of the mixed seed.

    The seed is mixed first so that the streams of neighbouring seeds have nothing in common.
    """
    state = _mix64(seeds + GOLDEN) + (positions + np.uint64(1)) * GOLDEN
    return (_mix64(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


_Counts: TypeAlias = Mapping[int, _TokenCounts]


@dataclass(frozen=True, slots=True)
class _Group:
    """Some rows of a batch, with what their parameters become as tensors."""

    rows: tuple[SampleRow, ...]
    where: Tensor
    """[m] int64: their places in the tensor that the group is cut from."""
    whole: bool
    """They are all the rows of that tensor, in its order."""

    def cut(self, x: Tensor) -> Tensor:
        """Give the group's rows of ``x``: ``x`` itself when that is all of them."""
        return x if self.whole else x.index_select(0, self.where)

    def __bool__(self) -> bool:
        return bool(self.rows)


def _group(rows: Sequence[SampleRow], chosen: Sequence[int], device: torch.device) -> _Group:
    return _Group(
        rows=tuple(rows[i] for i in chosen),
        where=torch.tensor(chosen, dtype=torch.int64, device=device),
        whole=len(chosen) == len(rows),
    )


@dataclass(frozen=True, slots=True)
class _Draws:
    """Rows that draw at random; a column vector each, float64."""

    group: _Group
    seeds: Uint64s
    temperature: Tensor
    top_k: Tensor
    """0: all."""
    top_p: Tensor
    min_p: Tensor

    @classmethod
    def of(cls, rows: Sequence[SampleRow], chosen: Sequence[int], logits: Tensor) -> _Draws:
        vocab_size, device = logits.shape[1], logits.device

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device).unsqueeze(1)

        group = _group(rows, chosen, device)
        params = [row.sampling for row in group.rows]
        return cls(
            group=group,
            seeds=np.array([row.seed for row in group.rows], dtype=np.uint64),
            temperature=column([p.temperature for p in params]),
            top_k=column([p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]).long(),
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
        )

    def uniforms(self) -> Tensor:
        """[m, 1] float64: this step's noise."""
        positions = np.array([_position(row) for row in self.group.rows], dtype=np.uint64)
        unit = torch.from_numpy(uniforms(self.seeds, positions)).unsqueeze(1)
        return unit.to(self.temperature.device)


class _Penalised(NamedTuple):
    place: int
    row: SampleRow
    counts: _TokenCounts


@dataclass(frozen=True, slots=True)
class _Edits:
    """Where the logits of the worked rows change: indices into the flattened [m, vocab]."""

    bias_index: Tensor
    bias: Tensor
    masked_index: Tensor
    penalised: tuple[_Penalised, ...]

    @classmethod
    def of(cls, rows: Sequence[SampleRow], logits: Tensor, counts: _Counts) -> _Edits:
        vocab, device = logits.shape[1], logits.device
        bias = [
            (i * vocab + token, value)
            for i, row in enumerate(rows)
            for token, value in row.sampling.logit_bias.items()
            if token < vocab
        ]
        masked = [
            i * vocab + token
            for i, row in enumerate(rows)
            if _masks_stops(row)
            for token in _stop_ids(row)
            if token < vocab
        ]
        return cls(
            bias_index=torch.tensor([at for at, _ in bias], dtype=torch.int64, device=device),
            bias=torch.tensor([v for _, v in bias], dtype=torch.float32, device=device),
            masked_index=torch.tensor(masked, dtype=torch.int64, device=device),
            penalised=tuple(
                _Penalised(i, row, counts.get(id(row)) or _TokenCounts(row))
                for i, row in enumerate(rows)
                if _is_penalised(row.sampling)
            ),
        )

    def __bool__(self) -> bool:
        return bool(self.penalised) or len(self.bias) + len(self.masked_index) > 0

    def apply(self, x: Tensor) -> None:
        """Change ``x`` [m, vocab] float32 in place."""
        flat = x.view(-1)
        if len(self.bias):
            flat.index_add_(0, self.bias_index, self.bias)
        if self.penalised:
            _penalise(x, self.penalised)
        if len(self.masked_index):
            flat.index_fill_(0, self.masked_index, float("-inf"))


def _penalise(x: Tensor, penalised: Sequence[_Penalised]) -> None:
    """Touch only tokens that occur: the cost follows the sequences, not the vocabulary."""
    for entry in penalised:
        entry.counts.advance(entry.row.tokens)
    counts = [entry.counts for entry in penalised]
    lengths = [len(c.ids) for c in counts]
    start = [entry.place * x.shape[1] for entry in penalised]

    def spread(values: list[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, np.float32), lengths)).to(x.device)

    at = torch.from_numpy(np.concatenate([c.ids for c in counts]) + np.repeat(start, lengths))
    at = at.to(x.device)
    count = torch.from_numpy(np.concatenate([c.output_counts for c in counts])).to(x.device)
    params = [entry.row.sampling for entry in penalised]
    repetition = spread([p.repetition_penalty for p in params])
    flat = x.view(-1)
    value = flat[at]
    value = torch.where(value < 0, value * repetition, value / repetition)
    value -= spread([p.frequency_penalty for p in params]) * count
    value -= spread([p.presence_penalty for p in params]) * (count > 0)
    flat[at] = value


@dataclass(frozen=True, slots=True)
class _Batch:
    """Everything about a set of rows that stays the same from step to step.

    Token counts are carried over to the next batch; a row that was away has its own counted anew.
    """

    rows: tuple[SampleRow, ...]
    shape: tuple[int, int]
    masks_stops: tuple[bool, ...]
    plain: _Group
    """Greedy and unedited: an argmax over the logits as they are."""
    worked: _Group
    """The rest, of which a float32 copy is made; the next three are groups of that copy."""
    edits: _Edits
    greedy: _Group
    unfiltered: _Draws
    filtered: _Draws
    with_logprobs: _Group

    @classmethod
    def of(cls, rows: Sequence[SampleRow], logits: Tensor, counts: _Counts) -> _Batch:
        device = logits.device
        plain = [i for i, row in enumerate(rows) if row.sampling.greedy and not _is_edited(row)]
        worked = _group(rows, sorted({*range(len(rows))} - {*plain}), device)
        where: dict[str, list[int]] = {"greedy": [], "unfiltered": [], "filtered": []}
        for i, row in enumerate(worked.rows):
            where[_kind(row.sampling)].append(i)
        wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        return cls(
            rows=tuple(rows),
            shape=(logits.shape[0], logits.shape[1]),
            masks_stops=tuple(_masks_stops(row) for row in rows),
            plain=_group(rows, plain, device),
            worked=worked,
            edits=_Edits.of(worked.rows, logits, counts),
            greedy=_group(worked.rows, where["greedy"], device),
            unfiltered=_Draws.of(worked.rows, where["unfiltered"], logits),
            filtered=_Draws.of(worked.rows, where["filtered"], logits),
            with_logprobs=_group(rows, wanted, device),
        )

    def counts(self) -> _Counts:
        """By ``id(row)``, which stands for the row as long as this batch holds it."""
        return {id(entry.row): entry.counts for entry in self.edits.penalised}

    def still_holds(self, rows: Sequence[SampleRow], logits: Tensor) -> bool:
        return (
            len(rows) == len(self.rows)
            and self.shape == logits.shape
            and all(a is b for a, b in zip(rows, self.rows, strict=True))
            and all(_masks_stops(r) == m for r, m in zip(rows, self.masks_stops, strict=True))
        )


class Sampler:
    """Samples one token for each row; remembers the last batch so that only changes cost.

    Not safe for two threads at once.
    """

    def __init__(self) -> None:
        self._batch: _Batch | None = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
        """Choose the next token of ``rows[i]`` from ``logits[i]``.

        ``logits``: [n, vocab], float32, bfloat16 or float16, not changed. A row whose logits are
        not finite gets `SampledToken.error`; the others are not touched by it.
        """
        if logits.shape[0] != len(rows):
            raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sequences")
        if not rows:
            return []
        if self._batch is None or not self._batch.still_holds(rows, logits):
            counts = self._batch.counts() if self._batch else {}
            self._batch = _Batch.of(rows, logits, counts)
        batch = self._batch
        peaks, tokens = _choose(batch, logits)
        ids = tokens.tolist()
        finite = torch.isfinite(peaks).tolist()
        logprobs = _logprobs_of(batch, logits, tokens, finite)
        return [
            SampledToken(ids[i], logprobs.get(i))
            if finite[i]
            else SampledToken(-1, error=NonFiniteLogits())
            for i in range(len(rows))
        ]


def _choose(batch: _Batch, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Give each row's largest logit [n] and its token [n]."""
    if batch.plain.whole:
        return _peak(logits)
    peaks = torch.empty(len(batch.rows), dtype=torch.float32, device=logits.device)
    tokens = torch.empty(len(batch.rows), dtype=torch.int64, device=logits.device)
    if batch.plain:
        values, indices = _peak(batch.plain.cut(logits))
        peaks[batch.plain.where] = values.float()
        tokens[batch.plain.where] = indices
    x = batch.worked.cut(logits).to(torch.float32)
    if batch.edits:
        x = x.clone(memory_format=torch.contiguous_format) if x is logits else x.contiguous()
        batch.edits.apply(x)
    if batch.greedy:
        _place(batch, batch.greedy, peaks, tokens, *_peak(batch.greedy.cut(x)))
    if batch.unfiltered.group:
        found = _draw_unfiltered(batch.unfiltered, batch.unfiltered.group.cut(x))
        _place(batch, batch.unfiltered.group, peaks, tokens, *found)
    if batch.filtered.group:
        found = _draw_filtered(batch.filtered, batch.filtered.group.cut(x))
        _place(batch, batch.filtered.group, peaks, tokens, *found)
    return peaks, tokens


def _peak(x: Tensor) -> tuple[Tensor, Tensor]:
    """Give the largest number of each row of ``x`` [m, vocab], or its NaN, and where it stands."""
    if x.device.type == "cpu" and x.dtype == torch.float32:
        # numpy's takes a sixth of the time of torch's max.
        where = torch.from_numpy(x.numpy().argmax(-1))
        return x.gather(1, where.unsqueeze(1)).squeeze(1), where
    # max, not argmax: the latter is five times as slow in bf16 on a CPU.
    largest = x.max(-1)
    return largest.values, largest.indices


def _place(
    batch: _Batch, group: _Group, peaks: Tensor, tokens: Tensor, peak: Tensor, token: Tensor
) -> None:
    where = group.cut(batch.worked.where)
    peaks[where] = peak
    tokens[where] = token


def _draw_unfiltered(draws: _Draws, x: Tensor) -> tuple[Tensor, Tensor]:
    peak = x.amax(-1, keepdim=True)
    weights = _weights(x, peak, draws.temperature)
    return peak.squeeze(1), _invert(weights, draws.uniforms())


def _draw_filtered(draws: _Draws, x: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = _largest(x, min(NUM_CANDIDATES, x.shape[1]))
    peak = values[:, :1]
    weight = ((values.double() - peak) / draws.temperature).exp_()
    keep = _kept_candidates(draws, x, values, weight)
    order = ids.argsort(-1)
    reached = (weight * keep).gather(1, order).cumsum(-1)
    uniforms = draws.uniforms()
    target = _just_below(uniforms * reached[:, -1:], reached[:, -1:])
    tokens = ids.gather(1, order.gather(1, _first_above(reached, target))).squeeze(1)
    # What is kept is a run from the top, so all of it was seen once one was dropped.
    unsettled = keep[:, -1:] | (draws.top_k >= NUM_CANDIDATES)
    unsettled &= torch.isfinite(peak)
    again = unsettled.squeeze(1).nonzero().squeeze(1)
    if len(again) and values.shape[1] < x.shape[1]:
        tokens[again] = _draw_over_all(draws, x, peak, uniforms, again)
    return peak.squeeze(1), tokens


def _draw_over_all(
    draws: _Draws, x: Tensor, peak: Tensor, uniforms: Tensor, rows: Tensor
) -> Tensor:
    """Draw for the rows of which more than the candidates may be kept."""
    weights = _weights(x[rows], peak[rows], draws.temperature[rows])
    params = [draws.group.rows[i].sampling for i in rows.tolist()]
    least = [_least_kept(p, w) for p, w in zip(params, weights.cpu().numpy(), strict=True)]
    kept = weights >= torch.tensor(least, device=x.device).unsqueeze(1)
    return _invert(torch.where(kept, weights, 0.0), uniforms[rows])


def _kept_candidates(draws: _Draws, x: Tensor, values: Tensor, weight: Tensor) -> Tensor:
    """[m, candidates] bool: what top-k, top-p and min-p keep, candidates best first."""
    last = (draws.top_k - 1).clamp_(0, values.shape[1] - 1)
    keep = (draws.top_k == 0) | (values >= values.gather(1, last))
    weight = weight * keep
    limited = draws.top_p < 1.0
    total = weight.sum(-1, keepdim=True)
    over_all = (limited & (draws.top_k == 0)).squeeze(1).nonzero().squeeze(1)
    if len(over_all) and values.shape[1] < x.shape[1]:
        part = _weights(x[over_all], values[over_all, :1], draws.temperature[over_all])
        total[over_all] = _in_blocks(part, SUM_BLOCK).sum(-1).double().sum(-1, keepdim=True)
    above = weight.cumsum(-1) - weight
    last = (above < draws.top_p * total).sum(-1, keepdim=True) - 1
    keep &= ~limited | (values >= values.gather(1, last.clamp_(min=0)))
    return keep & (weight >= draws.min_p)


def _least_kept(params: SamplingParams, weights: npt.NDArray[np.float32]) -> float:
    """Give the smallest weight [vocab] that is kept, for a row of which the candidates are few.

    numpy, whose sort and partition are vectorised.
    """
    least = params.min_p
    if 0 < params.top_k < len(weights):
        kth = len(weights) - params.top_k
        smallest = np.partition(weights, kth)[kth]
        least = max(least, float(smallest))
        weights = weights[weights >= smallest]
    if params.top_p < 1.0:
        total = float(weights.sum(dtype=np.float64))
        # Tokens below an equal share of 1 - top_p together hold less than 1 - top_p: all of
        # them are dropped, and only the few above need sorting. Rounding must not drop one more.
        floor = (1.0 - params.top_p) * total / len(weights) * (1.0 - 1e-6)
        ranked = np.sort(weights[weights >= floor])[::-1]
        above = ranked.cumsum(dtype=np.float64) - ranked
        least = max(least, float(ranked[np.count_nonzero(above < params.top_p * total) - 1]))
    return least


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token [m] for each row of ``weights`` [m, vocab] at ``uniforms`` [m, 1]."""
    blocks = _in_blocks(weights, SUM_BLOCK)
    sums = blocks.sum(-1).double()
    reached = sums.cumsum(-1)
    target = _just_below(uniforms * reached[:, -1:], reached[:, -1:])
    block = _first_above(reached, target)
    rest = target - (reached.gather(1, block) - sums.gather(1, block))
    rows = torch.arange(len(weights), device=weights.device)
    inside = blocks[rows, block.squeeze(1)].double().cumsum(-1)
    index = _first_above(inside, _just_below(rest, inside[:, -1:]))
    return (block * SUM_BLOCK + index).squeeze(1)


def _weights(x: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    """Probabilities up to a factor, float32: 1 for the likeliest token."""
    return (x - peak).div_(temperature.float().clamp_(min=torch.finfo(torch.float32).tiny)).exp_()


def _just_below(target: Tensor, total: Tensor) -> Tensor:
    """Keep rounding from putting the target where no token is left."""
    return torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))


def _first_above(reached: Tensor, target: Tensor) -> Tensor:
    """Index of the first element above the target: never one that adds nothing.

    Rows that hold NaN find no such element; they get the last one and are reported elsewhere.
    """
    return torch.searchsorted(reached, target, right=True).clamp_(max=reached.shape[-1] - 1)


def _in_blocks(weights: Tensor, size: int) -> Tensor:
    """[m, vocab] -> [m, ceil(vocab / size), size]; what is added weighs nothing."""
    missing = -weights.shape[1] % size
    if missing:
        weights = torch.nn.functional.pad(weights, (0, missing))
    return weights.view(len(weights), -1, size)


def _largest(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """``x.topk(k)`` [m, k], at about half the cost or less on a CPU.

    The k largest lie in the k columns with the largest maxima, when a row is laid out as
    `TOP_BLOCK` rows of columns; taking maxima down the columns is one vectorised pass.
    """
    rows, vocab_size = x.shape
    columns = vocab_size // TOP_BLOCK
    if vocab_size % TOP_BLOCK or columns <= 2 * k:
        top = x.topk(k)
        return top.values, top.indices
    best = x.view(rows, TOP_BLOCK, columns).amax(1).topk(k, sorted=False).indices
    offsets = torch.arange(0, vocab_size, columns, device=x.device)
    ids = (best.unsqueeze(1) + offsets.view(1, -1, 1)).view(rows, -1)
    top = x.gather(1, ids).topk(k)
    return top.values, ids.gather(1, top.indices)


def _logprobs_of(
    batch: _Batch, logits: Tensor, tokens: Tensor, finite: Sequence[bool]
) -> dict[int, TokenLogprobs]:
    group = batch.with_logprobs
    if not group:
        return {}
    wanted = [row.sampling.logprobs or 0 for row in group.rows]
    places = group.where.tolist()
    ids = group.cut(tokens).clamp(0, logits.shape[1] - 1)
    rows = _token_logprobs(group.cut(logits), ids, wanted)
    return {i: entry for i, entry in zip(places, rows, strict=True) if finite[i]}


def _token_logprobs(logits: Tensor, ids: Tensor, wanted: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs.gather(1, ids.unsqueeze(1))
    # numpy counts a line of booleans vectorised.
    ranks = [int(np.count_nonzero(better)) + 1 for better in (logprobs > chosen).cpu().numpy()]
    # Always the same number, so that the order of ties is not the neighbours' doing.
    count = min(MAX_LOGPROBS, logits.shape[1]) if any(wanted) else 0
    top = logprobs.topk(0) if not count else _largest(logprobs, count)
    values, tokens = top[0].tolist(), top[1].tolist()
    return [
        TokenLogprobs(
            token_id=token,
            logprob=logprob,
            rank=rank,
            top=list(zip(tokens[i][:n], values[i][:n], strict=True)),
        )
        for i, (token, logprob, rank, n) in enumerate(
            zip(ids.tolist(), chosen.squeeze(1).tolist(), ranks, wanted, strict=True)
        )
    ]


@torch.inference_mode()
def prompt_logprobs(logits: Tensor, next_ids: Sequence[int], k: int) -> list[TokenLogprobs]:
    """Give the log-probability of each token that follows, and of the ``k`` likeliest.

    ``logits``: [n, vocab] at n positions of a prompt; ``next_ids``: the n tokens after them.
    """
    ids = torch.tensor(next_ids, dtype=torch.int64, device=logits.device)
    return _token_logprobs(logits, ids, [k] * len(next_ids))


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidInput` (400) for a logit_bias or stop token that the model does not have."""
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        over = [token for token in ids if token >= vocab_size]
        if over:
            raise InvalidInput(f"{name}: token id {over[0]} is not below {vocab_size}")


def check_stop(
    params: SamplingParams,
    output_ids: Sequence[int],
    eos_ids: Collection[int],
    max_model_len: int,
    prompt_len: int,
) -> tuple[Literal["stop", "length"], int | None] | None:
    """Say whether the token just appended ends the sequence: (finish reason, stop token id).

    The id is set only for one of ``stop_token_ids``: not for the plain end of sequence. Stop
    strings are the detokeniser's to find.
    """
    last = output_ids[-1]
    if len(output_ids) >= params.min_tokens:
        if not params.ignore_eos and last in eos_ids:
            return "stop", None
        if last in params.stop_token_ids:
            return "stop", last
    if params.max_tokens is not None and len(output_ids) >= params.max_tokens:
        return "length", None
    if prompt_len + len(output_ids) >= max_model_len:
        return "length", None
    return None
