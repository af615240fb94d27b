"""Who asks, and how a replica is told: the router's own word in place of the client's.

A client's key ends here. A Mural server is told the tenant and its weight in headers that it
believes only beside the router's token; a vLLM pod gets its own key.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, Literal, Protocol

from mural_resolvers.errors import Unauthorized, Unavailable
from mural_resolvers.tenants import ADMIN, ANYONE, KeyRing, Principal, StoredKey
from mural_router.fleet.endpoint import Engine

__all__ = ["Authenticator", "Headers", "Keys", "RouterAuth", "tenant_salt", "upstream_identity"]

RouterAuth = Literal["keys", "open"]
Headers = tuple[tuple[str, str], ...]

MAX_AUTHORIZATION_CHARS: Final = 512
MAX_GOOD_KEYS: Final = 8_192
MAX_SALTS: Final = 8_192
ADMIN_PRINCIPAL: Final = Principal(tenant=None, rights=frozenset({ADMIN}), key_id="api-key")


class Keys(Protocol):
    """Where tenants' keys are: a `TenantsFile`, or objects."""

    @property
    def ring(self) -> KeyRing:
        """Those in force; another ring with each change. Raises ``Unavailable`` before any are
        known: to say of a key that it is none would be a guess."""
        ...


class Authenticator:
    """Establishes the principal of a request: tenants' keys, admin keys, or anyone.

    Secrets are kept and compared as sha256 only. A tenant's key that was found good is
    remembered, by the sha256 of its header, until any key changes or it expires: one that was
    revoked is of no use from the change on. For one event loop.
    """

    def __init__(
        self,
        mode: RouterAuth,
        *,
        admin_keys: Iterable[str] = (),
        tenants: Keys | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.mode = mode
        self.tenants = tenants
        self._admin_hashes = tuple(hashlib.sha256(key.encode()).digest() for key in admin_keys)
        self._clock = clock
        self._ring: KeyRing | None = None
        """What `_good` was found in."""
        self._good: dict[bytes, StoredKey] = {}

    def principal(self, authorization: tuple[str, ...]) -> Principal:
        """Raise ``Unauthorized``, with one message whatever was wrong; `Keys` say what else.

        ``authorization``: every header of that name; keys are asked for in exactly one.
        """
        if self.mode == "open":
            return ANYONE
        if len(authorization) != 1 or len(authorization[0]) > MAX_AUTHORIZATION_CHARS:
            raise Unauthorized()
        if self._admin_hashes and self._is_admin_key(authorization[0]):
            return ADMIN_PRINCIPAL
        if self.tenants is None:
            raise Unauthorized()
        return self._tenant_key(self.tenants.ring, authorization[0])

    @property
    def ring(self) -> KeyRing | None:
        """The tenants' keys in force, None where there are none: another with each change."""
        tenants = self.tenants
        try:
            return None if tenants is None else tenants.ring
        except Unavailable:
            return None

    def lasting(self, authorization: tuple[str, ...]) -> Principal | None:
        """The principal who is the same for as long as `ring` is; None: there is none."""
        try:
            principal = self.principal(authorization)
        except (Unauthorized, Unavailable):
            return None
        if principal is ANYONE or principal is ADMIN_PRINCIPAL:
            return principal
        ring = self.ring
        if ring is None or principal.key_id is None or ring[principal.key_id].expires is not None:
            return None
        return principal

    def _tenant_key(self, ring: KeyRing, authorization: str) -> Principal:
        if ring is not self._ring:
            self._ring, self._good = ring, {}
        sent = hashlib.sha256(authorization.encode("utf-8", "surrogatepass")).digest()
        good = self._good.get(sent)
        if good is not None and good.expires is None:
            return good.principal
        principal = ring.authenticate(authorization, self._clock())
        if principal.key_id is not None and good is None:
            if len(self._good) >= MAX_GOOD_KEYS:
                self._good.clear()
            self._good[sent] = ring[principal.key_id]
        return principal

    def _is_admin_key(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        sent = hashlib.sha256(token.strip(" ").encode("utf-8", "replace")).digest()
        # Every key is compared, so that the time does not tell which one was close.
        matches = [hmac.compare_digest(sent, known) for known in self._admin_hashes]
        return any(matches)


def upstream_identity(
    engine: Engine,
    principal: Principal,
    *,
    token: str | None,
    digest: str | None = None,
    acts_for: str | None = None,
) -> Headers:
    """The headers by which a replica knows on whose behalf it is asked.

    ``token``: the router's own for Mural servers, the pod's key for vLLM; None: none is asked
    for there. ``digest``: the content that the name stands for, where it is known. ``acts_for``:
    the tenant in whose name somebody asks who is of none.
    """
    tenant = principal.tenant or acts_for
    headers: list[tuple[str, str]] = []
    if token is not None:
        headers.append(("authorization", f"Bearer {token}"))
    if engine == "vllm":
        return tuple(headers)
    if tenant is not None:
        headers.append(("x-mural-tenant", tenant))
        headers.append(("x-mural-weight", f"{principal.weight:g}"))
    if digest is not None:
        headers.append(("x-mural-digest", digest))
    return tuple(headers)


@lru_cache(maxsize=MAX_SALTS)
def tenant_salt(secret: bytes, tenant: str, cache_salt: str | None) -> str:
    """What keeps a tenant's prefix blocks apart on an engine that knows no tenants.

    How fast an answer comes must not tell one tenant what another asked. A client's own salt
    only narrows; without the secret nobody can name another tenant's.
    """
    text = f"{tenant}\0{cache_salt or ''}".encode("utf-8", "surrogatepass")
    return hmac.digest(secret, text, "sha256").hex()
