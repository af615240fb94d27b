"""The aliases: routers obey them by themselves, and their objects say which they obey."""

from __future__ import annotations

from mural_operator.alias_verdict import AliasVerdict, alias_verdicts
from mural_operator.pool_worker import Ground
from mural_operator.worker import Worker
from mural_resolvers.kubernetes.objects import AdapterAlias
from mural_resolvers.kubernetes.paths import ADAPTER_ALIASES

__all__ = ["AliasesWorker"]


class AliasesWorker(Worker):
    """All aliases together: of two of one name only one is obeyed."""

    def __init__(self, ground: Ground) -> None:
        super().__init__("the aliases")
        self._ground = ground
        self._known: frozenset[str] = frozenset()

    async def step(self) -> None:
        cluster = self._ground.cluster
        aliases, namespaces = cluster.aliases, cluster.namespaces
        declared = frozenset(
            adapter.exact
            for adapter in cluster.adapters
            if not adapter.is_deleted
            and adapter.metadata.namespace in namespaces.get(adapter.spec.tenant, ())
        )
        verdicts = alias_verdicts(aliases, namespaces, declared)
        for alias in aliases:
            self._tell(alias, verdicts[alias.metadata.key])
        for gone in self._known - verdicts.keys():
            self._ground.statuses.forget(f"alias {gone}")
            self._ground.writer.forget(ADAPTER_ALIASES, gone)
        self._known = frozenset(verdicts)

    def _tell(self, alias: AdapterAlias, found: AliasVerdict) -> None:
        self._ground.statuses.put(
            f"alias {alias.metadata.key}",
            alias.metadata.resource_version,
            found,
            lambda: self._ground.writer.write_alias(alias, found),
        )
