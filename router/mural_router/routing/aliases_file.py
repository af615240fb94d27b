"""Aliases from a file of the router's own, in place of those that a store has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from mural_resolvers.errors import InvalidInput, MuralError, UnusableAdapter
from mural_resolvers.names import parse_name
from mural_resolvers.store import Aliases
from mural_resolvers.strict_yaml import parse_yaml
from mural_resolvers.versions import AliasTarget, encode_aliases, parse_aliases
from mural_router.routing.versions import KnownVersions, VersionSource

__all__ = ["AliasesFile", "LayeredVersions", "parse_aliases_file"]

MAX_FILE_BYTES: Final = 16 << 20

logger = logging.getLogger("mural.router.versions")


class _Target(msgspec.Struct, forbid_unknown_fields=True):
    version: str
    weight: float = 1.0


_Form = dict[str, dict[str, list[_Target]]]


def parse_aliases_file(data: bytes) -> Mapping[tuple[str, str], Aliases]:
    """Read ``tenant/adapter: {alias: [{version, weight}]}``; raise a ``MuralError``.

    The inner part is what a store keeps in ``_aliases.json``; ``acme`` is ``acme/default``.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"The aliases file is larger than {MAX_FILE_BYTES} bytes.")
    try:
        form = msgspec.convert(parse_yaml(data) or {}, _Form, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"The aliases file: {error}.") from None
    found: dict[tuple[str, str], Aliases] = {}
    for text, aliases in form.items():
        if ":" in text:
            raise InvalidInput(f"The aliases file: {text[:80]} is no adapter, but a version.")
        name = parse_name(text)
        for alias, targets in aliases.items():
            for target in targets:
                if target.version in aliases:
                    # Versions and aliases share no names, so it could never be found.
                    raise InvalidInput(
                        f"The aliases file, {text}: {alias[:80]} stands for {target.version[:80]}, "
                        "which is an alias, too: name a version."
                    )
        try:
            found[name.tenant, name.adapter] = parse_aliases(encode_aliases(_targets(aliases)))
        except UnusableAdapter as error:
            raise InvalidInput(f"The aliases file, {name.tenant}: {error.message}") from None
    return found


def _targets(aliases: dict[str, list[_Target]]) -> Aliases:
    return {
        alias: tuple(AliasTarget(target.version, target.weight) for target in targets)
        for alias, targets in aliases.items()
    }


class AliasesFile:
    """Reads the file again when it is asked for and has changed; a bad one changes nothing."""

    def __init__(self, path: Path) -> None:
        """Raises ``InvalidInput`` when it is absent or wrong."""
        self._path = path
        self._seen: bytes | None = None
        """As it was read last; None: it could not be read."""
        self._refused = ""
        """What was last said of it."""
        data = self._seen = self._read()
        self._aliases = parse_aliases_file(data)

    async def aliases(self, tenant: str, adapter: str) -> Aliases:
        """The adapter's aliases, as the last good file has them."""
        await asyncio.to_thread(self._look)
        return self._aliases.get((tenant, adapter), {})

    def _look(self) -> None:
        try:
            data = self._read()
            if data == self._seen:
                return
            self._seen = data
            self._aliases = parse_aliases_file(data)
        except MuralError as error:
            # Once, and not for each adapter that is looked up.
            if self._refused != error.message:
                self._refused = error.message
                logger.error(
                    "%s is refused, the last good aliases hold: %s", self._path, error.message
                )
            return
        self._refused = ""
        logger.info("aliases file reloaded: %d adapters", len(self._aliases))

    def _read(self) -> bytes:
        try:
            with self._path.open("rb") as file:
                return file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            self._seen = None
            raise InvalidInput(f"The aliases file cannot be read: {error.strerror}.") from None


class LayeredVersions(VersionSource):
    """The file's aliases over those of a store, whose versions and digests hold."""

    def __init__(self, file: AliasesFile, store: VersionSource | None) -> None:
        self._file = file
        self._store = store

    async def read(self, tenant: str, adapter: str) -> KnownVersions:
        """What both say; the file alone, where there is no store."""
        aliases = await self._file.aliases(tenant, adapter)
        if self._store is None:
            return KnownVersions(aliases)
        known = await self._store.read(tenant, adapter)
        return KnownVersions({**known.aliases, **aliases}, known.digests)

    async def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            await self._store.close()
