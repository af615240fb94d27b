"""How adapters lie under a prefix of a bucket, and reading what lies there.

``PREFIX/tenant/adapter/version/`` holds the files and, last of all, ``manifest.json``; an adapter's
aliases are ``PREFIX/tenant/adapter/_aliases.json``. A folder without a manifest was put there by
other tools, or its upload has not ended: its weights come last, so with them it is whole.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from mural_resolvers.digest import (
    BIN_WEIGHTS_FILE,
    CONFIG_FILE,
    ENGINE_FILES,
    TEMPLATE_FILE,
    WEIGHTS_FILE,
)
from mural_resolvers.errors import UnusableAdapter
from mural_resolvers.limits import AdapterLimits
from mural_resolvers.manifest import MANIFEST_FILE, Manifest
from mural_resolvers.names import AdapterName, is_tenant, is_version
from mural_resolvers.resolver import AdapterDescription, SourceFile
from mural_resolvers.s3.client import ObjectStat, S3Client
from mural_resolvers.s3.settings import S3Settings
from mural_resolvers.store import ALIASES_FILE, MAX_LISTED, MAX_RECORD_BYTES, TOMBSTONE_FILE
from mural_resolvers.versions import MAX_ALIAS_FILE_BYTES, AliasTarget, parse_aliases

__all__ = ["UPLOAD_ORDER", "AliasRecord", "Found", "S3Layout"]

# The weights last: a folder that has them has all the rest.
UPLOAD_ORDER = (CONFIG_FILE, TEMPLATE_FILE, BIN_WEIGHTS_FILE, WEIGHTS_FILE)
_MAX_KEYS_IN_VERSION = 1000
_MAX_KEYS = 12 * MAX_LISTED


@dataclass(frozen=True, slots=True)
class AliasRecord:
    """An adapter's aliases and the ETag of their record; None where there is no record."""

    aliases: dict[str, tuple[AliasTarget, ...]] = field(default_factory=dict)
    etag: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What a listing says of a version's folder: its objects by their names in it."""

    name: AdapterName
    objects: dict[str, ObjectStat]

    @property
    def deleted(self) -> bool:
        """Whether it has a tombstone."""
        return TOMBSTONE_FILE in self.objects

    @property
    def published(self) -> bool:
        """Whether it has a manifest and no tombstone."""
        return MANIFEST_FILE in self.objects and not self.deleted

    @property
    def whole(self) -> bool:
        """Whether it has what an adapter needs and no tombstone, with or without a manifest."""
        weights = {WEIGHTS_FILE, BIN_WEIGHTS_FILE} & self.objects.keys()
        return CONFIG_FILE in self.objects and bool(weights) and not self.deleted

    @property
    def num_bytes(self) -> int:
        """The size of the files that the engine reads."""
        read = [name for name in ENGINE_FILES if name in self.objects]
        if WEIGHTS_FILE in read and BIN_WEIGHTS_FILE in read:
            read.remove(BIN_WEIGHTS_FILE)
        return sum(self.objects[name].size for name in read)


class S3Layout:
    """The keys below a prefix. Raises what the client raises."""

    def __init__(self, client: S3Client, settings: S3Settings, limits: AdapterLimits) -> None:
        self._client = client
        self._limits = limits
        self._accept_unpublished = settings.accept_unpublished
        self.root = f"{settings.prefix}/" if settings.prefix else ""

    def adapter(self, tenant: str, adapter: str) -> str:
        """The prefix of an adapter's keys."""
        return f"{self.root}{tenant}/{adapter}/"

    def folder(self, name: AdapterName) -> str:
        """The prefix of a version's keys."""
        return f"{self.adapter(name.tenant, name.adapter)}{name.version}/"

    def key(self, name: AdapterName, file: str) -> str:
        """The key of a version's file or record."""
        return self.folder(name) + file

    async def aliases(self, tenant: str, adapter: str) -> AliasRecord:
        """The adapter's aliases; raises ``UnusableAdapter`` for a record that is none."""
        key = self.adapter(tenant, adapter) + ALIASES_FILE
        found = await self._client.read(key, MAX_ALIAS_FILE_BYTES)
        return (
            AliasRecord() if found is None else AliasRecord(parse_aliases(found.data), found.etag)
        )

    async def is_deleted(self, name: AdapterName) -> bool:
        """Whether the version has a tombstone."""
        key = self.key(name, TOMBSTONE_FILE)
        return await self._client.read(key, MAX_RECORD_BYTES) is not None

    async def stated(self, name: AdapterName) -> Manifest | None:
        """The manifest in a version's folder, whether or not it is deleted."""
        key = self.key(name, MANIFEST_FILE)
        found = await self._client.read(key, self._limits.max_manifest_bytes)
        return None if found is None else Manifest.from_json(found.data)

    async def manifest(self, name: AdapterName) -> Manifest | None:
        """The manifest of a published version."""
        manifest, deleted = await asyncio.gather(self.stated(name), self.is_deleted(name))
        return None if deleted else manifest

    async def describe(self, name: AdapterName) -> AdapterDescription | None:
        """Describe an exact version, or a folder without a manifest where those are accepted."""
        manifest, deleted = await asyncio.gather(self.stated(name), self.is_deleted(name))
        if deleted:
            return None
        if manifest is not None:
            files = tuple(SourceFile(file.path, file.size, file.sha256) for file in manifest.files)
            return AdapterDescription(name, manifest.digest, files, manifest)
        return await self._describe_unpublished(name) if self._accept_unpublished else None

    async def versions(self, tenant: str, adapter: str) -> list[Found]:
        """All versions of an adapter that can be served."""
        return await self._found(tenant, self.adapter(tenant, adapter))

    async def listed(self, tenant: str) -> list[Found]:
        """All versions of a tenant that can be served; at most 10,000."""
        return (await self._found(tenant, f"{self.root}{tenant}/"))[:MAX_LISTED]

    async def keys(self, name: AdapterName) -> list[str]:
        """The names of what lies in a version's folder."""
        folder = self.folder(name)
        found = self._client.objects(folder, limit=_MAX_KEYS_IN_VERSION)
        return [stat.key[len(folder) :] async for stat in found]

    async def tenants(self) -> tuple[str, ...]:
        """The tenants below the prefix."""
        names = await self._client.folders(self.root, limit=_MAX_KEYS)
        return tuple(sorted(name for name in names if is_tenant(name)))

    async def is_readable(self, prefix: str) -> None:
        """Raise what the client raises where keys under a prefix may not be listed."""
        async for _ in self._client.objects(prefix, limit=1):
            return

    async def _describe_unpublished(self, name: AdapterName) -> AdapterDescription | None:
        stats = await asyncio.gather(
            *(self._client.stat(self.key(name, file)) for file in ENGINE_FILES)
        )
        found = {
            file: stat for file, stat in zip(ENGINE_FILES, stats, strict=True) if stat is not None
        }
        if CONFIG_FILE not in found or not {WEIGHTS_FILE, BIN_WEIGHTS_FILE} & found.keys():
            return None
        if WEIGHTS_FILE in found:
            found.pop(BIN_WEIGHTS_FILE, None)
        elif not self._limits.admit_bin:
            raise UnusableAdapter(
                f"The adapter has only {BIN_WEIGHTS_FILE}, a pickle, which is not admitted here; "
                f"save it as {WEIGHTS_FILE}."
            )
        files = tuple(SourceFile(file, stat.size, tag=stat.etag) for file, stat in found.items())
        return AdapterDescription(name, _revision(found), files)

    async def _found(self, tenant: str, prefix: str) -> list[Found]:
        folders: dict[AdapterName, dict[str, ObjectStat]] = {}
        count = 0
        async for stat in self._client.objects(prefix, limit=_MAX_KEYS):
            count += 1
            split = stat.key[len(self.root) :].split("/")
            if len(split) == 4 and is_tenant(split[1]) and is_version(split[2]):
                name = AdapterName(tenant, split[1], split[2])
                folders.setdefault(name, {})[split[3]] = stat
        if count >= _MAX_KEYS:
            raise UnusableAdapter(f"More than {_MAX_KEYS} objects lie there: too many to list.")
        return self._served(Found(name, objects) for name, objects in folders.items())

    def _served(self, found: Iterable[Found]) -> list[Found]:
        served = (
            version
            for version in found
            if version.published or (self._accept_unpublished and version.whole)
        )
        return sorted(served, key=lambda version: version.name)


def _revision(found: dict[str, ObjectStat]) -> str:
    """One word for the very objects that were found: another one makes another word.

    The version ids tell apart what has the same ETag, which may be an MD5.
    """
    lines = [
        f"{file} {stat.size} {stat.etag} {stat.version_id or ''}\n" for file, stat in found.items()
    ]
    return "etag-" + hashlib.sha256("".join(lines).encode()).hexdigest()
