"""How loaded the replicas are: what they reported, and what this router has done since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mural_router.placement.fleet import Fleet, Replica

__all__ = ["LoadLedger", "Loads", "reported_loads"]


@dataclass(slots=True)
class Loads:
    """Sequences that run or wait on each replica, as estimated."""

    by_name: Mapping[str, float] = field(default_factory=dict)
    total: float = 0.0
    """Over the fleet's accepting replicas."""

    def of(self, name: str) -> float:
        """Of one replica; 0 where nothing is known."""
        return self.by_name.get(name, 0.0)


def reported_loads(fleet: Fleet) -> Loads:
    """What the replicas say, for one who sends them nothing: the operator, or a test."""
    by_name = {each.name: float(each.running + each.waiting) for each in fleet.replicas}
    return Loads(by_name, sum(by_name[name] for name in fleet.accepting_names))


@dataclass(slots=True)
class _Account:
    mine: int = 0
    """Sequences of this router in flight there."""
    report: int = -1
    others: int = 0
    """Those that the last report counted and that were not mine: of what came and went since, I
    only know my own."""


class LoadLedger:
    """One router's requests in flight, which turn the replicas' reports into a present load.

    A burst between two reports is seen at once, and is not counted twice when it is reported.
    Not for use from several threads.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._estimates: dict[str, float] = {}
        self._accepting: frozenset[str] = frozenset()
        self.loads = Loads(self._estimates)
        """The present estimate; the same object always, up to date."""

    def observe(self, fleet: Fleet) -> None:
        """Take in a new view. A replica that left is forgotten when its last request ends."""
        for replica in fleet.replicas:
            self._take_in(replica)
        present = {replica.name for replica in fleet.replicas}
        for name in [name for name in self._accounts if name not in present]:
            self._estimates.pop(name, None)
            if self._accounts[name].mine == 0:
                del self._accounts[name]
        self._accepting = fleet.accepting_names
        self.loads.total = sum(self._estimates[name] for name in self._accepting)

    def start(self, name: str, sequences: int) -> None:
        """Sequences are being sent to a replica."""
        self.add(name, sequences)

    def finish(self, name: str, sequences: int) -> None:
        """They have ended there, however they did. Each start is finished once."""
        self.add(name, -sequences)

    def in_flight(self, name: str) -> int:
        """This router's own sequences on a replica."""
        account = self._accounts.get(name)
        return 0 if account is None else account.mine

    def _take_in(self, replica: Replica) -> None:
        account = self._accounts.setdefault(replica.name, _Account())
        if account.report != replica.report:
            account.report = replica.report
            account.others = max(0, replica.running + replica.waiting - account.mine)
        self._estimates[replica.name] = float(account.mine + account.others)

    def add(self, name: str, sequences: int) -> None:
        """`start`, or `finish` with a number below 0."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account()
        account.mine += sequences
        if account.mine < 0:
            raise ValueError(f"more sequences finished than started on {name}")
        if name not in self._estimates:
            # It has left the fleet: counted until the last one ends, and offered to nobody.
            if account.mine == 0:
                del self._accounts[name]
            return
        before, now = self._estimates[name], float(account.mine + account.others)
        self._estimates[name] = now
        if name in self._accepting:
            self.loads.total += now - before
