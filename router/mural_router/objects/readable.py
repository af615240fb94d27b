"""Objects as they were last readable: an edit that spoils one takes away nothing that holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, Protocol, TypeVar

import msgspec

from mural_resolvers.errors import MuralError
from mural_resolvers.kubernetes.objects import ObjectMeta
from mural_resolvers.kubernetes.watch import Watch

__all__ = ["LastReadable", "Spoilt", "or_spoilt"]

log = logging.getLogger("mural.router.objects")


class _Object(Protocol):
    @property
    def metadata(self) -> ObjectMeta: ...


T = TypeVar("T", bound=_Object)


@dataclass(frozen=True, slots=True)
class Spoilt:
    """An object of which not all can be read."""

    metadata: ObjectMeta
    id: str
    """Of a Tenant: who it says that it is."""
    why: str


class _Owner(msgspec.Struct):
    tenant: str | None = None


class _Named(msgspec.Struct):
    metadata: ObjectMeta
    spec: _Owner = msgspec.field(default_factory=_Owner)


class _Bare(msgspec.Struct):
    metadata: ObjectMeta


def or_spoilt(read: Callable[[object], T]) -> Callable[[bytes], T | Spoilt]:
    """A watch's decoder; raises ``ValueError`` where not even the metadata can be read."""

    def decode(data: bytes) -> T | Spoilt:
        fields: object = msgspec.json.decode(data)
        try:
            return read(fields)
        except MuralError as error:
            try:
                named = msgspec.convert(fields, _Named)
            except msgspec.ValidationError:
                metadata = msgspec.convert(fields, _Bare).metadata
                return Spoilt(metadata, metadata.name, error.message)
            owner = named.spec.tenant or named.metadata.name
            return Spoilt(named.metadata, owner, error.message)

    return decode


class LastReadable(Generic[T]):
    """What a watch was told, with the last readable state of each object that is spoilt now.

    It goes when the object goes: is deleted, or is another one of that name.
    """

    def __init__(self, watch: Watch[T | Spoilt], *, what: str) -> None:
        """``what`` names the objects in the log, in the plural."""
        self.watch = watch
        self._what = what
        self._objects: dict[str, T] = {}
        self._why: dict[str, str] = {}

    @property
    def objects(self) -> Mapping[str, T]:
        """Those in force; a live view."""
        return MappingProxyType(self._objects)

    @property
    def kept(self) -> dict[str, str]:
        """Why an object cannot be read that was readable before, and holds as it was then."""
        return {key: why for key, why in self._why.items() if key in self._objects}

    @property
    def unknown(self) -> dict[str, str]:
        """Why an object cannot be read that never was readable here."""
        return {key: why for key, why in self._why.items() if key not in self._objects}

    def spoilt(self) -> list[Spoilt]:
        """Of the unknown ones, those that can be told apart."""
        return [
            each
            for key in self._why
            if key not in self._objects and isinstance(each := self.watch.objects.get(key), Spoilt)
        ]

    def look(self, key: str | None) -> None:
        """Take what the watch says of one object; None: of all."""
        keys = (
            {*self._objects, *self._why, *self.watch.objects, *self.watch.invalid}
            if key is None
            else (key,)
        )
        for each in keys:
            self._look_at(each)

    def _look_at(self, key: str) -> None:
        found = self.watch.objects.get(key)
        if found is not None and not isinstance(found, Spoilt):
            self._objects[key] = found
            if self._why.pop(key, None) is not None:
                log.info("%s: %s can be read again", self._what, key)
            return
        why = self.watch.invalid.get(key) if found is None else found.why
        if why is None:
            self._objects.pop(key, None)
            self._why.pop(key, None)
            return
        before = self._objects.get(key)
        if before is not None and found is not None and _is_gone(before.metadata, found.metadata):
            del self._objects[key]
        if self._why.get(key) != why:
            stands = (
                "its last readable state stays in force"
                if key in self._objects
                else "nothing is known of it"
            )
            log.warning("%s: %s cannot be read, and %s: %s", self._what, key, stands, why)
        self._why[key] = why


def _is_gone(before: ObjectMeta, now: ObjectMeta) -> bool:
    return now.uid != before.uid or now.deletion_timestamp is not None
