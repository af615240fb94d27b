"""From ``model`` to what is meant: the base, a registered name, or an exact version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from mural_resolvers.errors import Unavailable
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.tenants import Principal, authorize, authorize_base
from mural_router.fleet.report import Base
from mural_router.placement import Fleet
from mural_router.routing.versions import Versions

__all__ = ["Target", "find_target", "is_registered"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a request is for."""

    model: str
    """The name that a replica is asked for: of an adapter the exact version, in short form."""
    adapter: str | None
    """What placement hashes: ``tenant/adapter:version``, or a registered name; None: the base."""
    digest: str | None = None
    """Of the content that the store has under it, where that is known."""
    alias: str | None = None
    """The name that was asked for, where it was an alias."""
    listed: bool = False
    """The store has it."""


# Pure, and most requests are for few names; an error is not kept.
_parsed = lru_cache(maxsize=8_192)(parse_name)


async def find_target(
    principal: Principal,
    model: str,
    fleet: Fleet,
    base: Base,
    versions: Versions,
    *,
    shared_names: frozenset[str] = frozenset(),
    sticky: str | None = None,
) -> Target:
    """Look a name up: the base's names first, registered ones, then the grammar of adapters.

    Raises ``Forbidden`` before any I/O for what the principal may not use, ``MalformedName``,
    ``AdapterNotFound``, and ``Unavailable`` while the base's names are not known.
    """
    if model in base.model_names:
        authorize_base(principal)
        return Target(model, None)
    if ":" not in model:
        if model in shared_names or is_registered(model, fleet):
            authorize(principal, model, shared=model in shared_names)
            return Target(model, model)
        if not base.model_names:
            # It may be the base: to call it anything else would be a guess.
            raise Unavailable("No replica has told yet what it serves.", retry_after_s=2.0)
    name: AdapterName = _parsed(model)
    authorize(principal, name)
    exact = await versions.resolve(name, sticky)
    return Target(
        model=exact.name.short,
        adapter=exact.name.exact,
        digest=exact.digest,
        alias=None if exact.alias is None else exact.alias.short,
        listed=exact.listed,
    )


def is_registered(model: str, fleet: Fleet) -> bool:
    """Whether a replica holds an adapter under a name that an admin gave it.

    A tenant's version is held under a name with ``:`` in it.
    """
    return any(model in replica.adapters for replica in fleet.replicas)
