"""The store of uploads of one server: where they are published, found, and judged before."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mural_resolvers.errors import MuralError
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import LATEST, AdapterName
from mural_resolvers.open_store import open_store
from mural_resolvers.registry import LoRAResolverRegistry
from mural_resolvers.request import LoRARequest
from mural_resolvers.resolver import LoRAResolver
from mural_resolvers.sources import build_resolvers, parse_source
from mural_resolvers.store import AdapterStore
from mural_resolvers.uploads import Quarantine, Uploads, UploadSettings, UploadsResolver
from mural_server.catalog import AdapterCatalog
from mural_server.engine.client import EngineClient
from mural_server.settings import ServerSettings, SettingsError

__all__ = ["UploadSource", "open_upload_source"]


@dataclass(frozen=True, slots=True)
class UploadSource:
    """The store, as a place to publish in and as a source of adapters."""

    store: AdapterStore
    resolver: LoRAResolver
    quarantine: Quarantine

    def uploads(
        self,
        settings: ServerSettings,
        client: EngineClient,
        registry: LoRAResolverRegistry,
        catalog: AdapterCatalog,
    ) -> Uploads:
        """What takes uploads in, for a server with these parts."""
        return Uploads(
            self.store,
            self.quarantine,
            _Judge(client),
            _Observer(registry, catalog),
            UploadSettings(
                ttl_s=settings.upload_ttl_s or None,
                max_bytes=settings.upload_max_bytes,
                max_adapters=settings.upload_quota_adapters,
                max_tenant_bytes=settings.upload_quota_bytes,
            ),
        )


def open_upload_source(settings: ServerSettings, limits: AdapterLimits) -> UploadSource | None:
    """Open the store that ``--upload-store`` names, if it does; raise `SettingsError`."""
    location = settings.upload_store
    if location is None:
        return None
    quarantine = Quarantine(Path(settings.upload_dir or _own_folder()), limits)
    try:
        quarantine.open()
    except MuralError as error:
        raise SettingsError(f"--upload-dir: {error.message}") from None
    try:
        [inner] = build_resolvers([parse_source(location)], limits)
        store = open_store(location, limits)
    except MuralError as error:
        raise SettingsError(f"--upload-store: {error.message}") from None
    return UploadSource(store, UploadsResolver(inner, store), quarantine)


def _own_folder() -> str:
    return os.path.join(tempfile.gettempdir(), f"mural-uploads-{os.geteuid()}")


@dataclass(frozen=True, slots=True)
class _Judge:
    """The core's judgement, which has the base's weights to compare copies with."""

    client: EngineClient

    async def __call__(self, name: AdapterName, folder: Path, manifest: Manifest) -> None:
        # The id is nobody's: nothing is kept under it.
        lora = LoRARequest(name.short, 1, str(folder), manifest.digest)
        await self.client.check_lora(lora)


@dataclass(frozen=True, slots=True)
class _Observer:
    registry: LoRAResolverRegistry
    catalog: AdapterCatalog

    def published(self, name: AdapterName) -> None:
        for asked in (name, name.at(LATEST)):
            self.registry.forget(asked)

    def removed(self, name: AdapterName) -> None:
        self.catalog.admin.drop(name)
