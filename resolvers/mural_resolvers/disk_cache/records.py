"""The small files that the cache keeps beside the content."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from mural_resolvers.disk_cache.layout import StrPath, is_digest, read_small

__all__ = [
    "MAX_RECORD_BYTES",
    "NameRecord",
    "Reservation",
    "Usage",
    "VersionRecord",
    "encode",
    "read_record",
]

MAX_RECORD_BYTES = 64 << 10
_MAX_USAGE_BYTES = 64 << 20


class NameRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a name stands for, for ever; ``name`` is the exact form, as a check."""

    name: str
    digest: str
    source: str
    revision: str
    tenant: str

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise ValueError("the digest is none")


class VersionRecord(msgspec.Struct, frozen=True):
    """At whose expense a version is kept, and its size in bytes."""

    tenant: str = ""
    num_bytes: int = 0


class Reservation(msgspec.Struct, frozen=True):
    """Bytes that a living process may still add."""

    tenant: str
    num_bytes: int


class Usage(msgspec.Struct, kw_only=True):
    """What is in the cache; ``bytes`` counts each content once, ``by_tenant`` whole versions."""

    bytes: int = 0
    versions: int = 0
    names: int = 0
    by_tenant: dict[str, int] = {}

    def become(self, other: Usage) -> None:
        """Take over what was counted anew."""
        self.bytes, self.versions, self.names = other.bytes, other.versions, other.names
        self.by_tenant = other.by_tenant

    def add(self, record: VersionRecord) -> None:
        """A version came."""
        self.versions += 1
        self.by_tenant[record.tenant] = self.by_tenant.get(record.tenant, 0) + record.num_bytes

    def remove(self, record: VersionRecord) -> None:
        """A version went."""
        self.versions -= 1
        left = self.by_tenant.get(record.tenant, 0) - record.num_bytes
        if left > 0:
            self.by_tenant[record.tenant] = left
        else:
            self.by_tenant.pop(record.tenant, None)


Record = NameRecord | VersionRecord | Reservation | Usage
R = TypeVar("R", NameRecord, VersionRecord, Reservation, Usage)

_encoder = msgspec.json.Encoder()


def encode(record: Record) -> bytes:
    """The record's JSON."""
    return _encoder.encode(record)


def read_record(path: StrPath, kind: type[R]) -> R | None:
    """Read a record; None where there is none, or something that the cache did not write."""
    data = read_small(path, _MAX_USAGE_BYTES if kind is Usage else MAX_RECORD_BYTES)
    if data is None:
        return None
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
