"""Which base model a fleet serves: the one of most of its replicas, for whoever sees the same."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Base", "agreed_base", "base_names"]

MAX_BASE_NAMES = 16

_BASE_NAME = re.compile(r"[A-Za-z0-9/._@ -]{1,256}")


class Base(NamedTuple):
    """A base model as its replicas tell of it."""

    model_names: tuple[str, ...] = ()
    """Its served names, the main one first."""
    spec_hash: str = ""
    """Equal where the same adapters are taken; empty: unknown."""

    def same_model(self, other: Base) -> bool:
        """Whether both go by one main name."""
        return self.model_names[:1] == other.model_names[:1]

    def same_spec(self, other: Base) -> bool:
        """Whether both take the same adapters, as far as is known."""
        return not self.spec_hash or not other.spec_hash or self.spec_hash == other.spec_hash


def agreed_base(told: Iterable[Base]) -> Base | None:
    """The base model that most of the replicas serve; None when none tells of any.

    The same for every router that sees the same replicas, and for the operator: of equals the
    first in order.
    """
    votes = Counter(base for base in told if base.model_names)
    # vLLM pods do not tell what adapters may target: they side with those that do.
    known = {base.model_names[0] for base in votes if base.spec_hash}
    ranked = sorted(
        (base for base in votes if base.spec_hash or base.model_names[0] not in known),
        key=lambda base: (-votes[base], base),
    )
    return ranked[0] if ranked else None


def base_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names that a base model may have: none that could be a tenant's adapter at a version."""
    return tuple(name for name in names[:MAX_BASE_NAMES] if _BASE_NAME.fullmatch(name))
