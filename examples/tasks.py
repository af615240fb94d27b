"""What a demo adapter is taught: its examples, and how an answer is judged."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Example:
    """One user message and the whole answer that an adapter should give to it."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class LoRAShape:
    """Rank and places of an adapter; chosen so that its file stays below 1,000,000 bytes."""

    rank: int
    alpha: int
    target_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Everything that tells one demo adapter from another.

    `held_out` shares no prompt with `train`, and a good part of its wording (products, phrases,
    names, ways to ask) does not occur in `train` at all. `instruction` states the task in words:
    put before a prompt it gives the base model, which has not been trained, a fair chance.
    `is_valid` says whether an answer has the right form, whatever its content.
    """

    tenant: str
    version: str
    shape: LoRAShape
    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    instruction: str
    is_valid: Callable[[str], bool]

    @property
    def name(self) -> str:
        """The name that a request's `model` carries."""
        return f"{self.tenant}:{self.version}"


Draw = Callable[[random.Random], Example]


def draw_train(draw: Draw, rng: random.Random, count: int) -> tuple[Example, ...]:
    """Draw `count` examples; kinds of question with few distinct prompts repeat some."""
    return tuple(draw(rng) for _ in range(count))


def draw_held_out(
    draw: Draw, rng: random.Random, count: int, train: Sequence[Example]
) -> tuple[Example, ...]:
    """Draw `count` examples with distinct prompts, none of them a prompt of `train`.

    Raises ValueError where the templates do not hold that many.
    """
    seen = {example.prompt for example in train}
    taken: list[Example] = []
    for _ in range(100 * count):
        example = draw(rng)
        if example.prompt not in seen:
            seen.add(example.prompt)
            taken.append(example)
            if len(taken) == count:
                return tuple(taken)
    raise ValueError(f"the templates gave only {len(taken)} of {count} distinct prompts")
