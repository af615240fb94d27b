"""How loaded the replicas are: what they reported, and what this router has done since."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from mural_router.placement.fleet import Fleet, Replica
from mural_router.placement.policy import DEFAULT_POLICY, PlacementPolicy

__all__ = ["LoadLedger", "Loads", "cost_of", "reported_loads"]

MOST_OF_MEDIAN = 2.0
"""No replica counts for more in what the fleet has than so many times the cost of the median one,
for its weight: one that lies, or that others than routers flood, would put everybody within the
bound."""


@dataclass(slots=True)
class Loads:
    """What runs or waits on each replica, as estimated, by a policy's `rank_cost`."""

    by_name: Mapping[str, int] = field(default_factory=dict)
    """Sequences."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """What they cost, in sequences of the base."""
    total_cost: float = 0.0
    """Over the fleet's accepting replicas, each for no more than `most_of` them says."""

    def of(self, name: str) -> int:
        """Sequences on one replica; 0 where nothing is known."""
        return self.by_name.get(name, 0)

    def cost(self, name: str) -> float:
        """Their cost."""
        return self.costs.get(name, 0.0)


def most_of(
    replicas: Sequence[Replica], costs: Mapping[str, float], policy: PlacementPolicy
) -> float:
    """The cost, for a weight of 1, with which each of some replicas counts at most in their total.

    Never less than the least of them has, so that somebody is within the bound. Of two it cannot be
    said which one is out of the ordinary.
    """
    if len(replicas) < 3:
        return inf
    each = sorted([costs.get(replica.name, 0.0) / replica.weight for replica in replicas])
    return max(MOST_OF_MEDIAN * each[(len(each) - 1) // 2], policy.light_sequences)


def cost_of(
    replicas: Sequence[Replica], costs: Mapping[str, float], policy: PlacementPolicy
) -> float:
    """What some replicas have together, no one counted with more than `most_of`."""
    most = most_of(replicas, costs, policy)
    return sum(min(costs.get(each.name, 0.0), most * each.weight) for each in replicas)


@dataclass(slots=True)
class _Account:
    mine: int = 0
    """Sequences of this router in flight there."""
    mine_ranks: int = 0
    """Summed over them."""
    report: int = -1
    others: int = 0
    """Those that the last report counted and that were not mine: of what came and went since, I
    only know my own."""
    others_ranks: int = 0


class LoadLedger:
    """One router's requests in flight, which turn the replicas' reports into a present load.

    A burst between two reports is seen at once, and is not counted twice when it is reported.
    Not for use from several threads.
    """

    def __init__(self, policy: PlacementPolicy = DEFAULT_POLICY) -> None:
        self.policy = policy
        """What costs go by; with another one they are right from the next `observe` on."""
        self._accounts: dict[str, _Account] = {}
        self._estimates: dict[str, int] = {}
        self._ranks: dict[str, int] = {}
        self._counted = 0
        """Sequences in the total cost, each with its rank."""
        self._counted_ranks = 0
        self._capped = 0.0
        """The cost in it of what others have on replicas that do not count with all they have."""
        self._costs: dict[str, float] = {}
        self._accepting: frozenset[str] = frozenset()
        self.loads = Loads(self._estimates, costs=self._costs)
        """The present estimate; the same object always, up to date."""

    def observe(self, fleet: Fleet) -> None:
        """Take in a new view. A replica that left is forgotten when its last request ends."""
        for replica in fleet.replicas:
            self._take_in(replica)
        present = {replica.name for replica in fleet.replicas}
        for name in [name for name in self._accounts if name not in present]:
            self._estimates.pop(name, None)
            self._ranks.pop(name, None)
            self._costs.pop(name, None)
            if self._accounts[name].mine == 0:
                del self._accounts[name]
        self._accepting = fleet.accepting_names
        self._price_all(fleet)

    def start(self, name: str, sequences: int, rank: int = 0) -> None:
        """Sequences are being sent to a replica; ``rank``: of their adapter, 0 where unknown."""
        self.add(name, sequences, sequences * rank)

    def finish(self, name: str, sequences: int, rank: int = 0) -> None:
        """They have ended there, however they did. Each start is finished once, as it was."""
        self.add(name, -sequences, -sequences * rank)

    def in_flight(self, name: str) -> int:
        """This router's own sequences on a replica."""
        account = self._accounts.get(name)
        return 0 if account is None else account.mine

    def _take_in(self, replica: Replica) -> None:
        account = self._accounts.setdefault(replica.name, _Account())
        if account.report != replica.report:
            account.report = replica.report
            account.others = max(0, replica.running + replica.waiting - account.mine)
            # Without others there are no ranks of theirs: one of mine was unknown when it began.
            others_ranks = max(0, replica.use.ranks - account.mine_ranks)
            account.others_ranks = others_ranks if account.others else 0
        self._estimates[replica.name] = account.mine + account.others
        self._ranks[replica.name] = account.mine_ranks + account.others_ranks

    def _price_all(self, fleet: Fleet) -> None:
        rank_cost, costs = self.policy.rank_cost, self._costs
        for name, sequences in self._estimates.items():
            costs[name] = sequences + rank_cost * self._ranks[name]
        accepting = [fleet.replicas[i] for i in fleet.accepting]
        most_of_all = most_of(accepting, costs, self.policy)
        self._counted, self._counted_ranks, self._capped = 0, 0, 0.0
        for replica in accepting:
            name, most = replica.name, most_of_all * replica.weight
            if costs[name] <= most:
                self._counted += self._estimates[name]
                self._counted_ranks += self._ranks[name]
            else:
                # What is one's own is so, whatever the others have.
                account = self._accounts[name]
                self._counted += account.mine
                self._counted_ranks += account.mine_ranks
                mine = account.mine + rank_cost * account.mine_ranks
                self._capped += max(0.0, most - mine)
        self._add_up()

    def _add_up(self) -> None:
        ranks = self.policy.rank_cost * self._counted_ranks
        self.loads.total_cost = self._counted + ranks + self._capped

    def add(self, name: str, sequences: int, ranks: int) -> None:
        """`start`, or `finish` with numbers below 0; ``ranks`` is the sum over the sequences."""
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account()
        account.mine += sequences
        account.mine_ranks += ranks
        if account.mine < 0:
            raise ValueError(f"more sequences finished than started on {name}")
        if name not in self._estimates:
            # It has left the fleet: counted until the last one ends, and offered to nobody.
            if account.mine == 0:
                del self._accounts[name]
            return
        # What the others have is as it was reported: the estimates move by one's own.
        self._estimates[name] += sequences
        self._ranks[name] += ranks
        # From whole numbers each time: sums of costs would drift.
        rank_cost = self.policy.rank_cost
        self._costs[name] = self._estimates[name] + rank_cost * self._ranks[name]
        if name in self._accepting:
            self._counted += sequences
            self._counted_ranks += ranks
            self._add_up()


def reported_loads(fleet: Fleet, policy: PlacementPolicy = DEFAULT_POLICY) -> Loads:
    """What the replicas say, for one who sends them nothing: the operator, or a test."""
    ledger = LoadLedger(policy)
    ledger.observe(fleet)
    return ledger.loads
