"""What a `ServingPool`'s status says of its pods."""

from __future__ import annotations

from dataclasses import dataclass

from mural_operator.conditions import Condition, listed
from mural_operator.reconcile import Plan
from mural_operator.unreadable import Unreadable
from mural_operator.world import World
from mural_router.placement import Base

__all__ = ["PoolVerdict", "of_unreadable", "pool_verdict"]


@dataclass(frozen=True, slots=True)
class PoolVerdict:
    """The whole status of an object."""

    conditions: tuple[Condition, ...]
    base: str
    spec_hash: str
    replicas: int
    ready_replicas: int
    ready: str
    """``2/3``."""
    adapters: int
    """Declared for it, and not rejected."""
    reason: str


def pool_verdict(world: World, plan: Plan) -> PoolVerdict:
    """Judge a pool by the same world and plan as its adapters."""
    pods = [pod for pod in world.pods if not pod.terminating]
    serving = [pod for pod in pods if world.serves(pod)]
    base = world.base or Base()
    healthy = _healthy(world)
    conditions = [healthy, _placed(plan)]
    outdated = world.outdated_pool
    if outdated is not None:
        conditions.append(
            _malformed(
                "This change of the object cannot be read: mend what is wrong in it. Until then "
                f"generation {outdated.generation} of it stays in force. {outdated.message}"
            )
        )
    return PoolVerdict(
        conditions=tuple(conditions),
        base=next(iter(base.model_names), ""),
        spec_hash=base.spec_hash,
        replicas=len(pods),
        ready_replicas=len(serving),
        ready=f"{len(serving)}/{len(pods)}",
        adapters=len(plan.places),
        reason=healthy.reason if outdated is None else "Malformed",
    )


def of_unreadable(pool: Unreadable) -> PoolVerdict:
    """Judge a pool that never could be read."""
    waiting = "Not judged while the object cannot be read."
    accepted = _malformed(
        "This object cannot be read: mend what is wrong in it. Until then its pods are left alone, "
        f"and what is resident stays. {pool.message}"
    )
    return PoolVerdict(
        conditions=(
            Condition("Healthy", "Unknown", "Malformed", waiting),
            Condition("Placed", "Unknown", "Malformed", waiting),
            accepted,
        ),
        base="",
        spec_hash="",
        replicas=0,
        ready_replicas=0,
        ready="?",
        adapters=0,
        reason="Malformed",
    )


def _malformed(message: str) -> Condition:
    return Condition("Accepted", "False", "Malformed", message)


def _healthy(world: World) -> Condition:
    pods = [pod for pod in world.pods if not pod.terminating]
    if not pods:
        labels = listed(f"{k}={v}" for k, v in world.pool.spec.selector.match_labels.items())
        return Condition(
            "Healthy",
            "False",
            "NoPods",
            f"No pod of this namespace has the labels {labels}: start servers with them, or mend "
            "spec.selector.",
        )
    others = [pod.name for pod in pods if pod.heard and not _is_of_base(world, pod.base)]
    if others:
        return Condition(
            "Healthy",
            "False",
            "BasesDiffer",
            f"{listed(others)} serve another base than the most: they take no declared adapters "
            "and no requests. It passes with a rollout; else make a pool for each base.",
        )
    silent = [pod for pod in pods if pod.ready and not pod.heard]
    if silent:
        said_what = f" {silent[0].error}" if silent[0].error else ""
        return Condition(
            "Healthy",
            "False",
            "NotHeard",
            f"{listed(pod.name for pod in silent)} are ready and do not answer the operator: look "
            "at the pool's ports, controlTokenSecret, controlTls and apiKeySecret, and at network "
            f"policies.{said_what}",
        )
    serving = [pod for pod in pods if world.serves(pod)]
    if not serving:
        return Condition(
            "Healthy",
            "False",
            "NoneReady",
            f"None of {len(pods)} pods is ready yet: kubectl describe pod {pods[0].name} says why.",
        )
    if len(serving) < len(pods):
        starting = [pod.name for pod in pods if not world.serves(pod)]
        return Condition(
            "Healthy", "True", "Starting", f"Not ready yet, or draining: {listed(starting)}."
        )
    return Condition("Healthy", "True", "Serving", f"All of its {len(pods)} pods serve.")


def _is_of_base(world: World, base: Base) -> bool:
    agreed = world.base or base
    return base.same_model(agreed) and base.same_spec(agreed)


def _placed(plan: Plan) -> Condition:
    short = [name for name, places in plan.places.items() if len(places.pods) < places.wanted]
    if not short:
        return Condition("Placed", "True", "AllPlaced", "Every declared adapter has its replicas.")
    return Condition(
        "Placed",
        "False",
        "TooFewReplicas",
        f"{len(short)} declared adapters have fewer replicas than they ask for: "
        f"{listed(sorted(short))}. Add pods or capacity, or declare fewer.",
    )
