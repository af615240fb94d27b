"""``GET /v1/models`` of the whole fleet: the base and what is loaded, as the caller may use it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, NamedTuple

import msgspec

from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.tenants import Principal, may_use
from mural_router.placement import Fleet
from mural_router.routing.dispatch import FleetSource
from mural_router.routing.target import Target

__all__ = ["ModelCards"]

GATHER_S: Final = 1.0


class _Card(msgspec.Struct, kw_only=True):
    """One model in OpenAI's form, with vLLM's fields; ``digest`` and ``rank`` are an adapter's."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "mural"
    root: str
    parent: str | None = None
    digest: str | None = None
    rank: int | None = None


class _List(msgspec.Struct):
    data: list[_Card]
    object: str = "list"


class _Loaded(NamedTuple):
    name: AdapterName | str
    """A text is a name that an admin registered."""
    digest: str | None
    rank: int | None


class ModelCards:
    """Gathers what the replicas hold, at most once a second."""

    def __init__(self, source: FleetSource, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._clock = clock
        self._created = int(time.time())
        self._loaded: dict[str, _Loaded] = {}
        self._of: Fleet | None = None
        self._gathered_at = float("-inf")

    def listed(self, principal: Principal, shared_names: frozenset[str]) -> bytes:
        """The JSON of the list."""
        cards = []
        if principal.base or principal.is_admin:
            cards = [self._base(name) for name in self._source.base.model_names]
        for loaded in self._gather().values():
            shared = loaded.name in shared_names
            if may_use(principal, loaded.name, shared=shared):
                cards.append(self._adapter(loaded))
        return msgspec.json.encode(_List(cards))

    def card(self, target: Target) -> bytes | None:
        """The JSON of one model that the caller may use; None: it is not known here."""
        if target.adapter is None:
            return msgspec.json.encode(self._base(target.model))
        loaded = self._gather().get(target.adapter)
        if loaded is None and target.listed:
            loaded = _Loaded(parse_name(target.adapter), target.digest, None)
        return None if loaded is None else msgspec.json.encode(self._adapter(loaded))

    def _base(self, name: str) -> _Card:
        return _Card(id=name, created=self._created, root=name)

    def _adapter(self, loaded: _Loaded) -> _Card:
        text = str(loaded.name)
        names = self._source.base.model_names
        return _Card(
            id=text,
            created=self._created,
            root=text,
            parent=names[0] if names else None,
            digest=loaded.digest,
            rank=loaded.rank,
        )

    def _gather(self) -> dict[str, _Loaded]:
        fleet, now = self._source.fleet, self._clock()
        if fleet is self._of or now - self._gathered_at < GATHER_S:
            return self._loaded
        self._of, self._gathered_at = fleet, now
        found = {
            name: residency
            for replica in fleet.replicas
            for name, residency in replica.adapters.items()
        }
        self._loaded = {
            name: _Loaded(
                parse_name(name) if ":" in name else name,
                found[name].digest or None,
                found[name].rank or None,
            )
            for name in sorted(found)
        }
        return self._loaded
