"""``tenants.yaml`` on disk, and the keys that are in force: read at the start, then watched."""

from __future__ import annotations

from pathlib import Path

from mural_resolvers.conversion import in_file
from mural_resolvers.errors import InvalidInput
from mural_resolvers.files import read_settings
from mural_resolvers.tenants.config import MAX_FILE_BYTES, TenantsConfig, parse_tenants
from mural_resolvers.tenants.keys import KeyRing
from mural_resolvers.watched_file import WatchedFile

__all__ = ["TenantsFile", "read_tenants"]

_InForce = tuple[TenantsConfig, KeyRing]


def read_tenants(path: Path) -> TenantsConfig:
    """Read a file; raise ``InvalidInput`` naming the place that is wrong."""
    with in_file(path):
        try:
            data = read_settings(path, MAX_FILE_BYTES + 1)
        except OSError as error:
            raise InvalidInput(f"The tenants file cannot be read: {error.strerror}.") from None
        return parse_tenants(data)


class TenantsFile(WatchedFile[_InForce]):
    """Keeps the keys of a file in force."""

    def __init__(self, path: Path) -> None:
        """Read the file; raise ``InvalidInput`` when it is absent or wrong."""
        super().__init__(path, _parse, what="tenants file", max_bytes=MAX_FILE_BYTES, shown=_shown)

    @property
    def config(self) -> TenantsConfig:
        """What is in force."""
        return self.value[0]

    @property
    def ring(self) -> KeyRing:
        """Its keys; another ring with each change."""
        return self.value[1]


def _parse(data: bytes) -> _InForce:
    config = parse_tenants(data)
    return config, config.ring()


def _shown(value: _InForce) -> str:
    config, ring = value
    return f"{len(config.tenants)} tenants, {len(ring)} keys"
