"""API keys: ``mural_<key id>_<secret>``; only the secret's sha256 is stored.

One sha256 is enough, since a secret has 256 random bits.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from mural_resolvers.errors import Unauthorized
from mural_resolvers.tenants.principal import Principal

__all__ = [
    "KeyRing",
    "MintedKey",
    "StoredKey",
    "hash_key",
    "hash_secret",
    "is_key_id",
    "mint_key",
]

_MAX_HEADER_CHARS = 256
_KEY = re.compile(r"mural_([a-z0-9]{8,32})_([A-Za-z0-9_-]{43})")
_KEY_ID = re.compile(r"[a-z0-9]{8,32}")


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


def hash_key(key: str) -> tuple[str, str] | None:
    """Give a whole key's id and the sha256 of its secret; None for a text that is no key."""
    match = _KEY.fullmatch(key)
    return None if match is None else (match[1], hash_secret(match[2]))


def is_key_id(text: str) -> bool:
    """Tell whether the text has the form of a key's id."""
    return _KEY_ID.fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as a server holds it: whose it is, and until when (an aware time, or None)."""

    key_id: str
    sha256: str
    principal: Principal
    expires: datetime | None = None


class KeyRing(Mapping[str, StoredKey]):
    """The keys of a server by their id. Immutable."""

    def __init__(self, keys: Iterable[StoredKey] = ()) -> None:
        self._keys = {key.key_id: key for key in keys}

    def __getitem__(self, key_id: str) -> StoredKey:
        return self._keys[key_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def authenticate(self, authorization_header: str | None, now: datetime) -> Principal:
        """Establish the principal of ``Authorization: Bearer mural_…`` at a time.

        Looks up the id and compares one sha256 in constant time. Raises ``Unauthorized``, with
        the same message whatever was wrong: no key, another one, one that has expired.
        """
        header = authorization_header or ""
        scheme, _, token = header[: _MAX_HEADER_CHARS + 1].partition(" ")
        match = _KEY.fullmatch(token.strip(" "))
        if len(header) > _MAX_HEADER_CHARS or scheme.lower() != "bearer" or match is None:
            raise Unauthorized()
        stored = self._keys.get(match[1])
        # An unknown id costs the same comparison as a known one.
        expected = stored.sha256 if stored is not None else "0" * 64
        if not hmac.compare_digest(hash_secret(match[2]), expected) or stored is None:
            raise Unauthorized()
        if stored.expires is not None and now >= stored.expires:
            raise Unauthorized()
        return stored.principal
