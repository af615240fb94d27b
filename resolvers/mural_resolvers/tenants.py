"""Who is asking, and what they may use: principals, grants, API keys.

``authorize`` is pure and comes before any look-up. API keys are ``mural_<key id>_<secret>``;
only the secret's sha256 is stored, which is enough for a secret of 256 random bits.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

import msgspec

from mural_resolvers.errors import Forbidden, InvalidInput, Unauthorized, quoted
from mural_resolvers.names import DEFAULT_ADAPTER, AdapterName, is_tenant

__all__ = [
    "ADMIN",
    "ANYONE",
    "KeyFile",
    "KeyRecord",
    "MintedKey",
    "Principal",
    "authorize",
    "hash_secret",
    "is_grant",
    "may_use",
    "mint_key",
]

ADMIN: Final = "admin"

_MAX_KEY_FILE_BYTES = 16 << 20
_MAX_HEADER_CHARS = 256
_KEY = re.compile(r"mural_([a-z0-9]{8,32})_([A-Za-z0-9_-]{43})")
_KEY_ID = re.compile(r"[a-z0-9]{8,32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GRANT = re.compile(r"[a-z0-9._*?-]{1,63}(/[a-z0-9._*?-]{1,63})?(:[A-Za-z0-9._*?-]{1,128})?")
_ADMIN_NAME_GRANT = re.compile(r"@[A-Za-z0-9._/*?-]{1,128}")


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. It is established once at the edge and handed down.

    ``tenant`` owns the namespace of that name (None: no namespace). ``rights`` may hold
    ``"admin"``: everything, and the control of the server. ``weight`` (above 0) is the share in
    scheduling. ``grants`` are globs (``*`` and ``?``, never across ``/`` or ``:``) for more:

    ==================  ==========================================================
    ``globex``          everything of that tenant
    ``globex/sql``      every version of that adapter
    ``globex/sql:v1``   that version; an alias counts as asked (``…:latest``)
    ``globex:v1``       short for ``globex/default:v1``
    ``@sql*``           names that an admin registered, which belong to no tenant
    ==================  ==========================================================
    """

    tenant: str | None
    rights: frozenset[str] = frozenset()
    weight: float = 1.0
    grants: tuple[str, ...] = ()
    key_id: str | None = None

    @property
    def is_admin(self) -> bool:
        """Whether the principal holds the admin right."""
        return ADMIN in self.rights


# The principal of the open mode: every model, no namespace of its own and no admin right.
ANYONE: Final = Principal(tenant=None, grants=("*", "@*"))


def authorize(principal: Principal, name: AdapterName | str, *, shared: bool = False) -> None:
    """Raise ``Forbidden`` unless the principal may use the name; no I/O, no look-up.

    A string is a name that an admin registered; ``shared`` says that it was registered for all.
    """
    if not may_use(principal, name, shared=shared):
        raise Forbidden()


def may_use(principal: Principal, name: AdapterName | str, *, shared: bool = False) -> bool:
    """Tell what ``authorize`` would decide, for lists that are filtered."""
    if principal.is_admin:
        return True
    if isinstance(name, AdapterName):
        return name.tenant == principal.tenant or any(
            _covers(grant, name) for grant in principal.grants
        )
    return shared or any(
        grant.startswith("@") and fnmatchcase(name, grant[1:]) for grant in principal.grants
    )


def _covers(grant: str, name: AdapterName) -> bool:
    if grant.startswith("@"):
        return False
    path, colon, version = grant.partition(":")
    tenant, slash, adapter = path.partition("/")
    if not slash:
        adapter = DEFAULT_ADAPTER if colon else "*"
    return (
        fnmatchcase(name.tenant, tenant)
        and fnmatchcase(name.adapter, adapter)
        and fnmatchcase(name.version, version if colon else "*")
    )


def is_grant(text: str) -> bool:
    """Tell whether the text has the form of a grant (see ``Principal``)."""
    pattern = _ADMIN_NAME_GRANT if text.startswith("@") else _GRANT
    return len(text) <= 256 and pattern.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class MintedKey:
    """A new key. ``key`` is the secret to hand over once; it stays out of ``repr``."""

    key_id: str
    sha256: str
    key: str = field(repr=False)


def mint_key(random_bytes: Callable[[int], bytes] = secrets.token_bytes) -> MintedKey:
    """Make ``mural_<key id>_<256-bit secret>``; only ``key_id`` and ``sha256`` are to be kept."""
    key_id = random_bytes(8).hex()
    # 32 bytes are always 43 characters and one sign of padding.
    secret = base64.urlsafe_b64encode(random_bytes(32)).rstrip(b"=").decode()
    return MintedKey(key_id=key_id, sha256=hash_secret(secret), key=f"mural_{key_id}_{secret}")


def hash_secret(secret: str) -> str:
    """Give the sha256 (hex) of a key's secret part, the form that is stored."""
    return hashlib.sha256(secret.encode()).hexdigest()


class KeyRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key as the key file keeps it: never the secret."""

    id: str
    sha256: str
    tenant: str | None = None
    rights: frozenset[str] = frozenset()
    weight: float = 1.0
    grants: tuple[str, ...] = ()

    def principal(self) -> Principal:
        """The principal that a holder of this key is."""
        return Principal(self.tenant, self.rights, self.weight, self.grants, self.id)


class _KeyFileBody(msgspec.Struct, forbid_unknown_fields=True):
    keys: tuple[KeyRecord, ...]


class KeyFile:
    """The keys of a server: ``{"keys": [{id, sha256, tenant, rights, weight, grants}, …]}``.

    Raises ``InvalidInput`` naming the record that is wrong (by its place and field).
    """

    def __init__(self, records: Iterable[KeyRecord] = ()) -> None:
        self._records: dict[str, KeyRecord] = {}
        for place, record in enumerate(records):
            _check_record(place, record)
            if record.id in self._records:
                raise InvalidInput(f"keys[{place}]: the id {record.id} stands twice.")
            self._records[record.id] = record

    def __len__(self) -> int:
        return len(self._records)

    @classmethod
    def load(cls, path: Path) -> KeyFile:
        """Read a key file; raise ``InvalidInput`` when it is absent or wrong."""
        try:
            with path.open("rb") as file:
                data = file.read(_MAX_KEY_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidInput(f"The key file cannot be read: {error.strerror}.") from None
        return cls.from_bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> KeyFile:
        """Parse a key file's bytes."""
        if len(data) > _MAX_KEY_FILE_BYTES:
            raise InvalidInput(f"The key file is larger than {_MAX_KEY_FILE_BYTES} bytes.")
        try:
            body = msgspec.json.decode(data, type=_KeyFileBody)
        except msgspec.MsgspecError as error:
            # msgspec tells the place and the type, never the value.
            raise InvalidInput(f"The key file is wrong: {error}.") from None
        except (RecursionError, UnicodeDecodeError):
            raise InvalidInput("The key file is not JSON of the right form.") from None
        return cls(body.keys)

    def authenticate(self, authorization_header: str | None) -> Principal:
        """Establish the principal of ``Authorization: Bearer mural_…``.

        Looks up the id and compares one sha256 in constant time. Raises ``Unauthorized``, with
        the same message whatever was wrong.
        """
        header = authorization_header or ""
        scheme, _, token = header[: _MAX_HEADER_CHARS + 1].partition(" ")
        match = _KEY.fullmatch(token.strip(" "))
        if len(header) > _MAX_HEADER_CHARS or scheme.lower() != "bearer" or match is None:
            raise Unauthorized()
        record = self._records.get(match[1])
        # An unknown id costs the same comparison as a known one.
        expected = record.sha256 if record is not None else "0" * 64
        if not hmac.compare_digest(hash_secret(match[2]), expected) or record is None:
            raise Unauthorized()
        return record.principal()


def _check_record(place: int, record: KeyRecord) -> None:
    where = f"keys[{place}]"
    if _KEY_ID.fullmatch(record.id) is None:
        raise InvalidInput(f"{where}.id: 8 to 32 lower-case letters and digits are wanted.")
    if _SHA256.fullmatch(record.sha256) is None:
        raise InvalidInput(f"{where}.sha256: 64 lower-case hexadecimal digits are wanted.")
    if record.tenant is not None and not is_tenant(record.tenant):
        raise InvalidInput(f"{where}.tenant: {quoted(record.tenant)} is not a tenant name.")
    if record.rights - {ADMIN}:
        raise InvalidInput(f"{where}.rights: the only right is {ADMIN!r}.")
    if not 0 < record.weight <= 1e6:
        raise InvalidInput(f"{where}.weight: a number above 0, at most 1e6, is wanted.")
    for grant in record.grants:
        if not is_grant(grant):
            raise InvalidInput(
                f"{where}.grants: {quoted(grant)} is no grant such as "
                "globex, globex/sql, globex/sql:v1 or @name."
            )
