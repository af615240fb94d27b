"""The interface of a source of adapters: what it describes, and how its bytes are read.

A source is a ``LoRAResolver``: an object store, a hub, a directory. It describes a version, and
whoever asked it (the registry) brings the content onto this machine through the disk cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.digest import FileEntry, compute_digest
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.tenants import Principal

__all__ = ["AdapterDescription", "LoRAResolver", "ResolvedAdapter", "SourceFile"]


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as its source describes it; ``path`` is one of the names that the engine reads.

    ``size`` in bytes. ``sha256`` (hex) is None where the source does not know it. ``tag`` is the
    source's own mark of this very content (an ETag, a version id), for reading it again.
    """

    path: str
    size: int
    sha256: str | None = None
    tag: str | None = None


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """What a source says of a version, before a byte of its weights has been read.

    ``name`` is exact, never an alias. ``revision`` is the source's word for this content: as long
    as it stays the same, so do the bytes. A source whose content lies on this machine already
    gives the ``folder``, and the ``manifest`` that it has verified; nothing is downloaded then.

    Where an alias was asked for, ``alias_ttl_s`` is for how many seconds it may be taken to mean
    this version without asking again: 0 where the source remembers that itself, or draws anew.
    """

    name: AdapterName
    revision: str
    files: tuple[SourceFile, ...]
    manifest: Manifest | None = None
    folder: Path | None = None
    alias_ttl_s: float = 0.0

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def digest(self) -> str | None:
        """The version's digest, or None where the source does not know every file's sha256."""
        entries = [
            FileEntry(file.path, file.size, file.sha256)
            for file in self.files
            if file.sha256 is not None
        ]
        return compute_digest(entries) if len(entries) == len(self.files) else None

    @classmethod
    def of_folder(cls, name: AdapterName, folder: Path, manifest: Manifest) -> AdapterDescription:
        """Describe verified content that lies on this machine."""
        files = tuple(SourceFile(file.path, file.size, file.sha256) for file in manifest.files)
        return cls(name, manifest.digest, files, manifest, folder)


@dataclass(frozen=True, slots=True)
class ResolvedAdapter:
    """Content that is on this machine: the exact name, the folder, what lies in it.

    ``source`` is the resolver's ``name``; ``cached`` says that it lies in the disk cache, where
    it stays only under a lease. ``alias_ttl_s`` is the description's.
    """

    name: AdapterName
    path: Path
    manifest: Manifest
    source: str
    cached: bool = False
    alias_ttl_s: float = 0.0


class LoRAResolver(ABC):
    """A source of adapters.

    Raised errors tell what becomes of the look-up. ``Unavailable``: the source cannot tell, so the
    next one is asked, and what is cached goes on being served. Any other ``MuralError``: the
    source refuses (``Forbidden``) or the content is unusable, and the look-up ends.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The source's name, for logs and answers; unique in a registry."""

    @property
    def downloads(self) -> bool:
        """Whether content has to be read from it, and so needs the disk cache."""
        return type(self).open is not LoRAResolver.open

    @abstractmethod
    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        """Describe the version that the name means, or give None for what is not here.

        The principal may use the name; the source may refuse it all the same. An alias is
        resolved to its version. Cancelled at the registry's timeout.
        """

    def open(
        self, adapter: AdapterDescription, file: SourceFile, start: int, stop: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        """Read the bytes ``[start, stop)`` of a file of a description, in pieces of any size.

        The bytes are those that the description means: a source that finds others raises
        ``Conflict``. ``Unavailable`` may be tried again, from where it broke off.
        """
        raise NotImplementedError(f"{self.name} has no content to read")

    async def close(self) -> None:
        """Let go of connections and threads; nothing is asked of the source afterwards."""
        return
