"""Writes verdicts into the status of their objects: only what differs, never over someone's else.

Every write names the version that it was compared with, so that one which comes late is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Protocol

import msgspec

from mural_operator.alias_verdict import AliasVerdict
from mural_operator.conditions import Condition
from mural_operator.metrics import Metrics
from mural_operator.pool_verdict import PoolVerdict
from mural_operator.tenancy import TenantVerdict
from mural_operator.verdict import AdapterVerdict, ReplicaEntry
from mural_resolvers.kubernetes.client import JsonObject, KubeError, PatchKind
from mural_resolvers.kubernetes.objects import ObjectMeta
from mural_resolvers.kubernetes.paths import (
    ADAPTER_ALIASES,
    ADAPTERS,
    SERVING_POOLS,
    TENANTS,
    Resource,
)

__all__ = ["MANAGER", "StatusClient", "StatusWriter"]

MANAGER: Final = "mural-operator"
MAX_KNOWN: Final = 10_000
"""Objects whose status is remembered; of others it is read before it is written."""
MAX_REASON: Final = 128
MAX_MESSAGE: Final = 4096
MAX_ERROR: Final = 1024


class StatusClient(Protocol):
    """What is asked of a `KubeClient`."""

    async def get(self, path: str, /) -> bytes:
        """One object."""

    async def patch(
        self, path: str, body: JsonObject, /, *, kind: PatchKind, params: Mapping[str, str]
    ) -> bytes:
        """The object as it became."""


class _Metadata(msgspec.Struct, rename="camel"):
    uid: str = ""
    resource_version: str = ""


class _Object(msgspec.Struct):
    metadata: _Metadata
    status: dict[str, object] = {}


@dataclass(frozen=True, slots=True)
class _Known:
    """What the API server had at a version."""

    uid: str
    version: str
    status: Mapping[str, object]


class StatusWriter:
    """Each call writes one status and returns; nothing to write is no request at all.

    All raise `KubeError` where the API server has no answer or refuses. An object that is gone,
    or another one under its name, is left alone.
    """

    def __init__(
        self,
        client: StatusClient,
        *,
        metrics: Metrics,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """``now`` is the time of day, for the conditions' times."""
        self._client = client
        self._metrics = metrics
        self._now = now
        self._known: OrderedDict[str, _Known] = OrderedDict()

    async def write_adapter(self, meta: ObjectMeta, found: AdapterVerdict) -> None:
        """An `Adapter`'s."""
        fields = {
            "desiredReplicas": found.desired,
            "readyReplicas": found.ready_replicas,
            "ready": found.ready,
            "digest": f"sha256:{found.digest}" if found.digest else None,
            "rank": found.rank or None,
            "bytes": found.bytes or None,
            "replicas": [_entry(each) for each in sorted(found.replicas, key=lambda one: one.pod)],
        }
        await self._write(ADAPTERS, "Adapter", meta, fields, found)

    async def write_alias(self, meta: ObjectMeta, found: AliasVerdict) -> None:
        """An `AdapterAlias`'."""
        await self._write(ADAPTER_ALIASES, "AdapterAlias", meta, {}, found)

    async def write_pool(self, meta: ObjectMeta, found: PoolVerdict) -> None:
        """A `ServingPool`'s."""
        fields = {
            "base": found.base or None,
            "specHash": found.spec_hash or None,
            "replicas": found.replicas,
            "readyReplicas": found.ready_replicas,
            "ready": found.ready,
            "adapters": found.adapters,
        }
        await self._write(SERVING_POOLS, "ServingPool", meta, fields, found)

    async def write_tenant(self, meta: ObjectMeta, found: TenantVerdict) -> None:
        """A `Tenant`'s."""
        await self._write(TENANTS, "Tenant", meta, {"keys": found.keys}, found)

    def forget(self, resource: Resource, key: str) -> None:
        """Keep nothing of an object that is gone, or somebody else's to write about."""
        namespace, _, name = key.partition("/")
        self._known.pop(resource.named(namespace, name), None)

    async def _write(
        self,
        resource: Resource,
        kind: str,
        meta: ObjectMeta,
        fields: Mapping[str, object],
        found: AdapterVerdict | AliasVerdict | PoolVerdict | TenantVerdict,
    ) -> None:
        path = resource.named(meta.namespace, meta.name)
        written = _Written(meta.generation, fields, found.conditions, found.reason)
        known = self._known.get(path)
        if known is None or known.version != meta.resource_version:
            known = await self._read(path, kind)
        try:
            outcome = await self._put(path, meta.uid, known, written)
        except KubeError as error:
            if error.status != 409:
                self._failed(kind, error)
                raise
            # Somebody has changed the object meanwhile, its labels say.
            self._metrics.wrote_status(kind, "conflict")
            outcome = await self._again(path, kind, meta.uid, written)
        if outcome is not None:
            self._metrics.wrote_status(kind, outcome)

    async def _again(self, path: str, kind: str, uid: str, written: _Written) -> str | None:
        known = await self._read(path, kind)
        try:
            return await self._put(path, uid, known, written)
        except KubeError as error:
            self._failed(kind, error)
            raise

    async def _put(
        self, path: str, uid: str, known: _Known | None, written: _Written
    ) -> str | None:
        """What came of it; None: there was nothing to write."""
        if known is None or known.uid != uid:
            return "gone"
        status = written.over(known.status, self._now())
        if status == known.status:
            return None
        # In a merge patch, null takes away what is there and should not be.
        absent = dict.fromkeys(known.status.keys() - status.keys())
        body = {"metadata": {"resourceVersion": known.version}, "status": status | absent}
        try:
            data = await self._client.patch(
                f"{path}/status", body, kind="merge", params={"fieldManager": MANAGER}
            )
        except KubeError as error:
            if error.status != 404:
                raise
            self._known.pop(path, None)
            return "gone"
        self._keep(path, data)
        return "ok"

    async def _read(self, path: str, kind: str) -> _Known | None:
        """The object as it is; None: it is gone."""
        try:
            data = await self._client.get(path)
        except KubeError as error:
            if error.status == 404:
                self._known.pop(path, None)
                return None
            self._failed(kind, error)
            raise
        return self._keep(path, data)

    def _keep(self, path: str, data: bytes) -> _Known:
        try:
            found = msgspec.json.decode(data, type=_Object)
        except msgspec.MsgspecError as error:
            raise KubeError(0, "Garbled", f"an object that cannot be read: {error}") from None
        known = _Known(found.metadata.uid, found.metadata.resource_version, found.status)
        self._known[path] = known
        self._known.move_to_end(path)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return known

    def _failed(self, kind: str, error: KubeError) -> None:
        self._metrics.wrote_status(kind, "conflict" if error.status == 409 else "error")


@dataclass(frozen=True, slots=True)
class _Written:
    """What a status shall say, but for its times."""

    generation: int
    fields: Mapping[str, object]
    conditions: Iterable[Condition]
    reason: str

    def over(self, before: Mapping[str, object], now: datetime) -> dict[str, object]:
        """The status in place of another one, whose times stay where the truth does."""
        since = dict(_times(before))
        moment = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = {name: value for name, value in self.fields.items() if value is not None}
        return fields | {
            "observedGeneration": self.generation,
            "reason": self.reason[:MAX_REASON],
            "conditions": [
                {
                    "type": each.type,
                    "status": each.status,
                    "observedGeneration": self.generation,
                    "lastTransitionTime": since.get((each.type, each.status), moment),
                    "reason": each.reason[:MAX_REASON],
                    "message": each.message[:MAX_MESSAGE],
                }
                for each in self.conditions
            ],
        }


def _times(status: Mapping[str, object]) -> Iterable[tuple[tuple[object, object], object]]:
    """By a condition's type and status, since when it is so."""
    conditions = status.get("conditions")
    for each in conditions if isinstance(conditions, list) else ():
        if isinstance(each, dict) and "lastTransitionTime" in each:
            yield (each.get("type"), each.get("status")), each["lastTransitionTime"]


def _entry(replica: ReplicaEntry) -> dict[str, object]:
    optional = {
        "digest": f"sha256:{replica.digest}" if replica.digest else "",
        "lastError": replica.last_error[:MAX_ERROR],
    }
    return {"pod": replica.pod, "level": replica.level, "pinned": replica.pinned} | {
        name: value for name, value in optional.items() if value
    }
