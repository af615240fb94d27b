"""Who asks, and what they may use. Pure: no look-up and no I/O, whatever is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from mural_resolvers.errors import Forbidden
from mural_resolvers.names import DEFAULT_ADAPTER, AdapterName

__all__ = [
    "ADMIN",
    "ANYONE",
    "UNLIMITED",
    "Principal",
    "TenantLimits",
    "authorize",
    "authorize_base",
    "is_grant",
    "may_use",
    "may_use_source",
]

ADMIN: Final = "admin"

_GRANT = re.compile(r"[a-z0-9._*?-]{1,63}(/[a-z0-9._*?-]{1,63})?(:[A-Za-z0-9._*?-]{1,128})?")
_ADMIN_NAME_GRANT = re.compile(r"@[A-Za-z0-9._/*?-]{1,128}")


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """What a tenant may use at most; None: no limit of its own.

    ``requests_per_minute`` and ``tokens_per_minute`` (prompt and generated) hold for any 60
    seconds. ``concurrency``: sequences at one time. ``queue_length``: requests that wait in one
    router for capacity (None: as many as the router lets any tenant's). ``adapters`` and
    ``bytes``: what it may keep of its own uploads.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency: int | None = None
    queue_length: int | None = None
    adapters: int | None = None
    bytes: int | None = None


UNLIMITED: Final = TenantLimits()


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks. It is established once at the edge and handed down.

    ``tenant`` owns the namespace of that name (None: no namespace). ``rights`` may hold
    ``"admin"``: everything, and the control of the server. ``weight`` (above 0) is the share in
    scheduling. ``base`` says whether the base model may be asked, ``sources`` which sources of
    adapters by name (None: all). ``grants`` are globs (``*`` and ``?``, never across ``/`` or
    ``:``) for more:

    ==================  ==========================================================
    ``globex``          everything of that tenant
    ``globex/sql``      every version of that adapter, as ``globex/sql:*``
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
    base: bool = True
    sources: frozenset[str] | None = None
    limits: TenantLimits = UNLIMITED

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


def authorize_base(principal: Principal) -> None:
    """Raise ``Forbidden``, with the body that every refusal has, unless the base may be asked."""
    if not (principal.base or principal.is_admin):
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
        grant.startswith("@") and _matches(name, grant[1:]) for grant in principal.grants
    )


def may_use_source(principal: Principal, source: str) -> bool:
    """Tell whether a source, by its name, may be asked on the principal's behalf."""
    return principal.is_admin or principal.sources is None or source in principal.sources


def _covers(grant: str, name: AdapterName) -> bool:
    if grant.startswith("@"):
        return False
    path, colon, version = grant.partition(":")
    tenant, slash, adapter = path.partition("/")
    if not slash:
        adapter = DEFAULT_ADAPTER if colon else "*"
    return (
        _matches(name.tenant, tenant)
        and _matches(name.adapter, adapter)
        and _matches(name.version, version if colon else "*")
    )


def _matches(text: str, pattern: str) -> bool:
    # A public adapter is a grant of everybody, so most patterns are met by most requests.
    if "*" not in pattern and "?" not in pattern:
        return text == pattern
    return pattern == "*" or fnmatchcase(text, pattern)


def is_grant(text: str) -> bool:
    """Tell whether the text has the form of a grant (see ``Principal``)."""
    pattern = _ADMIN_NAME_GRANT if text.startswith("@") else _GRANT
    return len(text) <= 256 and pattern.fullmatch(text) is not None
