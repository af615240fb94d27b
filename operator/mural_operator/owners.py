"""Which namespaces may declare for which tenant; what of that cannot be judged at the moment."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from mural_operator.unreadable import UnreadableTenant
from mural_resolvers.kubernetes.objects import Tenant
from mural_resolvers.kubernetes.tenants import tenants_config

__all__ = ["Accepted", "Owners", "owners"]


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a Tenant object said when it was last accepted."""

    uid: str
    namespaces: frozenset[str]


@dataclass(frozen=True, slots=True)
class Owners:
    """Of all tenants."""

    namespaces: Mapping[str, frozenset[str]]
    """By tenant id, those that may declare its adapters."""
    unjudged: frozenset[str] = frozenset()
    """Ids whose Tenant is not accepted: what else it means to allow is not known."""
    complete: bool = True
    """False: some Tenant does not even say who it is, so that it may be anyone."""
    last: Mapping[str, Accepted] = field(default_factory=dict)
    """By ``namespace/name``, for the next judgement."""

    def allow(self, tenant: str, namespace: str) -> bool:
        """Whether a namespace may declare a tenant's adapters."""
        return namespace in self.namespaces.get(tenant, frozenset())

    def may_allow(self, tenant: str) -> bool:
        """Whether a namespace that is not allowed may be meant to be: nothing is unloaded for
        want of a permission that nobody can read."""
        return tenant in self.unjudged or not self.complete


def owners(
    tenants: Iterable[Tenant],
    last: Mapping[str, Accepted],
    *,
    outdated: Collection[str] = (),
    unreadable: Iterable[UnreadableTenant] = (),
    complete: bool = True,
) -> Owners:
    """Judge all of them together; ``last`` is of the judgement before, empty at first.

    Of several objects for one id the oldest counts, accepted or not: nobody takes over another's
    name while it is being mended. One that is not accepted allows what it did when it last was,
    and what can be read of it; so a restart, which forgets the first, takes nothing away from
    who wrote the second. ``outdated``: keys of those that stand as they were when they could last
    be read. ``complete``: whether no others are there.
    """
    standing = tuple(tenants)
    _, refused = tenants_config(standing, {})
    namespaces: dict[str, frozenset[str]] = {}
    unjudged: set[str] = set()
    kept: dict[str, Accepted] = {}
    every: list[Tenant | UnreadableTenant] = [*standing, *unreadable]
    for each in sorted(every, key=lambda tenant: tenant.metadata.age):
        key, uid = each.metadata.key, each.metadata.uid
        before = last.get(key)
        if before is not None and before.uid == uid:
            kept[key] = before
        if each.id is None:
            complete = False
            continue
        if each.id in namespaces:
            continue
        said = each.spec.namespaces if isinstance(each, Tenant) else each.namespaces
        if isinstance(each, Tenant) and key not in refused and key not in outdated:
            kept[key] = Accepted(uid, frozenset(said))
        else:
            unjudged.add(each.id)
        allowed = kept[key].namespaces if key in kept else frozenset()
        namespaces[each.id] = allowed.union(said)
    return Owners(namespaces, frozenset(unjudged), complete, kept)
