"""What an `Adapter`'s status says: only what its replicas report, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from mural_operator.conditions import Condition, listed
from mural_operator.judge import Rejected
from mural_operator.place import Places
from mural_operator.reconcile import Plan
from mural_operator.unreadable import Outdated, Unreadable, UnreadableAdapter
from mural_operator.world import Pod, Refusal, World
from mural_resolvers.kubernetes.objects import Adapter, AdapterStatusFields
from mural_server.protocol import AdapterStatus

__all__ = [
    "AdapterVerdict",
    "ReplicaEntry",
    "of_unreadable",
    "of_unreadable_pool",
    "verdict",
    "without_pool",
]

MAX_REPLICAS = 1000
"""Entries that a status may have."""

_CONDITION_OF = {"SourceNotAllowed": "Resolved", "OtherBase": "Compatible"}


@dataclass(frozen=True, slots=True)
class ReplicaEntry:
    """One replica's part.

    ``level`` is how near it is kept: of what is declared for host memory a slot that it takes
    for a moment is not told, which would be news at every request.
    """

    pod: str
    level: str
    pinned: bool = False
    digest: str = ""
    last_error: str = ""


@dataclass(frozen=True, slots=True)
class AdapterVerdict:
    """The whole status of an object."""

    conditions: tuple[Condition, ...]
    replicas: tuple[ReplicaEntry, ...]
    desired: int | None
    """k, which routers go by. None: it was never said, and is not now."""
    ready_replicas: int
    ready: str
    """``2/2``; ``?/2`` where replicas cannot tell."""
    digest: str
    """64 hexadecimal digits; this and the next two are kept while no replica holds it."""
    rank: int
    bytes: int
    reason: str
    """The one word of `kubectl get`: why it is not ready, or that it is."""


def verdict(adapter: Adapter, world: World, plan: Plan) -> AdapterVerdict:
    """Judge one object that is not being deleted."""
    found = _as_it_stands(adapter, world, plan)
    outdated = world.outdated.get(adapter.metadata.key)
    return found if outdated is None else _of_outdated(found, outdated)


def _as_it_stands(adapter: Adapter, world: World, plan: Plan) -> AdapterVerdict:
    rejected = plan.rejected.get(adapter.metadata.key)
    if rejected is not None:
        return _of_rejected(adapter, rejected)
    places = plan.places[adapter.exact]
    return _Judgement(adapter, world, places, plan.coming[adapter.exact]).whole()


def without_pool(adapter: Adapter, namespace: str) -> AdapterVerdict:
    """Judge an object whose pool does not exist in the operator's namespace."""
    message = (
        f"There is no ServingPool {adapter.spec.pool} in the namespace {namespace}: make it, or "
        "name another one in spec.pool."
    )
    return _not_acted_upon(adapter.status, Condition("Placed", "False", "NoPool", message))


def of_unreadable_pool(adapter: Adapter, pool: Unreadable) -> AdapterVerdict:
    """Judge an object whose pool never could be read."""
    message = (
        f"The ServingPool {pool.metadata.name} cannot be read: mend it. Nothing is loaded until "
        f"then, and what is resident stays. {pool.message}"
    )
    return _put_off(adapter.status, Condition("Placed", "False", "PoolMalformed", message))


def of_unreadable(adapter: UnreadableAdapter) -> AdapterVerdict:
    """Judge an object that never could be read."""
    accepted = Condition(
        "Accepted",
        "False",
        "Malformed",
        "This object cannot be read: mend what is wrong in it. Nothing is loaded for it until "
        f"then, and what is resident stays. {adapter.message}",
    )
    return _put_off(adapter.status, accepted)


def _of_outdated(found: AdapterVerdict, outdated: Outdated) -> AdapterVerdict:
    """What stands is judged, and is not what the object asks for now."""
    message = (
        "This change of the object cannot be read: mend what is wrong in it. Until then generation "
        f"{outdated.generation} of it stays in force. {outdated.message}"
    )
    conditions = tuple(
        Condition("Ready", "False", "Malformed", f"{message} As it stands: {each.message}")
        if each.type == "Ready"
        else each
        for each in found.conditions
    )
    accepted = Condition("Accepted", "False", "Malformed", message)
    return replace(found, conditions=(*conditions, accepted), reason="Malformed")


def _of_rejected(adapter: Adapter, rejected: Rejected) -> AdapterVerdict:
    status = adapter.status
    if rejected.reason == "Conflict":
        conflict = Condition("Conflict", "True", "Conflict", rejected.message)
        return _not_acted_upon(
            status, Condition("Placed", "False", "Conflict", rejected.message), conflict
        )
    kind = _CONDITION_OF.get(rejected.reason, "Placed")
    why = Condition(kind, "False", rejected.reason, rejected.message)
    return _not_acted_upon(status, why) if rejected.is_certain else _put_off(status, why)


def _put_off(status: AdapterStatusFields, why: Condition) -> AdapterVerdict:
    """Not acted upon for a while: what was done stays, and routers find it where it is."""
    desired = status.desired_replicas
    shown = "?" if desired is None else f"?/{desired}"
    return replace(_not_acted_upon(status, why), desired=desired, ready=shown)


def _not_acted_upon(
    status: AdapterStatusFields, why: Condition, *more: Condition
) -> AdapterVerdict:
    waiting = "Not judged while the object is not acted upon."
    conditions = {
        kind: Condition(kind, "Unknown", why.reason, waiting)
        for kind in ("Resolved", "Compatible", "Placed")
    }
    conditions["Ready"] = Condition("Ready", "False", why.reason, why.message)
    conditions["Degraded"] = Condition("Degraded", "False", why.reason, waiting)
    conditions[why.type] = why
    return AdapterVerdict(
        conditions=(*conditions.values(), *more),
        replicas=(),
        desired=0,
        ready_replicas=0,
        ready="0/0",
        digest=status.digest.removeprefix("sha256:"),
        rank=status.rank,
        bytes=status.bytes,
        reason=why.reason,
    )


class _Judgement:
    """One object's."""

    def __init__(self, adapter: Adapter, world: World, places: Places, coming: Places) -> None:
        self._adapter = adapter
        self._name = adapter.exact
        self._places = places
        self._world = world
        self._is_vllm = world.pool.spec.engine == "vllm"
        self._homes = [world.by_name[name] for name in places.pods]
        self._starting = [world.by_name[name] for name in coming.pods if name not in places.pods]
        self._holding = [
            (pod, status) for pod in self._homes if (status := pod.holds(self._name)) is not None
        ]
        self._ready = sum(self._is_meant(status) for _, status in self._holding)
        self._listing = sum(self._name in (pod.listed or ()) for pod in self._homes)
        self._refusals = [
            (pod, refusal)
            for pod in (*self._homes, *self._starting)
            if (refusal := pod.refusals.get(self._name)) is not None
        ]

    def whole(self) -> AdapterVerdict:
        resolved, compatible, placed = self._resolved(), self._compatible(), self._placed()
        ready = self._readiness((resolved, compatible, placed))
        facts = self._holding[0][1] if self._holding else None
        status, wanted = self._adapter.status, self._places.wanted
        shown = "?" if self._is_vllm and wanted else str(self._ready)
        # No vLLM pod tells what content it has: what was known once says nothing of it.
        known = "" if self._is_vllm else status.digest.removeprefix("sha256:")
        return AdapterVerdict(
            conditions=(resolved, compatible, placed, ready, self._degraded(), *self._ignored()),
            replicas=tuple(self._entries()),
            desired=wanted,
            ready_replicas=self._ready,
            ready=f"{shown}/{wanted}",
            digest=known if facts is None else facts.digest,
            rank=status.rank if facts is None else facts.rank,
            bytes=status.bytes if facts is None else facts.bytes,
            reason=ready.reason,
        )

    def _is_meant(self, status: AdapterStatus) -> bool:
        """Whether it is the content that the object pins, if it pins any."""
        return self._adapter.sha256 in (None, status.digest)

    def _refused(self, statuses: Iterable[int]) -> tuple[Pod, Refusal] | None:
        return next(((pod, why) for pod, why in self._refusals if why.status in statuses), None)

    # -- conditions ---------------------------------------------------------------------------

    def _resolved(self) -> Condition:
        if self._listing and self._adapter.sha256 is not None:
            return Condition(
                "Resolved",
                "Unknown",
                "DigestNotChecked",
                "A source has it. Whether its content is what spec.digest names, vLLM does not "
                "say: declare it for a pool of engine mural to have that checked.",
            )
        if self._ready or self._listing:
            return Condition("Resolved", "True", "Found", "A source has it.")
        if (found := self._refused({404})) is not None:
            return Condition(
                "Resolved",
                "False",
                "NotFound",
                f"No source has {self._name}: push it, or mend tenant, name, version and source. "
                f"{_answer(*found)}",
            )
        if self._adapter.sha256 is not None and (found := self._refused({409})) is not None:
            return Condition(
                "Resolved",
                "False",
                "DigestDiffers",
                "The source holds other content than spec.digest names. A version never changes "
                "its content: publish the new content as another version and declare that one. "
                f"{_answer(*found)}",
            )
        if (found := self._refused({401, 403})) is not None:
            return Condition(
                "Resolved",
                "False",
                "NotPermitted",
                "The replica may not fetch it: look at the rights of its sources, and at the "
                f"pool's controlTokenSecret. {_answer(*found)}",
            )
        if (found := self._refused({503})) is not None:
            return Condition(
                "Resolved",
                "Unknown",
                "Unavailable",
                "A source or a replica had no answer or no room in time; it is tried again. "
                f"{_answer(*found)}",
            )
        return Condition("Resolved", "Unknown", "NotAsked", "No replica has loaded it yet.")

    def _compatible(self) -> Condition:
        if (found := self._refused({413, 422})) is not None:
            return Condition(
                "Compatible",
                "False",
                "Unusable",
                "Replicas cannot serve it: train it for this base within the pool's limits, and "
                f"publish it as another version. {_answer(*found)}",
            )
        if self._ready or self._listing:
            return Condition("Compatible", "True", "Accepted", "A replica has accepted it.")
        return Condition("Compatible", "Unknown", "NotLoaded", "No replica has loaded it yet.")

    def _placed(self) -> Condition:
        places, pool = self._places, self._world.pool.metadata.name
        found, wanted = len(places.pods), places.wanted
        every = self._adapter.spec.placement.replicas == "All"
        if every and not wanted:
            return Condition(
                "Placed",
                "False",
                "NoReplica",
                f"No pod of the pool {pool} is ready and matches its podSelector: start one.",
            )
        if found >= wanted:
            where = listed(places.pods) or "none, as declared"
            return Condition("Placed", "True", "Placed", f"Its replicas: {where}.")
        if places.full:
            return Condition(
                "Placed",
                "False",
                "NoRoom",
                f"{found} of {wanted} replicas have room for it: {listed(places.full)} are full of "
                "declared adapters that go before it. Add replicas, raise the capacity of the "
                f"ServingPool {pool} or of its servers, or raise its spec.placement.priority.",
            )
        return Condition(
            "Placed",
            "False",
            "TooFewReplicas",
            f"{found} of {wanted} replicas found: the pool {pool} has no more pods that are ready, "
            "match its podSelector and can hold an adapter of its rank and size. Add pods, or ask "
            "for fewer replicas.",
        )

    def _readiness(self, grounds: tuple[Condition, ...]) -> Condition:
        wanted = self._places.wanted
        nowhere = grounds[2].reason == "NoReplica"
        if self._is_vllm and wanted and self._listing >= wanted:
            return Condition(
                "Ready",
                "Unknown",
                "EngineCannotTell",
                f"All of its {wanted} replicas list it. Whether it is in their memory now, vLLM "
                "does not say; nor does it pin anything.",
            )
        told = (
            f"Listed by {self._listing} of {wanted} replicas."
            if self._is_vllm
            else f"Resident on {self._ready} of {wanted} replicas."
        )
        if self._ready >= wanted and not nowhere:
            reason = "Ready" if wanted else "NotWanted"
            return Condition("Ready", "True", reason, told)
        for ground in grounds:
            if ground.status == "False" or ground.reason == "Unavailable":
                return Condition("Ready", "False", ground.reason, f"{told} {ground.message}")
        silent = [pod.name for pod in self._homes if not pod.heard]
        if silent:
            return Condition(
                "Ready", "False", "ReplicaUnknown", f"{told} Not heard from: {listed(silent)}."
            )
        if self._refusals:
            return Condition(
                "Ready", "False", "ReplicaRefuses", f"{told} {_answer(*self._refusals[0])}"
            )
        return Condition("Ready", "False", "Loading", f"{told} It is being loaded.")

    def _degraded(self) -> Condition:
        if len({status.digest for _, status in self._holding}) > 1:
            return Condition(
                "Degraded",
                "True",
                "DigestsDiffer",
                "Replicas hold different content under this version: it was overwritten in a "
                "source. Publish the new content as another version, and delete this one.",
            )
        if self._refusals:
            return Condition(
                "Degraded",
                "True",
                "ReplicaRefuses",
                f"{len(self._refusals)} replicas refuse it, and are asked again at the latest "
                f"after a minute. {_answer(*self._refusals[0])}",
            )
        silent = [pod for pod in self._homes if not pod.heard]
        if silent:
            why = f" {silent[0].error}" if silent[0].error else ""
            return Condition(
                "Degraded",
                "Unknown",
                "ReplicaUnknown",
                f"Not heard from: {listed(pod.name for pod in silent)}. Look at the pool's "
                f"condition Healthy.{why}",
            )
        return Condition("Degraded", "False", "Healthy", "Its replicas answer and agree.")

    def _ignored(self) -> Iterator[Condition]:
        """What the object asks for and a vLLM pod cannot be told; a pin, which is asked for
        wherever nothing is said, is told beside its readiness."""
        spec, placement = self._adapter.spec, self._adapter.spec.placement
        asked = {
            "spec.digest": spec.digest is not None,
            "spec.source": spec.source is not None,
            "spec.prewarm": spec.prewarm != "None",
            "spec.placement.level": placement.level != "host",
            "spec.placement.maxReplicas": placement.max_replicas != placement.min_replicas,
        }
        fields = [name for name, is_asked in asked.items() if is_asked]
        if self._is_vllm and fields:
            yield Condition(
                "FieldsIgnored",
                "True",
                "EngineCannot",
                f"With engine vllm nothing comes of {', '.join(fields)}: take that out, or declare "
                "it for a pool of engine mural.",
            )

    # -- replicas -----------------------------------------------------------------------------

    def _entries(self) -> Iterator[ReplicaEntry]:
        for pod in (*self._homes, *self._starting)[:MAX_REPLICAS]:
            refusal = pod.refusals.get(self._name)
            error = "" if refusal is None else refusal.message
            status = pod.status(self._name)
            if pod.state is None:
                yield ReplicaEntry(pod.name, "unknown", last_error=error)
            elif status is None:
                yield ReplicaEntry(pod.name, "absent", last_error=error)
            else:
                yield ReplicaEntry(
                    pod.name, self._level(status), status.pinned, status.digest, error
                )

    def _level(self, status: AdapterStatus) -> str:
        if status.loading:
            return "loading"
        if status.level == "slot" and self._adapter.spec.placement.level == "host":
            return "host"
        return status.level


def _answer(pod: Pod, refusal: Refusal) -> str:
    what = f"answered {refusal.status}" if refusal.status else "did not answer"
    return f"{pod.name} {what}: {refusal.message}"
