"""The tenants: their keys for the routers, and what their objects say."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from mural_operator.pool_worker import Ground
from mural_operator.router_keys import RouterKeys
from mural_operator.tenancy import TenantVerdict, of_unreadable, secrets_named, tenancy
from mural_operator.unreadable import UnreadableTenant
from mural_operator.worker import Worker
from mural_resolvers.kubernetes.client import KubeError
from mural_resolvers.kubernetes.objects import ObjectMeta, Tenant
from mural_resolvers.kubernetes.paths import TENANTS

__all__ = ["TenantsWorker"]

log = logging.getLogger(__name__)

RETRY_S: Final = 5.0


class TenantsWorker(Worker):
    """All tenants together: of two that claim one thing only one has it."""

    def __init__(self, ground: Ground, keys: RouterKeys) -> None:
        super().__init__("the tenants")
        self._ground = ground
        self._keys = keys
        self._about_keys = f"the Secret {keys.name}, by which routers know keys,"
        self._generations: dict[str, tuple[str, int]] = {}

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            # Whoever does not lead has no use for tenants' keys.
            self._ground.fleet.secrets.want(self.name, ())

    async def step(self) -> None:
        cluster, secrets = self._ground.cluster, self._ground.fleet.secrets
        tenants, others = cluster.tenants, cluster.unreadable_tenants
        names = secrets_named(tenants)
        secrets.want(self.name, names)
        self._note_changes(tenants, others)
        for each in others:
            self._tell(each.metadata, of_unreadable(each))
        if not secrets.knows(names):
            # Half of the keys would lock out the tenants of the others.
            return
        found = tenancy(
            tenants, secrets.contents, outdated=cluster.outdated_tenants, unreadable=others
        )
        try:
            await self._keys.write(found.keys_json())
        except KubeError as error:
            self._ground.troubles.note(log, self._about_keys, "", error)
            self.wake_at(asyncio.get_running_loop().time() + RETRY_S)
        else:
            self._ground.troubles.over(self._about_keys, "")
        for tenant in tenants:
            self._tell(tenant.metadata, found.verdicts[tenant.metadata.key])

    def _note_changes(
        self, tenants: tuple[Tenant, ...], others: tuple[UnreadableTenant, ...]
    ) -> None:
        """Who changes a tenant may have changed its Secret just before."""
        metas = [*(each.metadata for each in tenants), *(each.metadata for each in others)]
        generations = {meta.key: (meta.uid, meta.generation) for meta in metas}
        changed = [
            tenant
            for tenant in tenants
            if self._generations.get(tenant.metadata.key) != generations[tenant.metadata.key]
        ]
        for gone in self._generations.keys() - generations.keys():
            self._ground.statuses.forget(f"tenant {gone}")
            self._ground.writer.forget(TENANTS, gone)
        self._generations = generations
        for name in secrets_named(changed):
            self._ground.fleet.secrets.suspect(name)

    def _tell(self, meta: ObjectMeta, found: TenantVerdict) -> None:
        self._ground.statuses.put(
            f"tenant {meta.key}",
            meta.resource_version,
            found,
            lambda: self._ground.writer.write_tenant(meta, found),
        )
