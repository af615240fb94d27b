"""How a directory of adapters lies: ``ROOT/tenant/adapter/version/``, links contained.

``acme:v1`` is ``ROOT/acme/default/v1/``. An adapter's aliases are ``ROOT/acme/default/
_aliases.json``. Names that begin with ``_`` or ``.`` are no versions; a version that was deleted
holds a tombstone, and is absent.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mural_resolvers.errors import MalformedName, Unavailable, UnusableAdapter, quoted
from mural_resolvers.files import contained, is_folder, leads_nowhere, read_bounded
from mural_resolvers.names import LATEST, AdapterName, is_tenant, is_version
from mural_resolvers.store import ALIASES_FILE, MAX_LISTED, TOMBSTONE_FILE
from mural_resolvers.versions import MAX_ALIAS_FILE_BYTES, AliasTarget, parse_aliases

__all__ = [
    "DirectoryLayout",
    "ListedAdapter",
    "is_deleted",
    "read_aliases",
    "reading",
    "version_names",
]


@dataclass(frozen=True, slots=True, order=True)
class ListedAdapter:
    """A version that lies in the directory; nothing of it has been read."""

    name: AdapterName
    path: Path


class DirectoryLayout:
    """The folders below a root. Calls the file system: not for an event loop."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def check(self) -> None:
        """Raise ``Unavailable`` where the root is not there."""
        if not self.root.is_dir():
            raise Unavailable("The directory of adapters is not there.")

    def tenants(self) -> tuple[str, ...]:
        """The tenants that have a folder, in order."""
        with reading():
            return tuple(sorted(name for name in _folders(self.root) if is_tenant(name)))

    def tenant_folder(self, tenant: str) -> Path:
        """The tenant's real folder. A link there would make one tenant's files another's."""
        expected = Path(os.path.realpath(self.root)) / tenant
        if contained(self.root / tenant, self.root) != expected:
            raise UnusableAdapter(f"The folder of {tenant} is a link.")
        return expected

    def adapter_folder(self, name: AdapterName) -> Path | None:
        """The adapter's real folder, or None where there is none."""
        tenant_folder = self.tenant_folder(name.tenant)
        folder = contained(tenant_folder / name.adapter, tenant_folder)
        return folder if is_folder(folder) else None

    def find_all(self, tenant: str) -> tuple[ListedAdapter, ...]:
        """A tenant's versions in order of name, at most 10,000; raise ``MalformedName``.

        Adapters whose folder is a link out of the tenant's are left out.
        """
        if not is_tenant(tenant):
            raise MalformedName(f"{quoted(tenant)} is not a tenant name.")
        with reading():
            return self._find_all(tenant)

    def _find_all(self, tenant: str) -> tuple[ListedAdapter, ...]:
        found: set[ListedAdapter] = set()
        for adapter in _folders(self.tenant_folder(tenant)):
            if not is_tenant(adapter):
                continue
            name = AdapterName(tenant, adapter, LATEST)
            folder = Path(os.path.realpath(self.tenant_folder(tenant) / adapter))
            if not folder.is_relative_to(self.tenant_folder(tenant)):
                continue
            for version in version_names(folder):
                if is_deleted(folder / version):
                    continue
                found.add(ListedAdapter(name.at(version), self.root / tenant / adapter / version))
                if len(found) >= MAX_LISTED:
                    return tuple(sorted(found))
        return tuple(sorted(found))


@contextmanager
def reading() -> Iterator[None]:
    """Turn what the file system refuses into a source that is down."""
    try:
        yield
    except OSError as error:
        # strerror alone: the path is not the user's to know.
        raise Unavailable(f"The directory cannot be read: {error.strerror}.") from error


def version_names(folder: Path) -> set[str]:
    """The versions in an adapter's folder, deleted ones included: their names are taken."""
    return {name for name in _folders(folder) if is_version(name)}


def is_deleted(folder: Path) -> bool:
    """Whether a version's folder holds a tombstone."""
    return os.path.lexists(folder / TOMBSTONE_FILE)


def read_aliases(folder: Path) -> dict[str, tuple[AliasTarget, ...]]:
    """The aliases in an adapter's folder; raise ``UnusableAdapter`` for a record that is none."""
    path = folder / ALIASES_FILE
    if not os.path.lexists(path):
        return {}
    return parse_aliases(read_bounded(contained(path, folder), MAX_ALIAS_FILE_BYTES))


def _folders(folder: Path) -> Iterator[str]:
    """Names of the folders in a folder (links to folders too); none where it is absent."""
    try:
        with os.scandir(folder) as entries:
            yield from (entry.name for entry in entries if _is_folder(entry))
    except (FileNotFoundError, NotADirectoryError):
        return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError as error:
        # A link that leads nowhere is no folder, and must not hide the versions beside it.
        if leads_nowhere(error):
            return False
        raise
