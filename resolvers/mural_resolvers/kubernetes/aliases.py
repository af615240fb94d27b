"""Which `AdapterAlias` objects count: the same for the routers, which obey them, and for the
operator, which says so in their statuses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from mural_resolvers.kubernetes.objects import AdapterAlias

__all__ = ["RefusedAlias", "judge_aliases"]


class RefusedAlias(NamedTuple):
    """Why an object is not obeyed: a reason for programs, a sentence for people."""

    reason: Literal["NotAllowed", "NoVersion", "Conflict"]
    message: str


def judge_aliases(
    aliases: Iterable[AdapterAlias], namespaces: Mapping[str, frozenset[str]]
) -> tuple[tuple[AdapterAlias, ...], dict[str, RefusedAlias]]:
    """Those that count, the oldest first, and by ``namespace/name`` why the others do not.

    ``namespaces``: by tenant id, those that may declare its aliases; nobody moves another
    tenant's traffic by making an object. Of several for one alias the oldest counts.
    """
    accepted: dict[tuple[str, str, str], AdapterAlias] = {}
    refused: dict[str, RefusedAlias] = {}
    for alias in sorted(aliases, key=lambda alias: alias.metadata.age):
        spec = alias.spec
        why = _on_its_own(alias, namespaces)
        older = accepted.get((spec.tenant, spec.name, spec.alias))
        if why is None and older is not None:
            why = RefusedAlias(
                "Conflict",
                f"The AdapterAlias {older.metadata.key} says what {spec.tenant}/{spec.name}:"
                f"{spec.alias} is already, and is older: delete one of the two.",
            )
        if why is None:
            accepted[spec.tenant, spec.name, spec.alias] = alias
        else:
            refused[alias.metadata.key] = why
    return tuple(accepted.values()), refused


def _on_its_own(
    alias: AdapterAlias, namespaces: Mapping[str, frozenset[str]]
) -> RefusedAlias | None:
    spec, namespace = alias.spec, alias.metadata.namespace
    if namespace not in namespaces.get(spec.tenant, frozenset()):
        return RefusedAlias(
            "NotAllowed",
            f"No accepted Tenant of the id {spec.tenant} lists the namespace {namespace}: add it "
            "to that Tenant's spec.namespaces, or move this AdapterAlias.",
        )
    if not any(version.weight > 0 for version in spec.versions):
        return RefusedAlias("NoVersion", "No version has a weight above 0: give one of them one.")
    return None
