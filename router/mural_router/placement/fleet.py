"""What placement is told: plain data about the replicas and about a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from mural_router.placement.hashing import Members, members_of
from mural_router.placement.policy import PlacementPolicy

__all__ = [
    "AdapterFacts",
    "CountedAdapters",
    "Fleet",
    "Homes",
    "Level",
    "PlacementRequest",
    "Replica",
    "Residency",
    "Resident",
    "Use",
    "UseCount",
]

PLACES_LOOKED_ON = 8
WANTED_TOKENS_PER_S = 1 / 60
"""From this load on an adapter is wanted where it is: a token a minute. The window of a minute
forgets by and by, so this is some minutes after its last request."""
MOST_WORK = 2.0
"""Of one replica, in its own worth: what waits at it counts up to what it computes. So whatever one
replica says of an adapter, it says of no more than this."""
MOST_RANK = 1024
"""Of an adapter; twice what vLLM takes at most. Who tells of more is not believed."""
FACTS_KEPT = 20_000
"""Adapters per fleet; names that nobody holds are remembered too."""

Level = Literal["disk", "host", "slot"]


class Resident(Protocol):
    """What placement reads of one adapter on one replica."""

    @property
    def level(self) -> Level: ...
    @property
    def digest(self) -> str: ...
    @property
    def loading(self) -> bool: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def load(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Residency:
    """One adapter on one replica, as the replica reports it."""

    level: Level
    digest: str = ""
    loading: bool = False
    pinned: bool = False
    rank: int = 0
    bytes: int = 0
    requests: int = 0
    """Sequences that run or wait there under this adapter."""
    load: float = 0.0
    """Generated tokens a second, over a window of a minute that forgets."""


class Use(NamedTuple):
    """What the adapters of one replica take of it together."""

    ranks: int = 0
    """Of its sequences' adapters, summed over the sequences."""
    pinned_bytes: int = 0
    """Of host memory, which no other adapter can have."""
    wanted: int = 0
    """Adapters in memory that are pinned or have been used of late: those that would be loaded
    again soon."""
    wanted_bytes: int = 0
    """Theirs."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One server of the fleet, as it was last seen."""

    name: str
    """Stable and the same for every router: what the rendezvous hash is over."""
    weight: float = 1.0
    """Capacity relative to the others; above 0."""
    ready: bool = True
    """Accepts requests: ready by its own word (or its pod's), and not draining."""
    stale: bool = False
    """Not heard from for longer than the bound: what follows may no longer hold."""
    silent: bool = False
    """Stale, and it answers nothing else either: whoever waits for it may wait for long."""
    reports: bool = True
    """False: it cannot say which adapters it holds (a vLLM pod). Unknown is not absent."""
    report: int = 0
    """Another number with every report heard: what it says has then been counted anew."""
    slots: int = 0
    """Distinct adapters in one step; 0: none, or unknown where `reports` is False."""
    host_bytes: int = 0
    """Host memory for adapters; 0: unknown."""
    max_cpu_loras: int = 0
    """Adapters in host memory at a time; 0: unknown."""
    max_lora_rank: int = 0
    """0: unknown."""
    max_num_seqs: int = 0
    """Sequences in one step; 0: unknown."""
    running: int = 0
    waiting: int = 0
    """Paused ones included."""
    kv_usage: float = 0.0
    """0 to 1."""
    tokens_per_s: float = 0.0
    """Generated, over the last seconds."""
    adapters: Mapping[str, Resident] = field(default_factory=dict)
    """By exact name."""

    use: Use = field(init=False, compare=False)
    """What `adapters` say together."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "use", _use_of(self.adapters))


class UseCount:
    """A `Use` that is kept up as adapters come, change and go: to count thousands anew with each
    report of one replica would hold all requests up.

    Names of one content share its place in memory and its sequences: what several of them say
    alike counts once.
    """

    def __init__(self) -> None:
        self._ranks = self._pinned_bytes = self._wanted = self._wanted_bytes = 0
        self._names: dict[tuple[str, int, int, bool, bool], int] = {}
        """How many say the same of one content: its digest, ranks, bytes, wanted, pinned."""

    @property
    def use(self) -> Use:
        """As it is now."""
        return Use(self._ranks, self._pinned_bytes, self._wanted, self._wanted_bytes)

    def add(self, each: Resident, sign: int = 1) -> None:
        """Count an adapter in; with a ``sign`` of -1 out again, as it was."""
        ranks = each.requests * each.rank
        wanted = (each.level != "disk" or each.loading) and (
            each.pinned or each.requests > 0 or each.load >= WANTED_TOKENS_PER_S
        )
        if each.digest:
            key = (each.digest, ranks, each.bytes, wanted, each.pinned)
            before = self._names.pop(key, 0)
            if (names := before + sign) > 0:
                self._names[key] = names
            if before and names:
                return
        self._ranks += sign * ranks
        if wanted:
            self._wanted += sign
            self._wanted_bytes += sign * each.bytes
            if each.pinned:
                self._pinned_bytes += sign * each.bytes


_AnyResident = TypeVar("_AnyResident", bound=Resident)


class CountedAdapters(dict[str, _AnyResident], Generic[_AnyResident]):
    """Adapters by exact name whose use is known; nothing in it changes any more."""

    __slots__ = ("use",)

    def __init__(self, adapters: Mapping[str, _AnyResident], use: Use) -> None:
        super().__init__(adapters)
        self.use = use


def _use_of(adapters: Mapping[str, Resident]) -> Use:
    if isinstance(adapters, CountedAdapters):
        return adapters.use
    count = UseCount()
    for each in adapters.values():
        count.add(each)
    return count.use


class AdapterFacts(NamedTuple):
    """What the accepting replicas together say of one adapter.

    Looked for along its order, where its homes are and what spilled from them, until so many
    places in a row do not know it: a look at each of 100 replicas would cost more than a choice.
    """

    work: float
    """In replicas' worth: 2.0 is what fills two. Over the replicas, what each does times the
    adapter's part of the tokens that it generates."""
    rank: int
    """0: unknown."""
    bytes: int
    """0: unknown."""


class Homes(NamedTuple):
    """Where an adapter is at home: positions among the replicas, in the adapter's order."""

    policy: PlacementPolicy
    declared: int | None
    k: int
    places: tuple[int, ...]
    """The first k that may take it."""
    names: tuple[str, ...]
    resident: tuple[int, ...]
    """Those of them that hold it."""
    others: tuple[int, ...]


@dataclass(frozen=True)
class Fleet:
    """All replicas that serve one base model, sorted by name.

    What is derived is computed once for each fleet, on first use.
    """

    replicas: tuple[Replica, ...] = ()

    def __post_init__(self) -> None:
        names = [replica.name for replica in self.replicas]
        if names != sorted(set(names)):
            raise ValueError("replicas are sorted by name, each once")

    @cached_property
    def members(self) -> Members:
        """For the hash: all of them, ready or not, since the order among the ready is the same."""
        return members_of(tuple((replica.name, replica.weight) for replica in self.replicas))

    @cached_property
    def accepting(self) -> tuple[int, ...]:
        """The positions of those to choose from: ready and fresh ones; with none fresh, stale."""
        ready = [i for i, replica in enumerate(self.replicas) if replica.ready]
        return tuple([i for i in ready if not self.replicas[i].stale] or ready)

    @cached_property
    def accepting_set(self) -> frozenset[int]:
        """The same positions, to ask for one."""
        return frozenset(self.accepting)

    @cached_property
    def accepting_names(self) -> frozenset[str]:
        """The names of `accepting`."""
        return frozenset(self.replicas[i].name for i in self.accepting)

    @cached_property
    def accepting_weight(self) -> float:
        """The capacity of `accepting`."""
        return sum(self.replicas[i].weight for i in self.accepting)

    @cached_property
    def mean_host_bytes(self) -> float:
        """Memory for adapters of an accepting replica that says how much it has; 0: none does."""
        known = [bytes_ for i in self.accepting if (bytes_ := self.replicas[i].host_bytes) > 0]
        return sum(known) / len(known) if known else 0.0

    @cached_property
    def _told(self) -> tuple[Mapping[str, Resident] | None, ...]:
        """What each replica says of adapters; None of those not accepting."""
        accepting = self.accepting_set
        return tuple(
            replica.adapters if i in accepting else None for i, replica in enumerate(self.replicas)
        )

    @cached_property
    def _facts(self) -> dict[str, AdapterFacts]:
        return {}

    @cached_property
    def _homes(self) -> dict[str, Homes]:
        return {}

    def kept_homes(
        self, adapter: str, declared: int | None, policy: PlacementPolicy
    ) -> Homes | None:
        """The homes that `keep_homes` was told, if for the same policy."""
        homes = self._homes.get(adapter)
        if homes is None or homes.policy is not policy or homes.declared != declared:
            return None
        return homes

    def keep_homes(self, adapter: str, homes: Homes) -> None:
        """Remember where an adapter is at home for a request that may go anywhere."""
        if len(self._homes) >= FACTS_KEPT:
            self._homes.clear()
        self._homes[adapter] = homes

    def facts(self, adapter: str) -> AdapterFacts:
        """What is reported of an adapter, looked up once for each fleet."""
        facts = self._facts.get(adapter)
        if facts is None:
            if len(self._facts) >= FACTS_KEPT:
                self._facts.clear()
            facts = self._facts[adapter] = self._gather(adapter)
        return facts

    @cached_property
    def _least_rank_limit(self) -> int:
        """The least largest rank of the accepting replicas that say theirs; 0: none does."""
        limits = [self.replicas[i].max_lora_rank for i in self.accepting]
        return min([limit for limit in limits if limit > 0], default=0)

    def _believed_rank(self, replica: Replica, rank: int) -> int:
        """What counts of a rank that a replica tells; 0: nothing.

        None holds what is too large for it; and one that does not say what it takes rules nobody
        out.
        """
        if replica.max_lora_rank > 0:
            return rank if rank <= min(replica.max_lora_rank, MOST_RANK) else 0
        return min(rank, self._least_rank_limit or MOST_RANK)

    def _gather(self, adapter: str) -> AdapterFacts:
        work, absent = 0.0, 0
        ranks: list[int] = []
        in_memory: list[int] = []
        on_disk: list[int] = []
        told = self._told
        for i in self.members.order(adapter):
            adapters = told[i]
            if adapters is None:
                continue
            residency = adapters.get(adapter)
            if residency is None:
                absent += 1
                if absent == PLACES_LOOKED_ON:
                    break
                continue
            absent = 0
            replica = self.replicas[i]
            work += _part_of_work(residency.load, replica)
            if (rank := self._believed_rank(replica, residency.rank)) > 0:
                ranks.append(rank)
            if 0 < residency.bytes <= replica.host_bytes:
                (on_disk if residency.level == "disk" else in_memory).append(residency.bytes)
        # Those that have it in memory know what it takes there.
        return AdapterFacts(work, _agreed(ranks), _agreed(in_memory or on_disk))


def _part_of_work(load: float, replica: Replica) -> float:
    """The work of an adapter on one replica, in its worth; 0 where it does not say what it does."""
    if replica.max_num_seqs <= 0 or replica.tokens_per_s <= 0:
        return 0.0
    # The adapter's window is a minute and the replica's is seconds: after a drop it could exceed 1.
    part = min(1.0, load / replica.tokens_per_s)
    return part * min((replica.running + replica.waiting) / replica.max_num_seqs, MOST_WORK)


def _agreed(told: list[int]) -> int:
    """The lower median: one that lies is not heard among three, nor, if it exaggerates, among two.

    0: nobody tells.
    """
    return sorted(told)[(len(told) - 1) // 2] if told else 0


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
    """One request, as far as its place depends on it."""

    adapter: str | None
    """The exact name ``tenant/adapter:version``; None: the base model."""
    prefix: int | None = None
    """Hash of the leading blocks of the prompt; requests that share it should meet."""
    session: str | None = None
    """The client's own hint (`user`, or a session header) of what should meet."""
    sequences: int = 1
    """How many it opens (`n` times the prompts)."""
    candidates: frozenset[str] | None = None
    """Only these replicas may be chosen, by name; None: all."""
    excluded: frozenset[str] = frozenset()
    """These may not: tried in vain already, or their breaker is open."""
