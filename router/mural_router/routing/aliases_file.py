"""Aliases from a file of the router's own, in place of those that a store has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from mural_resolvers.conversion import converted
from mural_resolvers.errors import InvalidInput, UnusableAdapter
from mural_resolvers.names import AdapterName, parse_name
from mural_resolvers.store import Aliases
from mural_resolvers.strict_yaml import parse_yaml
from mural_resolvers.versions import AliasTarget, encode_aliases, parse_aliases
from mural_resolvers.watched_file import WatchedFile
from mural_router.routing.versions import AliasOverlay

__all__ = ["AliasesFile", "parse_aliases_file"]

MAX_FILE_BYTES: Final = 16 << 20

_InForce = Mapping[tuple[str, str], Aliases]


class _Target(msgspec.Struct, forbid_unknown_fields=True):
    version: str
    weight: float = 1.0


def parse_aliases_file(data: bytes) -> _InForce:
    """Read ``tenant/adapter: {alias: [{version, weight}]}``; raise a ``MuralError``.

    The inner part is what a store keeps in ``_aliases.json``; ``acme`` is ``acme/default``.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"The aliases file is larger than {MAX_FILE_BYTES} bytes.")
    # Level by level: msgspec's own place has no names of adapters and aliases.
    form = converted(parse_yaml(data) or {}, dict[str, object])
    found: dict[tuple[str, str], Aliases] = {}
    for text, fields in form.items():
        if ":" in text:
            raise InvalidInput(f"{text[:80]}: this is no adapter, but a version.")
        name = parse_name(text)
        where = text[:80]
        aliases = {
            alias: converted(targets, list[_Target], f"{where}.{alias[:80]}")
            for alias, targets in converted(fields, dict[str, object], where).items()
        }
        for alias, targets in aliases.items():
            for target in targets:
                if target.version in aliases:
                    # Versions and aliases share no names, so it could never be found.
                    raise InvalidInput(
                        f"{where}.{alias[:80]}: this stands for {target.version[:80]}, "
                        "which is an alias, too: name a version."
                    )
        try:
            found[name.tenant, name.adapter] = parse_aliases(encode_aliases(_targets(aliases)))
        except UnusableAdapter as error:
            raise InvalidInput(f"{where}: {error.message}") from None
    return found


def _targets(aliases: dict[str, list[_Target]]) -> Aliases:
    return {
        alias: tuple(AliasTarget(target.version, target.weight) for target in targets)
        for alias, targets in aliases.items()
    }


class AliasesFile(WatchedFile[_InForce], AliasOverlay):
    """Keeps the aliases of a file in force."""

    def __init__(self, path: Path) -> None:
        """Read the file; raise a ``MuralError`` when it is absent or wrong."""
        super().__init__(
            path, parse_aliases_file, what="aliases file", max_bytes=MAX_FILE_BYTES, shown=_shown
        )

    def targets(self, name: AdapterName) -> Sequence[AliasTarget] | None:
        """What the file says of an alias."""
        aliases = self.value.get((name.tenant, name.adapter))
        return None if aliases is None else aliases.get(name.version)


def _shown(value: _InForce) -> str:
    return f"{len(value)} adapters"
