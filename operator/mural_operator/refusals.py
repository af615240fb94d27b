"""What the pods refused, and when each is asked again: the only memory between two reconciles.

It is lost with the leader, which costs one more refusal each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from mural_operator.conditions import said
from mural_operator.world import Refusal
from mural_server.protocol import ControlError

__all__ = ["LYING", "MOST_S", "Refusals", "delay_s"]

FIRST_S: Final = 1.0
MOST_S: Final = 60.0
STANDING: Final = frozenset({400, 404, 409, 413, 422})
"""Answers that time alone does not change."""
LYING: Final = 200
"""The status of a refusal by a pod which says yes and does not do it."""
NO_ANSWER: Final = 0


def delay_s(
    status: int,
    retry_after_s: float | None,
    tries: int,
    jitter: Callable[[], float] = random.random,
) -> float:
    """How long to wait after the ``tries``-th failure in a row: a second, doubling to a minute.

    What would be refused again waits the minute at once; a server that says when is obeyed.
    """
    bound = MOST_S if status in STANDING else min(FIRST_S * 2.0 ** min(tries - 1, 16), MOST_S)
    if retry_after_s is not None:
        # Never earlier than asked: many come back at once otherwise.
        return min(max(retry_after_s, FIRST_S), MOST_S) * (1.0 + jitter() / 4)
    return bound * (0.75 + jitter() / 4)


@dataclass(frozen=True, slots=True)
class _Noted:
    refusal: Refusal
    tries: int


class Refusals:
    """Of one pool: by a pod's uid and an adapter's exact name. Times are ``clock``'s."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._noted: dict[str, dict[str, _Noted]] = {}
        self._boots: dict[str, str] = {}
        self._silent: set[str] = set()

    def note(self, uid: str, name: str, error: ControlError) -> Refusal:
        """A pod refused an adapter."""
        names = self._noted.setdefault(uid, {})
        tries = names[name].tries + 1 if name in names else 1
        wait_s = delay_s(error.status, error.retry_after_s, tries)
        refusal = Refusal(error.status, said(error.message), self._clock() + wait_s)
        names[name] = _Noted(refusal, tries)
        return refusal

    def clear(self, uid: str, name: str) -> None:
        """It did it."""
        self._noted.get(uid, {}).pop(name, None)

    def is_lying(self, uid: str, name: str) -> bool:
        """Whether a pod said yes to it before, and did not do it."""
        noted = self._noted.get(uid, {}).get(name)
        return noted is not None and noted.refusal.status == LYING

    def of(self, uid: str) -> Mapping[str, Refusal]:
        """One pod's, by exact name."""
        return {name: noted.refusal for name, noted in self._noted.get(uid, {}).items()}

    def heard(self, uid: str, boot_id: str | None) -> None:
        """Which process of a pod is heard, None: none. Another one has refused nothing yet.

        One that is heard again after a silence may answer now.
        """
        before = self._boots.get(uid)
        if boot_id is None:
            self._silent.add(uid)
            return
        was_silent = uid in self._silent
        self._silent.discard(uid)
        self._boots[uid] = boot_id
        if before != boot_id:
            self._noted.pop(uid, None)
        elif was_silent:
            names = self._noted.get(uid, {})
            for name in [n for n, one in names.items() if one.refusal.status == NO_ANSWER]:
                del names[name]

    def changed(self, name: str) -> None:
        """The object of an adapter is another one now: ask everywhere again."""
        for names in self._noted.values():
            names.pop(name, None)

    def keep(self, uids: frozenset[str], names: frozenset[str]) -> None:
        """Forget all but these pods and adapters."""
        self._noted = {
            uid: kept
            for uid, noted in self._noted.items()
            if uid in uids and (kept := {n: each for n, each in noted.items() if n in names})
        }
        self._boots = {uid: boot for uid, boot in self._boots.items() if uid in uids}
        self._silent &= uids

    def next_retry_at(self) -> float | None:
        """The first time after now at which something may be asked again."""
        now = self._clock()
        times = (
            noted.refusal.retry_at for names in self._noted.values() for noted in names.values()
        )
        return min((at for at in times if at > now), default=None)
