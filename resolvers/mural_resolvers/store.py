"""Where versions are published: the interface of a store, and its rules.

A store lays out ``tenant/adapter/version/`` and publishes a version by writing its manifest last.
A version is immutable, and its name is never used again: deleting leaves a tombstone. An adapter's
aliases are one record that is changed with conditional writes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from mural_resolvers.digest import FileEntry
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.versions import AliasTarget

__all__ = [
    "ALIASES_FILE",
    "MAX_LISTED",
    "MAX_RECORD_BYTES",
    "TOMBSTONE_FILE",
    "AdapterStore",
    "Aliases",
    "Progress",
    "StoredVersion",
]

ALIASES_FILE = "_aliases.json"
TOMBSTONE_FILE = "_deleted.json"
MAX_LISTED = 10_000
MAX_RECORD_BYTES = 64 << 10

Aliases = Mapping[str, tuple[AliasTarget, ...]]
Progress = Callable[[int], None]
"""Told how many further bytes went through."""


@dataclass(frozen=True, slots=True, order=True)
class StoredVersion:
    """A published version; ``num_bytes`` of all its files."""

    name: AdapterName
    digest: str | None
    num_bytes: int


class AdapterStore(ABC):
    """A place that all replicas share. Authorisation is the caller's.

    All raise ``Unavailable`` when the store cannot be reached and ``Forbidden`` when it refuses
    the credentials it was given.
    """

    @property
    @abstractmethod
    def location(self) -> str:
        """Where it is, for people: no secret in it."""

    @abstractmethod
    async def publish(
        self,
        name: AdapterName,
        folder: Path,
        manifest: Manifest,
        progress: Progress | None = None,
        *,
        records: Mapping[str, bytes] | None = None,
    ) -> bool:
        """Put the manifest's files of a local folder under a name.

        ``records`` are small files of ours that stand beside them (``_upload.json``), there
        before the version is. Gives False where the same content is there already, whose records
        then stay as they are. Raises ``Conflict`` for other content, a deleted version or the
        name of an alias (``latest`` always is one), ``UnusableAdapter`` where the folder is not
        what the manifest states. A break leaves nothing visible.
        """

    @abstractmethod
    async def manifest(self, name: AdapterName) -> Manifest | None:
        """The manifest of an exact version, or None where it is not published."""

    @abstractmethod
    async def read_record(self, name: AdapterName, record: str) -> bytes | None:
        """A small file beside an exact version, such as ``_upload.json``; None where it is not."""

    @abstractmethod
    async def fetch(
        self, name: AdapterName, folder: Path, progress: Progress | None = None
    ) -> Manifest:
        """Bring an exact version into an empty local folder, verified; ``AdapterNotFound``.

        The manifest's files and nothing else; none of them is left where it fails.
        """

    @abstractmethod
    def open(
        self, name: AdapterName, file: FileEntry
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Read one file of an exact version's manifest, in pieces of at most some megabytes.

        Entering raises ``AdapterNotFound`` where the version is gone. The bytes are not hashed:
        they are as many as ``file`` says, or an error is raised on the way.
        """

    @abstractmethod
    async def delete(self, name: AdapterName) -> bool:
        """Leave a tombstone, then remove the files. False where it never was.

        True again for one that is deleted already. Raises ``Conflict`` while an alias points at
        it.
        """

    @abstractmethod
    async def tenants(self) -> tuple[str, ...]:
        """The tenants that have something here, in order."""

    @abstractmethod
    async def list(self, tenant: str) -> tuple[StoredVersion, ...]:
        """A tenant's published versions, in order; at most 10,000."""

    async def versions(self, tenant: str, adapter: str) -> tuple[str, ...]:
        """The names of an adapter's published versions; cheap enough to ask every few seconds."""
        listed = await self.list(tenant)
        return tuple(stored.name.version for stored in listed if stored.name.adapter == adapter)

    @abstractmethod
    async def aliases(self, tenant: str, adapter: str) -> Aliases:
        """The adapter's aliases."""

    @abstractmethod
    async def set_alias(
        self, tenant: str, adapter: str, alias: str, targets: Sequence[AliasTarget]
    ) -> Aliases:
        """Point an alias at versions, or remove it where there are none; gives what holds then.

        Raises ``AdapterNotFound`` for a version that is not published, ``Conflict`` for the name
        of a version, deleted or not, ``InvalidInput`` for targets that are none. Two writers at
        once both get their way or one ``Conflict``, never a loss.
        """

    async def close(self) -> None:
        """Let go of connections."""
        return
