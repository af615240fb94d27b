"""Which adapters hold the slots: time-shared in turns, first in, first out.

Adapters that have work but no slot stand in a queue. A slot goes to the head of the queue when it
is empty, when its holder has no work, or when its holder's turn has lasted ``quantum`` steps; the
holder then joins the queue's end if it still has work. With ``n`` adapters at work and ``m``
slots that are not pinned, at most ``m`` adapters are served before any one in the queue gets its
turn again for every ``m`` places it stands behind, so it waits at most ``ceil(n / m)`` turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Set
from typing import NamedTuple


class SlotChange(NamedTuple):
    """Give ``adapter`` a slot, after taking it from ``victim`` where none is free."""

    adapter: int
    victim: int | None


class SlotShare:
    """Adapters by ``lora_int_id``; holds no weights, decides only."""

    def __init__(self, num_slots: int, quantum: int) -> None:
        if num_slots < 0 or quantum < 1:
            raise ValueError("slots cannot be negative and a quantum is at least one step")
        self.num_slots = num_slots
        self.quantum = quantum
        self._turns: OrderedDict[int, int] = OrderedDict()
        """Holder → steps its turn has lasted; the least recently used first."""
        self._queue: OrderedDict[int, None] = OrderedDict()
        self._pinned: set[int] = set()
        self._wanted: set[int] = set()
        self._crowded: set[int] = set()
        """Those in the queue for which a free slot was not enough."""

    @property
    def holders(self) -> Set[int]:
        return self._turns.keys()

    @property
    def queue(self) -> Collection[int]:
        return self._queue.keys()

    def pin(self, adapter: int) -> None:
        """Its slot, now or once it has one, is not taken from it."""
        self._pinned.add(adapter)

    def unpin(self, adapter: int) -> None:
        self._pinned.discard(adapter)

    def want(self, adapter: int) -> None:
        """Give it a slot once, though it has no work yet."""
        self._wanted.add(adapter)

    @property
    def pinned(self) -> Set[int]:
        return self._pinned

    def lose(self, adapter: int) -> None:
        """Its weights left the slot: if it still has work it queues anew."""
        del self._turns[adapter]

    def postpone(self, adapter: int) -> bool:
        """Host memory had no room for a new holder: back to the head, until more turns are over.

        Nobody behind it gets a slot before it. False when no turn is left that could end.
        """
        del self._turns[adapter]
        if self._turns.keys() <= self._pinned:
            return False
        self._queue[adapter] = None
        self._queue.move_to_end(adapter, last=False)
        self._crowded.add(adapter)
        return True

    def forget(self, adapter: int) -> bool:
        """The adapter is gone; returns whether it held a slot."""
        self._queue.pop(adapter, None)
        self._pinned.discard(adapter)
        self._wanted.discard(adapter)
        self._crowded.discard(adapter)
        return self._turns.pop(adapter, None) is not None

    def update_demand(self, busy: Set[int]) -> None:
        """Queue the adapters with work that have no slot; drop those whose work is gone."""
        self._wanted -= self._turns.keys()
        demand = busy | self._pinned | self._wanted
        for adapter in [a for a in self._queue if a not in demand]:
            del self._queue[adapter]
        self._crowded &= self._queue.keys()
        for adapter in sorted(demand - self._turns.keys() - self._queue.keys()):
            self._queue[adapter] = None

    def plan(self, busy: Set[int], ready: Set[int], max_changes: int) -> list[SlotChange]:
        """Changes for this step, made here at once: the caller carries them out.

        ``busy`` have unfinished requests; ``ready`` have their weights at hand. The head of the
        queue that is not ready yet is passed over and keeps its place.
        """
        changes: list[SlotChange] = []
        for adapter in [a for a in self._queue if a in ready]:
            if len(changes) >= max_changes:
                break
            victim: int | None = None
            crowded = adapter in self._crowded and not self._turns.keys() <= self._pinned
            if crowded or len(self._turns) >= self.num_slots:
                victim = self._victim(busy, {change.adapter for change in changes})
                if victim is None:
                    break
                del self._turns[victim]
                if victim in busy:
                    self._queue[victim] = None
            del self._queue[adapter]
            self._turns[adapter] = 0
            self._crowded.discard(adapter)
            changes.append(SlotChange(adapter, victim))
            if crowded:
                break
        return changes

    def _victim(self, busy: Set[int], fresh: Set[int]) -> int | None:
        """An idle holder, least recently used first; else the one whose turn is over longest."""
        open_to_all = [a for a in self._turns if a not in self._pinned and a not in fresh]
        idle = next((a for a in open_to_all if a not in busy), None)
        if idle is not None:
            return idle
        longest = max(open_to_all, key=self._turns.__getitem__, default=None)
        if longest is None or self._turns[longest] < self.quantum:
            return None
        return longest

    def count_step(self, busy: Set[int]) -> None:
        """A step has been planned: the turns of holders with work go on.

        Also of those that got no row or no memory in it: they must not block the queue.
        """
        for adapter in [a for a in self._turns if a in busy]:
            self._turns[adapter] += 1
            self._turns.move_to_end(adapter)

    def check_integrity(self) -> None:
        """Raise `AssertionError` when an adapter stands twice or slots are overdrawn."""
        assert len(self._turns) <= self.num_slots, "more holders than slots"
        assert not self._turns.keys() & self._queue.keys(), "a holder waits for a slot"
