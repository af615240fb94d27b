"""Adapters that never could be read: nothing is done for them, and they are told so."""

from __future__ import annotations

from mural_operator.pool_worker import Ground
from mural_operator.unreadable import UnreadableAdapter
from mural_operator.verdict import AdapterVerdict, of_unreadable
from mural_operator.worker import Worker
from mural_resolvers.kubernetes.paths import ADAPTERS

__all__ = ["UnreadableWorker"]


class UnreadableWorker(Worker):
    """All of them together, since one may not even say which pool it is for."""

    def __init__(self, ground: Ground) -> None:
        super().__init__("the unreadable adapters")
        self._ground = ground
        self._known: frozenset[str] = frozenset()

    async def step(self) -> None:
        standing = [
            each
            for each in self._ground.cluster.unreadable_adapters
            if each.metadata.deletion_timestamp is None
        ]
        for adapter in standing:
            self._tell(adapter, of_unreadable(adapter))
        keys = frozenset(adapter.metadata.key for adapter in standing)
        for gone in self._known - keys:
            self._ground.statuses.forget(_status_key(gone))
            self._ground.conditions.pop(gone, None)
            self._ground.writer.forget(ADAPTERS, gone)
        self._known = keys

    def _tell(self, adapter: UnreadableAdapter, found: AdapterVerdict) -> None:
        meta = adapter.metadata
        self._ground.conditions[meta.key] = found.conditions
        self._ground.statuses.put(
            _status_key(meta.key),
            meta.resource_version,
            found,
            lambda: self._ground.writer.write_adapter(meta, found),
        )
        if meta.key not in self._known:
            ready = next(each for each in found.conditions if each.type == "Ready")
            self._ground.events.note(adapter, "Adapter", "Warning", ready.reason, ready.message)


def _status_key(key: str) -> str:
    # Not as the pool's worker has it, which may tell of the object already when this one forgets.
    return f"adapter {key} (unreadable)"
