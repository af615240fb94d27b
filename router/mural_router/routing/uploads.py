"""Whose adapters a request to ``/v1/adapters…`` is about, where its sender does not say it."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import parse_qs, unquote

from mural_resolvers.errors import InvalidInput
from mural_resolvers.names import is_tenant
from mural_router.routing.ask import Ask

__all__ = ["tenant_of"]

PREFIX: Final = "/v1/adapters"

_FIRST = re.compile(r"[^/:]*")


def tenant_of(ask: Ask) -> str:
    """The tenant that an admin's request names, in its path or, for a list, as ``?tenant=``.

    A server knows no admin behind a router, so it is told that tenant: whoever asks can do what
    the tenant itself can. Raises ``InvalidInput`` where none is named.
    """
    first = _FIRST.match(unquote(ask.path).removeprefix(PREFIX).lstrip("/"))
    tenant = "" if first is None else first[0]
    if not tenant:
        named = parse_qs(ask.query, max_num_fields=100).get("tenant", [])
        tenant = named[0] if len(named) == 1 else ""
    if not is_tenant(tenant):
        raise InvalidInput("Whose adapters? Behind a router an admin names one tenant: ?tenant=…")
    return tenant
