"""The same objects from a YAML file of several documents, outside Kubernetes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec.structs import replace

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.files import MAX_FILE_BYTES, DeclaredObjects, parse_objects
from mural_resolvers.kubernetes.objects import Tenant
from mural_resolvers.kubernetes.tenants import inline_keys
from mural_resolvers.watched_file import POLL_S, WatchedFile, WatchNumbers
from mural_router.objects.source import KindState, Objects

__all__ = ["FileObjects"]

NO_NAMESPACE = ""
"""Of an object that names none: whoever writes the file may speak for every tenant in it."""


class FileObjects(Objects):
    """Keeps the objects of a file in force; a bad one leaves the last good one."""

    def __init__(self, path: Path) -> None:
        """Read the file; raise a ``MuralError`` when it is absent or wrong."""
        super().__init__()
        self._file = WatchedFile(
            path, _parse, what="objects file", max_bytes=MAX_FILE_BYTES, shown=_shown
        )
        self._told = self._file.value
        self._tell()

    @property
    def numbers(self) -> WatchNumbers:
        """Of the file."""
        return self._file.numbers

    async def run(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            await self.look()

    async def look(self) -> None:
        """Once; the second look at one new content takes it."""
        await self._file.look()
        if self._file.value is not self._told:
            self._told = self._file.value
            self._tell()

    def not_ready(self) -> None:
        """It was read at the start."""

    def states(self) -> tuple[KindState, ...]:
        declared, stale = self.declared, self.numbers.stale
        trouble = "the log says why the file is refused" if stale else ""
        counts = {
            "tenants": (len(declared.config.tenants), declared.refused_tenants),
            "keys": (len(declared.ring), {}),
            "adapters": (declared.num_adapters, declared.refused_adapters()),
            "aliases": (declared.num_aliases, declared.refused_aliases),
        }
        return tuple(
            # A file is taken or refused as a whole.
            KindState(kind, in_force, refused, {}, stale, trouble)
            for kind, (in_force, refused) in counts.items()
        )

    def _tell(self) -> None:
        tenants = [_of_a_file(each) for each in self._told.tenants]
        self.declared.tell_tenants(tenants, {each.id: inline_keys(each) for each in tenants})
        self.declared.tell_aliases({each.metadata.key: each for each in self._told.aliases})
        self.declared.tell_adapters({each.metadata.key: each for each in self._told.adapters})


def _parse(data: bytes) -> DeclaredObjects:
    """An empty file is one that somebody is about to write: to go by it would lock out everyone."""
    objects = parse_objects(data)
    if not any(objects):
        raise InvalidInput("There is no object in the objects' file.")
    return objects


def _of_a_file(tenant: Tenant) -> Tenant:
    namespaces = (*tenant.spec.namespaces, NO_NAMESPACE)
    return replace(tenant, spec=replace(tenant.spec, namespaces=namespaces))


def _shown(objects: DeclaredObjects) -> str:
    counts = {name: len(each) for name, each in objects._asdict().items()}
    return ", ".join(f"{count} {name}" for name, count in counts.items())
