"""What an `AdapterAlias`' status says: whether routers obey it, whether its versions are hot."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from mural_operator.conditions import Condition, listed
from mural_operator.unreadable import Unreadable
from mural_resolvers.kubernetes.aliases import RefusedAlias, judge_aliases
from mural_resolvers.kubernetes.objects import AdapterAlias
from mural_resolvers.names import AdapterName

__all__ = ["AliasVerdict", "alias_verdicts", "of_unreadable"]


@dataclass(frozen=True, slots=True)
class AliasVerdict:
    """The whole status of an object."""

    conditions: tuple[Condition, ...]
    reason: str


def alias_verdicts(
    aliases: Iterable[AdapterAlias],
    namespaces: Mapping[str, frozenset[str]],
    declared: Collection[str],
) -> dict[str, AliasVerdict]:
    """By ``namespace/name``; ``declared`` are the exact names that accepted Adapters declare."""
    every = tuple(aliases)
    _, refused = judge_aliases(every, namespaces)
    return {
        alias.metadata.key: _verdict(alias, refused.get(alias.metadata.key), declared)
        for alias in every
    }


def of_unreadable(alias: Unreadable) -> AliasVerdict:
    """Judge an object that cannot be read."""
    accepted = Condition(
        "Accepted",
        "False",
        "Malformed",
        "This object cannot be read: mend what is wrong in it. Routers that could read it before "
        f"obey it as it was then, others do not know it. {alias.message}",
    )
    declared = Condition(
        "Declared", "Unknown", "Malformed", "Not judged while the object cannot be read."
    )
    return AliasVerdict((accepted, declared), accepted.reason)


def _verdict(
    alias: AdapterAlias, refused: RefusedAlias | None, declared: Collection[str]
) -> AliasVerdict:
    if refused is not None:
        accepted = Condition("Accepted", "False", refused.reason, refused.message)
    elif _name(alias, alias.spec.alias) in declared:
        accepted = Condition(
            "Accepted",
            "True",
            "HidesVersion",
            f"An Adapter declares a version {alias.spec.alias}, which nobody can ask for while "
            "this alias is of its name: name the alias otherwise.",
        )
    else:
        accepted = Condition("Accepted", "True", "Accepted", "Routers obey it.")
    return AliasVerdict((accepted, _hot(alias, declared)), accepted.reason)


def _hot(alias: AdapterAlias, declared: Collection[str]) -> Condition:
    cold = [
        version.version
        for version in alias.spec.versions
        if version.weight > 0 and _name(alias, version.version) not in declared
    ]
    if not cold:
        return Condition("Declared", "True", "AllDeclared", "Adapters declare all of its versions.")
    return Condition(
        "Declared",
        "False",
        "NotDeclared",
        f"No accepted Adapter declares {listed(cold)}: loaded when first asked for, which takes "
        "longer. Declare them to keep them resident.",
    )


def _name(alias: AdapterAlias, version: str) -> str:
    return AdapterName(alias.spec.tenant, alias.spec.name, version).exact
