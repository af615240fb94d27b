"""Tokens that a request is expected to use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mural_router.limits.estimate import UNSTATED_TOKENS, estimate_tokens


def test_the_prompt_is_guessed_by_its_bytes_and_the_answer_by_its_bound() -> None:
    assert estimate_tokens(400, 16) == 116
    assert estimate_tokens(400, 16, samples=3) == 148
    assert estimate_tokens(400, 16, samples=3, prompts=2) == 196
    assert estimate_tokens(400, None) == 100 + UNSTATED_TOKENS


@given(st.integers(0, 1 << 26), st.none() | st.integers(-5, 1 << 20), st.integers(0, 200))
def test_something_is_always_counted(body_bytes: int, max_tokens: int | None, samples: int) -> None:
    assert estimate_tokens(body_bytes, max_tokens, samples=samples) >= 1
