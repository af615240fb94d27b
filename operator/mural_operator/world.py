"""What is seen of one pool at one time: the objects that name it, and its pods."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mural_operator.owners import Owners
from mural_operator.unreadable import Outdated
from mural_resolvers.kubernetes.objects import Adapter, ServingPool
from mural_router.placement import Base, Fleet, Replica, agreed_base
from mural_server.protocol import AdapterStatus, Snapshot

__all__ = ["MAX_WAIT_S", "Pod", "Refusal", "World"]

MAX_WAIT_S = 90.0
"""No refusal is waited on for longer: one that seems to be is of before the clock was set back."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A replica's last answer to an action about one adapter that was none of success."""

    status: int
    """0: it did not answer."""
    message: str
    """Fit for a status."""
    retry_at: float
    """When to try again, on the clock that `reconcile` is told."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One replica: its pod as the API server has it, its state as it says itself."""

    name: str
    uid: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    ready: bool = False
    """The pod's condition Ready: whether Services send requests there."""
    terminating: bool = False
    state: Snapshot | None = None
    """With exact names. None: it has not been heard from, or not for too long, or it is of vLLM."""
    listed: frozenset[str] | None = None
    """Exact names that a vLLM pod knows. None: as for `state`."""
    served: tuple[str, ...] = ()
    """The names of a vLLM pod's base model."""
    refusals: Mapping[str, Refusal] = field(default_factory=dict)
    """By exact name; gone when the pod restarts, the adapter changes or the action succeeds."""
    error: str = ""
    """Why it was not heard, since it last was; fit for a status."""

    @property
    def heard(self) -> bool:
        """Whether anything it said can be trusted now."""
        return self.state is not None or self.listed is not None

    @property
    def takes_actions(self) -> bool:
        """Whether it can be asked to load and unload: one that drains is left in peace."""
        if self.terminating or not self.heard:
            return False
        return self.state is None or self.state.accepting

    @property
    def base(self) -> Base:
        """What it serves, by its own word."""
        if self.state is None:
            return Base(self.served)
        return Base(self.state.base.model_names, self.state.base.spec_hash)

    def holds(self, name: str) -> AdapterStatus | None:
        """The adapter, if it is in memory and not on its way there."""
        status = self.status(name)
        return status if status and status.level != "disk" and not status.loading else None

    def status(self, name: str) -> AdapterStatus | None:
        """What it says of the adapter."""
        return None if self.state is None else self.state.adapters.get(name)

    def waits(self, name: str, now: float) -> bool:
        """Whether it has refused something of the adapter, and is not to be asked again yet."""
        refusal = self.refusals.get(name)
        return refusal is not None and now < refusal.retry_at <= now + MAX_WAIT_S


@dataclass(frozen=True)
class World:
    """One pool. Made only once all of it is known: what is missing here is taken for gone."""

    pool: ServingPool
    adapters: tuple[Adapter, ...]
    """All that name the pool, those being deleted too."""
    pods: tuple[Pod, ...]
    """Sorted by name."""
    owners: Owners
    """Which namespaces may declare adapters for whom."""
    complete: bool = True
    """False: some Adapter or pool never could be read. What no other Adapter wants may be wanted
    by that one, so nothing is unloaded for want of an object."""
    outdated: Mapping[str, Outdated] = field(default_factory=dict)
    """By their keys, the adapters that stand as they were when they could last be read."""
    outdated_pool: Outdated | None = None
    """So the pool itself."""

    @cached_property
    def by_name(self) -> dict[str, Pod]:
        """The pods by name."""
        return {pod.name: pod for pod in self.pods}

    @cached_property
    def base(self) -> Base | None:
        """What most of the pods serve; None while none says."""
        return agreed_base(pod.base for pod in self.pods)

    def belongs(self, pod: Pod) -> bool:
        """Whether adapters have their home there, now or as soon as it serves."""
        if pod.terminating or (pod.state is not None and not pod.state.accepting):
            return False
        base = self.base
        if base is None or not pod.heard:
            return True
        return pod.base.same_model(base) and pod.base.same_spec(base)

    def serves(self, pod: Pod) -> bool:
        """Whether routers send requests there: by the same rule as theirs, save that a pod which
        only the operator does not hear is left in its place."""
        return self.belongs(pod) and pod.ready and (pod.state is None or pod.state.ready)

    @cached_property
    def serving(self) -> Fleet:
        """The pods as routers see them now."""
        return Fleet(tuple(_replica(pod, self.serves(pod)) for pod in self.pods))

    @cached_property
    def coming(self) -> Fleet:
        """As routers will see them once those that start are ready."""
        if all(self.serves(pod) for pod in self.pods if self.belongs(pod)):
            return self.serving
        return Fleet(tuple(_replica(pod, self.belongs(pod)) for pod in self.pods))


def _replica(pod: Pod, ready: bool) -> Replica:
    state = pod.state
    if state is None:
        return Replica(name=pod.name, ready=ready, reports=False)
    return Replica(
        name=pod.name,
        ready=ready,
        slots=state.limits.slots,
        host_bytes=state.limits.host_bytes,
        max_cpu_loras=state.limits.max_cpu_loras,
        max_lora_rank=state.limits.max_lora_rank,
        max_num_seqs=state.limits.max_num_seqs,
        running=state.load.running,
        waiting=state.load.waiting + state.load.paused,
        kv_usage=state.load.kv_usage,
        tokens_per_s=state.load.tokens_per_s,
        adapters=state.adapters,
    )
