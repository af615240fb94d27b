"""What objects say together, as far as a router goes by it: keys, aliases, numbers of replicas.

Which of them count is decided by the same functions as in the operator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Final

from mural_resolvers.kubernetes.aliases import judge_aliases
from mural_resolvers.kubernetes.objects import Adapter, AdapterAlias, ObjectMeta, Tenant
from mural_resolvers.kubernetes.tenants import namespaces_of, tenants_config
from mural_resolvers.names import AdapterName
from mural_resolvers.tenants import KeyRecord, KeyRing, TenantsConfig
from mural_resolvers.versions import AliasTarget
from mural_router.routing.versions import AliasOverlay

__all__ = ["Declared"]

ALL: Final = 1 << 20
"""More than any fleet has."""

Targets = tuple[AliasTarget, ...]


class Declared(AliasOverlay):
    """Takes objects as they change; what it is asked is answered from memory, at once.

    Only what a tenant's own object allows to speak for it counts, and of two objects about one
    thing the oldest. For one event loop.
    """

    def __init__(self) -> None:
        self.ring = KeyRing()
        """Another one with each change of keys or tenants."""
        self.config = TenantsConfig()
        self.refused_tenants: Mapping[str, str] = {}
        """By ``namespace/name`` why an object does not count; so the other two."""
        self.refused_aliases: Mapping[str, str] = {}
        self.num_aliases = 0
        self._namespaces: Mapping[str, frozenset[str]] = {}
        self._aliases: Mapping[str, AdapterAlias] = {}
        self._targets: dict[tuple[str, str, str], Targets] = {}
        self._adapters: dict[str, Adapter] = {}
        self._claims: dict[str, tuple[Adapter, ...]] = {}

    # -- what is asked ------------------------------------------------------------------------

    def targets(self, name: AdapterName) -> Sequence[AliasTarget] | None:
        return self._targets.get((name.tenant, name.adapter, name.version))

    def replicas(self, exact: str) -> int | None:
        """k of an adapter: what the operator has published, else what its object asks for.

        None: no object that counts says a number, and k follows from the load.
        """
        claims = self._claims.get(exact)
        if claims is None:
            return None
        for adapter in claims:
            if self._may_speak(adapter):
                published = adapter.status.desired_replicas
                if published is None:
                    return _asked_for(adapter)
                if published > 0:
                    return published
                # What the operator does not act upon: a younger object may count.
        return None

    @property
    def num_adapters(self) -> int:
        """Versions that an object which counts declares."""
        return sum(
            any(self._may_speak(each) for each in claims) for claims in self._claims.values()
        )

    def refused_adapters(self) -> dict[str, str]:
        """By ``namespace/name`` why an object does not count."""
        refused: dict[str, str] = {}
        for exact, claims in self._claims.items():
            standing = [each for each in claims if self._may_speak(each)]
            for each in claims:
                if not self._may_speak(each):
                    refused[each.metadata.key] = (
                        "It is being deleted."
                        if each.is_deleted
                        else f"No accepted Tenant of the id {each.spec.tenant} lists the "
                        f"namespace {each.metadata.namespace}."
                    )
                elif each is not standing[0]:
                    refused[each.metadata.key] = (
                        f"{standing[0].metadata.key} declares {exact} already, and is older."
                    )
        return refused

    # -- what is told -------------------------------------------------------------------------

    def tell_tenants(
        self,
        tenants: Iterable[Tenant],
        keys: Mapping[str, Sequence[KeyRecord]],
        unknown: Mapping[str, ObjectMeta] = MappingProxyType({}),
    ) -> None:
        """All tenants there are, and their keys by tenant id.

        ``unknown``: by tenant id the oldest object that says that it is this tenant, and of which
        no more can be read. No younger one takes its place.
        """
        standing: list[Tenant] = []
        second: dict[str, str] = {}
        for each in tenants:
            first = unknown.get(each.id)
            if each.metadata.deletion_timestamp is not None:
                continue
            if first is not None and first.age < each.metadata.age:
                second[each.metadata.key] = (
                    f"{first.key} says who {each.id} is already, cannot be read, and is older: "
                    "mend it, or delete one of the two."
                )
            else:
                standing.append(each)
        self.config, refused = tenants_config(standing, keys)
        self.refused_tenants = refused | second
        self.ring = self.config.ring()
        self._namespaces = namespaces_of(standing)
        self.tell_aliases(self._aliases)

    def tell_aliases(self, aliases: Mapping[str, AdapterAlias]) -> None:
        """All aliases there are, by ``namespace/name``."""
        self._aliases = aliases
        standing = (each for each in aliases.values() if not each.metadata.deletion_timestamp)
        accepted, refused = judge_aliases(standing, self._namespaces)
        self._targets = {
            (each.spec.tenant, each.spec.name, each.spec.alias): tuple(
                AliasTarget(version.version, version.weight) for version in each.spec.versions
            )
            for each in accepted
        }
        self.num_aliases = len(accepted)
        self.refused_aliases = {key: why.message for key, why in refused.items()}

    def tell_adapters(self, adapters: Mapping[str, Adapter]) -> None:
        """All adapters there are, by ``namespace/name``."""
        self._adapters, self._claims = {}, {}
        for key, adapter in adapters.items():
            self.tell_adapter(key, adapter)

    def tell_adapter(self, key: str, adapter: Adapter | None) -> None:
        """One of them, as it is now; None: it is gone. Costs the same however many there are."""
        before = self._adapters.pop(key, None)
        if before is not None:
            self._claim(before.exact, without=before)
        if adapter is not None:
            self._adapters[key] = adapter
            self._claim(adapter.exact, adapter)

    def _claim(self, exact: str, *more: Adapter, without: Adapter | None = None) -> None:
        kept = (each for each in self._claims.pop(exact, ()) if each is not without)
        claims = tuple(sorted(chain(kept, more), key=lambda each: each.metadata.age))
        if claims:
            self._claims[exact] = claims

    def _may_speak(self, adapter: Adapter) -> bool:
        allowed = self._namespaces.get(adapter.spec.tenant, frozenset())
        return adapter.metadata.namespace in allowed and not adapter.is_deleted


def _asked_for(adapter: Adapter) -> int | None:
    """Without an operator: its number; None for a range, within which the load decides."""
    wanted = adapter.spec.placement.replicas
    return ALL if wanted == "All" else wanted or None
