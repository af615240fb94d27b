"""From ``model`` to what is meant: the base, a registered name, or an exact version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import msgspec

from mural_resolvers.errors import Unavailable
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.tenants import Principal, authorize, authorize_base
from mural_router.placement import Base, Fleet
from mural_router.routing.versions import Exact, Versions

__all__ = ["Target", "Targets", "find_target", "is_registered", "target_of"]

MAX_NAMES: Final = 8_192


class Target(msgspec.Struct, frozen=True, gc=False):
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
_parsed = lru_cache(maxsize=MAX_NAMES)(parse_name)


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
    named = _named(principal, model, fleet, base, shared_names)
    if isinstance(named, Target):
        return named
    return target_of(await versions.resolve(named, sticky))


class Targets:
    """`find_target` for the many requests by the same principals for the same names.

    What follows from a principal and a text alone is remembered: the name in it, and that it may
    be used. Nothing has to be forgotten: other keys or grants make other principals, and what
    the fleet, the base or the versions say is asked each time. For one event loop.
    """

    def __init__(self, versions: Versions) -> None:
        self._versions = versions
        self._allowed: dict[tuple[int, str], _Allowed] = {}

    def find_now(
        self,
        principal: Principal,
        model: str,
        fleet: Fleet,
        base: Base,
        shared_names: frozenset[str],
        sticky: str | None,
    ) -> Target | None:
        """The target, or None where `find_target` has to look something up. Raises as that."""
        allowed = self._allowed.get((id(principal), model))
        if allowed is None or model in base.model_names:
            named = _named(principal, model, fleet, base, shared_names)
            if isinstance(named, Target):
                return named
            allowed = self._allow(principal, model, named)
        exact = self._versions.resolve_now(allowed.name, sticky)
        if exact is None:
            return None
        if exact is not allowed.exact and exact != allowed.exact:
            allowed.exact, allowed.target = exact, target_of(exact)
        return allowed.target

    def _allow(self, principal: Principal, model: str, name: AdapterName) -> _Allowed:
        exact = Exact(name)
        allowed = _Allowed(principal, name, exact, target_of(exact))
        if ":" in model:  # Without, what the fleet has under it comes first.
            if len(self._allowed) >= MAX_NAMES:
                self._allowed.clear()
            self._allowed[id(principal), model] = allowed
        return allowed


@dataclass(slots=True)
class _Allowed:
    principal: Principal
    """Held, so that no other one comes to have its identity."""
    name: AdapterName
    exact: Exact
    """What the name was found to mean last, and the target that this is."""
    target: Target


def _named(
    principal: Principal, model: str, fleet: Fleet, base: Base, shared_names: frozenset[str]
) -> Target | AdapterName:
    """The target, or the name whose version is to be found, which the principal may use."""
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
    return name


def target_of(exact: Exact) -> Target:
    """What a request for a version is for."""
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
