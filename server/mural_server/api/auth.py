"""Who is asking: keys of the tenants file, admin keys of the command line, a router, or anyone."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from starlette.datastructures import Headers
from starlette.requests import Request

from mural_resolvers.errors import Forbidden, Unauthorized
from mural_resolvers.tenants import ADMIN, ANYONE, Principal, TenantsFile
from mural_server.api.router_identity import Caller, RouterIdentity
from mural_server.settings import AuthMode

__all__ = ["Authenticator"]

MAX_AUTHORIZATION_CHARS = 512

ADMIN_PRINCIPAL = Principal(tenant=None, rights=frozenset({ADMIN}), key_id="api-key")


class Authenticator:
    """Establishes the principal of a request. Secrets are kept and compared as sha256 only.

    Nothing is remembered from one request to the next, on one connection either: a key that has
    expired or was revoked in the tenants file is of no use from then on.
    """

    def __init__(
        self,
        mode: AuthMode,
        *,
        admin_keys: Iterable[str] = (),
        tenants: TenantsFile | None = None,
        router: RouterIdentity | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.mode = mode
        self._admin_hashes = tuple(hashlib.sha256(key.encode()).digest() for key in admin_keys)
        self.tenants = tenants
        self.router = router
        self._clock = clock

    def principal(self, request: Request) -> Principal:
        """Raise `Unauthorized`, with one message whatever was wrong.

        ``x-mural-*`` headers are a router's to set, and are believed in its mode alone.
        """
        if self.mode == "open":
            return ANYONE
        if self.router is not None:
            return self.router.principal(request)
        return self._holder(request.headers)

    def caller(self, request: Request) -> Caller:
        """As `principal`, of an inference, whose name a router has authorised already."""
        if self.router is not None:
            return self.router.caller(request)
        return Caller(self.principal(request))

    def admin(self, request: Request) -> Principal:
        """The principal, if it may change what the server holds; else raise `Forbidden`.

        In the open mode there are no keys to tell an admin by: whoever reaches the port is one.
        A router is none: what it passes on comes from tenants.
        """
        principal = self.principal(request)
        if self.mode != "open" and not principal.is_admin:
            raise Forbidden("This key may not load or unload adapters.")
        return principal

    def _holder(self, headers: Headers) -> Principal:
        """Whose key it is."""
        sent = headers.getlist("authorization")
        if len(sent) != 1 or len(sent[0]) > MAX_AUTHORIZATION_CHARS:
            raise Unauthorized()
        if self._is_admin_key(sent[0]):
            return ADMIN_PRINCIPAL
        if self.tenants is None:
            raise Unauthorized()
        return self.tenants.ring.authenticate(sent[0], self._clock())

    def _is_admin_key(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return False
        sent = hashlib.sha256(token.strip(" ").encode("utf-8", "replace")).digest()
        # Every key is compared, so that the time does not tell which one was close.
        matches = [hmac.compare_digest(sent, known) for known in self._admin_hashes]
        return any(matches)
