"""A router's word on who asks, believed on a connection that is proven to be the router's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from starlette.requests import Request

from mural_resolvers.errors import Conflict, Unauthorized, quoted
from mural_resolvers.names import is_tenant
from mural_resolvers.tenants import ANYONE, Principal, TenantLimits, TenantsFile
from mural_server.api.errors import BadParameter
from mural_server.api.http_protocol import PEER_NAMES
from mural_server.api.renewed_token import RenewedToken
from mural_server.catalog import ServedModel

__all__ = ["Caller", "RouterIdentity"]

MAX_AUTHORIZATION_CHARS = 4096
MAX_WEIGHT = 1e6

_DIGEST = re.compile(r"[0-9a-f]{64}")
_WEIGHT = re.compile(r"[0-9]{1,7}(\.[0-9]{1,12})?(e[+-]?[0-9]{1,2})?")


class Caller(NamedTuple):
    """Who asks for an inference, and for which content where that is known."""

    principal: Principal
    digest: str | None = None

    def check(self, served: ServedModel) -> None:
        """Raise ``Conflict`` when other content than the one that was meant would answer."""
        if self.digest is None or served.lora is None or served.lora.digest == self.digest:
            return
        raise Conflict(f"{quoted(served.name)} has other content here than the router was told.")


class RouterIdentity:
    """Reads ``x-mural-tenant``, ``-weight`` and ``-digest`` off a router's requests.

    Proof is the router's token in ``Authorization``, or a client certificate with one of
    ``cert_names``. Everything else is ``Unauthorized``, whatever it carries. ``tenants`` says
    which sources a tenant may use and how much of its own it may upload: the rest of its limits
    are the router's to keep, which sees the whole fleet.
    """

    def __init__(
        self,
        *,
        token: RenewedToken | None,
        cert_names: Iterable[str] = (),
        tenants: TenantsFile | None = None,
    ) -> None:
        self.token = token
        self._cert_names = frozenset(cert_names)
        self._tenants = tenants

    def principal(self, request: Request) -> Principal:
        """The tenant with its own namespace; without one, nobody.

        Raises ``Unauthorized``, or ``BadParameter`` for headers that a router does not send.
        """
        self._prove(request)
        tenant = _header(request, "x-mural-tenant")
        if tenant is None:
            return Principal(tenant=None, base=True, key_id="router")
        if not is_tenant(tenant):
            raise BadParameter(f"{quoted(tenant)} is not a tenant name.", at="x-mural-tenant")
        weight = _weight(_header(request, "x-mural-weight"))
        known = None if self._tenants is None else self._tenants.config.find(tenant)
        if known is None:
            return Principal(tenant=tenant, weight=weight, key_id="router")
        return Principal(
            tenant=tenant,
            weight=weight,
            key_id="router",
            sources=known.sources,
            limits=TenantLimits(adapters=known.limits.adapters, bytes=known.limits.bytes),
        )

    def caller(self, request: Request) -> Caller:
        """Who asks for an inference: the router has authorised the name, so every one is granted.

        Raises as `principal` does.
        """
        own = self.principal(request)
        digest = _header(request, "x-mural-digest")
        if digest is not None and _DIGEST.fullmatch(digest) is None:
            raise BadParameter("It is not a sha256 in hexadecimal.", at="x-mural-digest")
        granted = Principal(
            tenant=own.tenant,
            weight=own.weight,
            grants=ANYONE.grants,
            key_id=own.key_id,
            sources=own.sources,
        )
        return Caller(granted, digest)

    def _prove(self, request: Request) -> None:
        names: frozenset[str] = request.scope.get("state", {}).get(PEER_NAMES, frozenset())
        if not names.isdisjoint(self._cert_names):
            return
        sent = request.headers.getlist("authorization")
        if len(sent) != 1 or len(sent[0]) > MAX_AUTHORIZATION_CHARS:
            raise Unauthorized()
        if self.token is None or not self.token.is_shown_in(sent[0]):
            raise Unauthorized()


def _header(request: Request, name: str) -> str | None:
    values = request.headers.getlist(name)
    if len(values) > 1:
        raise BadParameter(f"The header {name} was sent more than once.", at=name)
    return values[0] if values else None


def _weight(text: str | None) -> float:
    if text is None:
        return 1.0
    weight = float(text) if _WEIGHT.fullmatch(text) else math.nan
    if not 0 < weight <= MAX_WEIGHT:
        raise BadParameter(f"{quoted(text)} is not a weight.", at="x-mural-weight")
    return weight
