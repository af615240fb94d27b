"""Which declared adapters count, and why the others do not."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from mural_operator.conditions import listed
from mural_operator.world import World
from mural_resolvers.kubernetes.objects import Adapter

__all__ = ["Rejected", "judge"]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Why an object is not acted upon: a reason for programs, a sentence for people."""

    reason: Literal["NotAllowed", "TenantNotAccepted", "SourceNotAllowed", "OtherBase", "Conflict"]
    message: str

    @property
    def is_certain(self) -> bool:
        """Whether it is the object's own fault; else what is resident stays."""
        return self.reason != "TenantNotAccepted"


def judge(world: World) -> dict[str, Rejected]:
    """By the object's key, those that are rejected. Those being deleted are not judged."""
    standing = [adapter for adapter in world.adapters if not adapter.is_deleted]
    rejected = {
        adapter.metadata.key: why
        for adapter in standing
        if (why := _on_its_own(adapter, world)) is not None
    }
    rejected.update(_conflicts(a for a in standing if a.metadata.key not in rejected))
    return rejected


def _on_its_own(adapter: Adapter, world: World) -> Rejected | None:
    spec, namespace = adapter.spec, adapter.metadata.namespace
    if not world.owners.allow(spec.tenant, namespace):
        if world.owners.may_allow(spec.tenant):
            return Rejected(
                "TenantNotAccepted",
                f"Whether {namespace} may declare for {spec.tenant} cannot be told, since a Tenant "
                "is not accepted: mend what that object says is wrong. Nothing is loaded until "
                "then, and what is resident stays.",
            )
        return Rejected(
            "NotAllowed",
            f"No accepted Tenant of the id {spec.tenant} lists the namespace {namespace}: add it "
            "to that Tenant's spec.namespaces, or move this Adapter.",
        )
    allowed = world.pool.spec.sources
    if spec.source is not None and allowed is not None and spec.source not in allowed:
        return Rejected(
            "SourceNotAllowed",
            f"The pool {spec.pool} takes adapters from {listed(allowed) or 'no source'}, not from "
            f"{spec.source}: declare it for another pool, or add the source to that "
            "ServingPool's spec.sources.",
        )
    base = world.base
    if spec.base is not None and base is not None and spec.base not in base.model_names:
        return Rejected(
            "OtherBase",
            f"It is made for the base {spec.base}, and the pool {spec.pool} serves "
            f"{listed(base.model_names)}: declare it for a pool that serves its base.",
        )
    return None


def _conflicts(adapters: Iterable[Adapter]) -> dict[str, Rejected]:
    """Of several objects for one version the oldest wins."""
    winners: dict[str, Adapter] = {}
    rejected: dict[str, Rejected] = {}
    for adapter in sorted(adapters, key=lambda adapter: adapter.metadata.age):
        winner = winners.setdefault(adapter.exact, adapter)
        if winner is not adapter:
            rejected[adapter.metadata.key] = Rejected(
                "Conflict",
                f"The Adapter {winner.metadata.key} declares {adapter.exact} already, and is "
                "older: delete one of the two.",
            )
    return rejected
