"""What keeps the one that leads from doing its work, for the log and for its readiness."""

from __future__ import annotations

import logging
from typing import Final

from mural_resolvers.kubernetes.client import KubeError
from mural_resolvers.kubernetes.complaint import Complaint

__all__ = ["Troubles"]

LASTING: Final = (401, 403)
"""Refusals that no time heals."""


class Troubles:
    """By what cannot be done, and there by object: a thousand of them are one line of the log."""

    def __init__(self) -> None:
        self._complaints: dict[str, Complaint] = {}
        self._failing: dict[str, set[str]] = {}

    @property
    def lasting(self) -> str:
        """One that somebody has to see to; empty: there is none."""
        found = (one.trouble for one in self._complaints.values() if one.status in LASTING)
        return next(filter(None, found), "")

    def note(self, log: logging.Logger, what: str, key: str, error: KubeError) -> None:
        """Something, such as "the status of Adapters", cannot be written for one of them."""
        complaint = self._complaints.get(what)
        if complaint is None:
            broken, mended = f"{what} cannot be written", f"{what} can be written again"
            complaint = self._complaints[what] = Complaint(log, broken, mended)
        self._failing.setdefault(what, set()).add(key)
        complaint.note(error)

    def over(self, what: str, key: str) -> None:
        """It has worked for this one."""
        failing = self._failing.get(what)
        if failing is None:
            return
        failing.discard(key)
        if not failing:
            del self._failing[what]
            self._complaints[what].over()

    def forget(self, what: str, key: str) -> None:
        """Nobody asks any more whether it works for this one."""
        failing = self._failing.get(what, set())
        failing.discard(key)
        if what in self._failing and not failing:
            del self._failing[what], self._complaints[what]

    def clear(self) -> None:
        """Nobody works: nothing fails."""
        self._complaints.clear()
        self._failing.clear()
