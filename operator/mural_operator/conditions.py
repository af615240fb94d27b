"""What every status says of its object: conditions, in words that tell what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from mural_resolvers.redaction import redacted

__all__ = ["Condition", "Truth", "listed", "said"]

MAX_SAID_BYTES = 300
"""Of what a replica answered: it comes from another machine, and goes into the API server, where an
object has at most 1.5 MB and a status as many of these as there are replicas."""
MAX_LISTED = 4

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Condition:
    """Without its time: that is the writer's, when the truth changes."""

    type: str
    status: Truth
    reason: str
    message: str


def said(text: str) -> str:
    """Another machine's words, fit for a status: no key in them, printable, bounded."""
    # Before the cut, which could leave a part of a secret that is not recognised any more.
    clean = "".join(each if each.isprintable() else " " for each in redacted(text[:65_536]))
    data = clean.encode()
    if len(data) <= MAX_SAID_BYTES:
        return clean
    return f"{data[:MAX_SAID_BYTES].decode(errors='ignore')}…"


def listed(names: Iterable[str]) -> str:
    """Names for a sentence: a few of them, and how many more."""
    every = tuple(names)
    first = ", ".join(islice(every, MAX_LISTED))
    more = len(every) - MAX_LISTED
    return f"{first} and {more} more" if more > 0 else first
