"""The aliases: routers obey them by themselves, and their objects say which they obey."""

from __future__ import annotations

from mural_operator.alias_verdict import AliasVerdict, alias_verdicts, of_unreadable
from mural_operator.pool_worker import Ground
from mural_operator.worker import Worker
from mural_resolvers.kubernetes.objects import ObjectMeta
from mural_resolvers.kubernetes.paths import ADAPTER_ALIASES
from mural_resolvers.kubernetes.tenants import namespaces_of

__all__ = ["AliasesWorker"]


class AliasesWorker(Worker):
    """All aliases together: of two of one name only one is obeyed."""

    def __init__(self, ground: Ground) -> None:
        super().__init__("the aliases")
        self._ground = ground
        self._known: frozenset[str] = frozenset()

    async def step(self) -> None:
        cluster = self._ground.cluster
        aliases, tenants = cluster.aliases, cluster.tenants
        # As routers have it, which obey no alias of a tenant that they do not accept.
        obeyed = namespaces_of(tenants)
        declared = frozenset(
            adapter.exact
            for adapter in cluster.adapters
            if not adapter.is_deleted
            and cluster.owners.allow(adapter.spec.tenant, adapter.metadata.namespace)
        )
        verdicts = alias_verdicts(aliases, obeyed, declared)
        for alias in aliases:
            self._tell(alias.metadata, verdicts[alias.metadata.key])
        for unreadable in cluster.unreadable_aliases:
            verdicts[unreadable.metadata.key] = of_unreadable(unreadable)
            self._tell(unreadable.metadata, verdicts[unreadable.metadata.key])
        for gone in self._known - verdicts.keys():
            self._ground.statuses.forget(f"alias {gone}")
            self._ground.writer.forget(ADAPTER_ALIASES, gone)
        self._known = frozenset(verdicts)

    def _tell(self, meta: ObjectMeta, found: AliasVerdict) -> None:
        self._ground.statuses.put(
            f"alias {meta.key}",
            meta.resource_version,
            found,
            lambda: self._ground.writer.write_alias(meta, found),
        )
