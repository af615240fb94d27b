"""Objects that a schema of another day let through: what can be read of them still, and what they
said when they last could be, which stays in force."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from mural_operator.conditions import said
from mural_resolvers.errors import MuralError
from mural_resolvers.kubernetes.objects import (
    Adapter,
    AdapterAlias,
    AdapterStatusFields,
    ObjectMeta,
    ServingPool,
    Tenant,
    read_adapter,
    read_alias,
    read_pool,
    read_tenant,
)

__all__ = [
    "LastReadable",
    "Outdated",
    "Unreadable",
    "UnreadableAdapter",
    "UnreadableTenant",
    "read_adapter_or_not",
    "read_alias_or_not",
    "read_pool_or_not",
    "read_tenant_or_not",
]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Any of them."""

    metadata: ObjectMeta
    message: str
    """What is wrong and where; fit for a status."""


@dataclass(frozen=True, slots=True)
class UnreadableAdapter(Unreadable):
    """Its end must not wait for ours."""

    pool: str
    """Empty: it does not say."""
    status: AdapterStatusFields


@dataclass(frozen=True, slots=True)
class UnreadableTenant(Unreadable):
    """Who it is and where it may declare holds, as far as it says so."""

    id: str | None
    """None: it does not say."""
    namespaces: frozenset[str]


@dataclass(frozen=True, slots=True)
class Outdated:
    """Of an object that stands as it was when it could last be read."""

    generation: int
    """The one that stands."""
    message: str
    """Why the present one does not."""


T = TypeVar("T", Adapter, ServingPool, Tenant)


class LastReadable(Generic[T]):
    """By ``namespace/name`` what objects were when they could last be read."""

    def __init__(self) -> None:
        self._last: dict[str, T] = {}

    def take(self, found: T | Unreadable) -> T | None:
        """What stands of an object that is now so; None: it never could be read. What another
        object of its name once said does not count."""
        key = found.metadata.key
        if not isinstance(found, Unreadable):
            self._last[key] = found
            return found
        last = self._last.get(key)
        if last is not None and last.metadata.uid != found.metadata.uid:
            del self._last[key]
            return None
        return last

    def drop(self, key: str) -> None:
        """It is gone."""
        self._last.pop(key, None)

    def keep(self, keys: Collection[str]) -> None:
        """All other objects are gone."""
        for key in [key for key in self._last if key not in keys]:
            del self._last[key]


# -- reading --------------------------------------------------------------------------------------


class _Meta(msgspec.Struct):
    metadata: ObjectMeta


class _PoolName(msgspec.Struct):
    pool: str = ""


class _OfPool(msgspec.Struct):
    spec: _PoolName


class _OfStatus(msgspec.Struct):
    status: AdapterStatusFields = AdapterStatusFields()


class _Owner(msgspec.Struct):
    tenant: str | None = None


class _OfOwner(msgspec.Struct):
    spec: _Owner = msgspec.field(default_factory=_Owner)


class _Namespaces(msgspec.Struct):
    namespaces: tuple[str, ...] = ()


class _OfNamespaces(msgspec.Struct):
    spec: _Namespaces


def read_adapter_or_not(data: bytes) -> Adapter | UnreadableAdapter:
    """Read an Adapter's JSON; raise ValueError where not even its metadata can be read."""
    fields: object = msgspec.json.decode(data)
    try:
        return read_adapter(fields)
    except MuralError as error:
        named, told = _part(fields, _OfPool), _part(fields, _OfStatus)
        if told is None:
            # The status is ours: it is written anew, and nobody else can mend it.
            return read_adapter_or_not(msgspec.json.encode(_without_status(fields)))
        return UnreadableAdapter(
            _metadata(fields),
            said(error.message),
            "" if named is None else named.spec.pool,
            told.status,
        )


def read_alias_or_not(data: bytes) -> AdapterAlias | Unreadable:
    """Read an AdapterAlias' JSON; raise ValueError where not even its metadata can be read."""
    fields: object = msgspec.json.decode(data)
    try:
        return read_alias(fields)
    except MuralError as error:
        return Unreadable(_metadata(fields), said(error.message))


def read_pool_or_not(data: bytes) -> ServingPool | Unreadable:
    """Read a ServingPool's JSON; raise ValueError where not even its metadata can be read."""
    fields: object = msgspec.json.decode(data)
    try:
        return read_pool(fields)
    except MuralError as error:
        return Unreadable(_metadata(fields), said(error.message))


def read_tenant_or_not(data: bytes) -> Tenant | UnreadableTenant:
    """Read a Tenant's JSON; raise ValueError where not even its metadata can be read."""
    fields: object = msgspec.json.decode(data)
    try:
        return read_tenant(fields)
    except MuralError as error:
        metadata = _metadata(fields)
        owner, where = _part(fields, _OfOwner), _part(fields, _OfNamespaces)
        return UnreadableTenant(
            metadata,
            said(error.message),
            None if owner is None else owner.spec.tenant or metadata.name,
            frozenset() if where is None else frozenset(where.spec.namespaces),
        )


def _metadata(fields: object) -> ObjectMeta:
    return msgspec.convert(fields, _Meta).metadata


def _without_status(fields: object) -> object:
    assert isinstance(fields, dict)
    return {name: each for name, each in fields.items() if name != "status"}


P = TypeVar("P", _OfPool, _OfStatus, _OfOwner, _OfNamespaces)


def _part(fields: object, kind: type[P]) -> P | None:
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError:
        return None
