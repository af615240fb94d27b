"""What ``tenants.yaml`` says: tenants, their keys, what they may use and how much of it.

The file is checked as a whole, and every error names its place. Nothing is taken from a file
with an error in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from mural_resolvers.conversion import converted, wanted
from mural_resolvers.errors import InvalidInput, quoted
from mural_resolvers.names import is_tenant
from mural_resolvers.redaction import holds_key
from mural_resolvers.sizes import parse_size
from mural_resolvers.strict_yaml import parse_yaml
from mural_resolvers.tenants.keys import KeyRing, StoredKey, is_key_id
from mural_resolvers.tenants.principal import (
    ADMIN,
    UNLIMITED,
    Principal,
    TenantLimits,
    is_grant,
)

__all__ = [
    "KeyRecord",
    "Tenant",
    "TenantsConfig",
    "convert_key",
    "convert_tenant",
    "parse_moment",
    "parse_tenants",
]

MAX_FILE_BYTES = 16 << 20
MAX_NOTE_CHARS = 200
MAX_WEIGHT = 1e6
MAX_COUNT = 1 << 53

_SHA256 = re.compile(r"[0-9a-f]{64}")
_SOURCE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}")
_PUBLIC = re.compile(r"[a-z0-9._*?-]{1,63}(:[A-Za-z0-9._*?-]{1,128})?")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """One key as the file keeps it: never the secret. Times are aware, in UTC."""

    id: str
    sha256: str
    created: datetime | None = None
    expires: datetime | None = None
    note: str = ""

    def has_expired(self, now: datetime) -> bool:
        """Whether it is of no use any more."""
        return self.expires is not None and now >= self.expires


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant. ``public`` are globs over its own adapters, such as ``sql`` and ``chat:v1``."""

    id: str
    weight: float = 1.0
    keys: tuple[KeyRecord, ...] = ()
    grants: tuple[str, ...] = ()
    public: tuple[str, ...] = ()
    base: bool = True
    sources: frozenset[str] | None = None
    limits: TenantLimits = UNLIMITED

    def public_grants(self) -> Iterator[str]:
        """What everybody is granted."""
        for pattern in self.public:
            adapter, _, version = pattern.partition(":")
            yield f"{self.id}/{adapter}:{version or '*'}"


@dataclass(frozen=True, slots=True)
class TenantsConfig:
    """A whole file; ``admin_keys`` own no namespace and may do everything."""

    tenants: tuple[Tenant, ...] = ()
    admin_keys: tuple[KeyRecord, ...] = ()

    def find(self, tenant: str) -> Tenant | None:
        """The tenant of that id."""
        return next((found for found in self.tenants if found.id == tenant), None)

    def all_keys(self) -> Iterator[tuple[Tenant | None, KeyRecord]]:
        """Every key and whose it is; None: an admin's."""
        for tenant in self.tenants:
            yield from ((tenant, key) for key in tenant.keys)
        yield from ((None, key) for key in self.admin_keys)

    def ring(self) -> KeyRing:
        """The keys, each with the principal that its holder is."""
        public = tuple(grant for tenant in self.tenants for grant in tenant.public_grants())
        return KeyRing(
            StoredKey(key.id, key.sha256, _principal(tenant, key, public), key.expires)
            for tenant, key in self.all_keys()
        )


def _principal(tenant: Tenant | None, key: KeyRecord, public: tuple[str, ...]) -> Principal:
    if tenant is None:
        return Principal(tenant=None, rights=frozenset({ADMIN}), key_id=key.id)
    return Principal(
        tenant=tenant.id,
        weight=tenant.weight,
        # One tuple for all tenants that have no grants of their own.
        grants=tenant.grants + public,
        key_id=key.id,
        base=tenant.base,
        sources=tenant.sources,
        limits=tenant.limits,
    )


# -- the file's form ------------------------------------------------------------------------------


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    sha256: str
    created: str | None = None
    expires: str | None = None
    note: str = ""


class _Limits(msgspec.Struct, forbid_unknown_fields=True):
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    queue_length: int | None = None
    adapters: int | None = None
    bytes: str | None = None


class _Tenant(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    weight: float = 1.0
    keys: list[_Key] = []
    grants: list[str] = []
    public: list[str] = []
    base: bool = True
    sources: list[str] | None = None
    limits: _Limits = msgspec.field(default_factory=_Limits)


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenants: list[_Tenant]
    admin_keys: list[_Key] = []


def parse_tenants(data: bytes) -> TenantsConfig:
    """Read a file's bytes; raise ``InvalidInput`` naming the place of the first error."""
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"The tenants file is larger than {MAX_FILE_BYTES} bytes.")
    if holds_key(data.decode("utf-8", "replace")):
        # The message must not say more: what it would quote is the secret.
        raise InvalidInput("A whole API key stands in the tenants file: only its sha256 may.")
    body = converted(parse_yaml(data), _File)
    config = TenantsConfig(
        tuple(_tenant(f"tenants[{at}]", raw) for at, raw in enumerate(body.tenants)),
        _keys("admin_keys", body.admin_keys),
    )
    _check_unique(config)
    return config


def convert_tenant(where: str, fields: Mapping[str, object]) -> Tenant:
    """Read one tenant's fields, as the file names them; raise ``InvalidInput``, naming the place.

    ``where`` stands before the place.
    """
    return _tenant(where, converted(fields, _Tenant, where, strict=True))


def convert_key(where: str, fields: Mapping[str, object]) -> KeyRecord:
    """Read one key's record in the same way."""
    return _key(where, converted(fields, _Key, where, strict=True))


def _tenant(where: str, raw: _Tenant) -> Tenant:
    if not is_tenant(raw.id):
        raise InvalidInput(f"{where}.id: {quoted(raw.id)} is not a tenant name.")
    if not 0 < raw.weight <= MAX_WEIGHT:
        what = wanted("a number above 0, at most 1e6,", raw.weight)
        raise InvalidInput(f"{where}.weight: {what}.")
    for at, grant in enumerate(raw.grants):
        if not is_grant(grant):
            raise InvalidInput(
                f"{where}.grants[{at}]: {quoted(grant)} is no grant such as "
                "globex, globex/sql, globex/sql:v1 or @name."
            )
    for at, pattern in enumerate(raw.public):
        if _PUBLIC.fullmatch(pattern) is None:
            raise InvalidInput(
                f"{where}.public[{at}]: {quoted(pattern)} is none of the tenant's adapters, such "
                "as sql, sql:v1 or *."
            )
    for at, source in enumerate(raw.sources or ()):
        if _SOURCE.fullmatch(source) is None:
            raise InvalidInput(f"{where}.sources[{at}]: {quoted(source)} is no source's name.")
    return Tenant(
        id=raw.id,
        weight=raw.weight,
        keys=_keys(f"{where}.keys", raw.keys),
        grants=tuple(raw.grants),
        public=tuple(raw.public),
        base=raw.base,
        sources=None if raw.sources is None else frozenset(raw.sources),
        limits=_limits(f"{where}.limits", raw.limits),
    )


def _limits(where: str, raw: _Limits) -> TenantLimits:
    limits = TenantLimits(
        requests_per_minute=raw.requests_per_minute,
        tokens_per_minute=raw.tokens_per_minute,
        concurrency=raw.concurrency,
        queue_length=raw.queue_length,
        adapters=raw.adapters,
        bytes=None if raw.bytes is None else _at(f"{where}.bytes", parse_size, raw.bytes),
    )
    for name in TenantLimits.__slots__:
        value = getattr(limits, name)
        # Nothing uploaded and nothing that waits make sense; no request at all is no tenant.
        least = 0 if name in ("queue_length", "adapters", "bytes") else 1
        if value is not None and not least <= value <= MAX_COUNT:
            what = wanted(f"a whole number from {least} on", value)
            raise InvalidInput(f"{where}.{name}: {what}.")
    return limits


def _keys(where: str, raw: Iterable[_Key]) -> tuple[KeyRecord, ...]:
    return tuple(_key(f"{where}[{at}]", key) for at, key in enumerate(raw))


def _key(where: str, raw: _Key) -> KeyRecord:
    if not is_key_id(raw.id):
        raise InvalidInput(f"{where}.id: 8 to 32 lower-case letters and digits are wanted.")
    if _SHA256.fullmatch(raw.sha256) is None:
        raise InvalidInput(f"{where}.sha256: 64 lower-case hexadecimal digits are wanted.")
    if len(raw.note) > MAX_NOTE_CHARS or not raw.note.isprintable():
        raise InvalidInput(f"{where}.note: at most {MAX_NOTE_CHARS} printable characters.")
    created = None if raw.created is None else _at(f"{where}.created", parse_moment, raw.created)
    expires = None if raw.expires is None else _at(f"{where}.expires", parse_moment, raw.expires)
    return KeyRecord(raw.id, raw.sha256, created, expires, raw.note)


def parse_moment(text: str) -> datetime:
    """Give the aware time of an ISO 8601 date or time; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text.strip())
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InvalidInput(
            f"{quoted(text)} is no time such as 2027-01-31 or 2027-01-31T12:00:00Z."
        ) from None


def _at(where: str, parse: Callable[[str], T], text: str) -> T:
    try:
        return parse(text)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error.message}") from None


def _check_unique(config: TenantsConfig) -> None:
    places = {tenant.id: at for at, tenant in reversed(list(enumerate(config.tenants)))}
    for at, tenant in enumerate(config.tenants):
        if places[tenant.id] != at:
            raise InvalidInput(
                f"tenants[{at}].id: {tenant.id} stands at tenants[{places[tenant.id]}] already."
            )
    seen: dict[str, str] = {}
    for tenant_or_none, key in config.all_keys():
        owner = "admin_keys" if tenant_or_none is None else f"tenant {tenant_or_none.id}"
        if key.id in seen:
            raise InvalidInput(f"{owner}: the key id {key.id} stands at {seen[key.id]} already.")
        seen[key.id] = owner
