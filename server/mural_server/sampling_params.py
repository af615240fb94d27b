"""How one request wants its tokens chosen, and what the model recommends."""

from __future__ import annotations

import msgspec

from mural_resolvers.errors import InvalidInput

MAX_LOGPROBS = 20
MAX_N = 16
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_LOGIT_BIAS = 1024
SEED_BITS = 63


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What ``generation_config.json`` recommends; None where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names and meanings as in vLLM; temperature 0 is greedy.

    Raises `InvalidInput` (400) for a value out of its range.
    """

    n: int = 1
    max_tokens: int | None = 16
    """Tokens to generate at most; None: as many as the context holds."""
    min_tokens: int = 0
    """End-of-sequence and stop token ids are not sampled before so many tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1: all."""
    min_p: float = 0.0
    """Tokens less likely than ``min_p`` times the likeliest are dropped."""
    repetition_penalty: float = 1.0
    """Over prompt and output, as in transformers."""
    presence_penalty: float = 0.0
    """Over the output, as in the OpenAI API."""
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    """The noise of a request with a seed depends on the seed and the position alone."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """Log-probabilities of so many likeliest tokens beside the sampled one; of the raw model."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for ok, message in self._rules():
            if not ok:
                raise InvalidInput(message)

    def _rules(self) -> tuple[tuple[bool, str], ...]:
        return (
            (1 <= self.n <= MAX_N, f"n must be between 1 and {MAX_N}, not {self.n}"),
            (
                self.max_tokens is None or self.max_tokens >= 1,
                f"max_tokens must be at least 1, not {self.max_tokens}",
            ),
            (
                self.min_tokens >= 0
                and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
                f"min_tokens must be between 0 and max_tokens, not {self.min_tokens}",
            ),
            (
                0.0 <= self.temperature <= 100.0,
                f"temperature must be between 0 and 100, not {self.temperature}",
            ),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], not {self.top_p}"),
            (self.top_k >= -1, f"top_k must be -1, 0 or more, not {self.top_k}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], not {self.min_p}"),
            (
                0.0 < self.repetition_penalty <= 100.0,
                f"repetition_penalty must be in (0, 100], not {self.repetition_penalty}",
            ),
            (
                -2.0 <= self.presence_penalty <= 2.0,
                f"presence_penalty must be in [-2, 2], not {self.presence_penalty}",
            ),
            (
                -2.0 <= self.frequency_penalty <= 2.0,
                f"frequency_penalty must be in [-2, 2], not {self.frequency_penalty}",
            ),
            (
                len(self.logit_bias) <= MAX_LOGIT_BIAS
                and all(-100.0 <= v <= 100.0 for v in self.logit_bias.values())
                and all(k >= 0 for k in self.logit_bias),
                f"logit_bias takes at most {MAX_LOGIT_BIAS} token ids with values in [-100, 100]",
            ),
            (
                self.seed is None or 0 <= self.seed < 1 << SEED_BITS,
                f"seed must be in [0, 2**{SEED_BITS}), not {self.seed}",
            ),
            (
                len(self.stop) <= MAX_STOP_STRINGS
                and all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
                f"stop takes at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} "
                "characters",
            ),
            (
                len(self.stop_token_ids) <= MAX_STOP_STRINGS * 4
                and all(t >= 0 for t in self.stop_token_ids),
                f"stop_token_ids takes at most {MAX_STOP_STRINGS * 4} token ids",
            ),
            (
                self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
                f"logprobs must be between 0 and {MAX_LOGPROBS}, not {self.logprobs}",
            ),
            (
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= MAX_LOGPROBS,
                f"prompt_logprobs must be between 0 and {MAX_LOGPROBS}, not {self.prompt_logprobs}",
            ),
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0
