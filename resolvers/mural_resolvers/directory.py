"""The resolver of adapters in a local directory (``directory_layout`` says how they lie)."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.digest import engine_files
from mural_resolvers.directory_layout import (
    DirectoryLayout,
    ListedAdapter,
    is_deleted,
    read_aliases,
    reading,
    version_names,
)
from mural_resolvers.errors import (
    AdapterNotFound,
    Conflict,
    UnusableAdapter,
    quoted,
)
from mural_resolvers.files import contained, leads_nowhere
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.manifest import (
    MANIFEST_FILE,
    Manifest,
    checked_manifest,
)
from mural_resolvers.names import LATEST, AdapterName
from mural_resolvers.resolver import AdapterDescription, LoRAResolver
from mural_resolvers.tenants import Principal
from mural_resolvers.versions import (
    AliasTarget,
    pick_target,
    version_key,
)

__all__ = ["DirectoryResolver"]

_MAX_REMEMBERED = 16_384
_LOOK_UP_THREADS = 4
_HASHING_THREADS = 2
# A file written again within its clock's tick keeps its times: young files are hashed anew.
_SETTLED_NS = 2_000_000_000

K = TypeVar("K")
V = TypeVar("V")


class DirectoryResolver(LoRAResolver):
    """The resolver of a local directory. Reads and hashes in threads of its own.

    A version is immutable: content that differs from what a name was first answered with is
    ``Conflict``. ``draw`` gives a number from [0, 1) for each pick among an alias's versions.
    """

    def __init__(
        self,
        root: Path,
        limits: AdapterLimits = DEFAULT_LIMITS,
        *,
        name: str = "directory",
        draw: Callable[[], float] = random.random,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._layout = DirectoryLayout(root)
        self._limits = limits
        self._draw = draw
        self._name = name
        self._now_ns = now_ns
        self._manifests: _Remembered[tuple[_Stamp, ...], Manifest] = _Remembered()
        self._first_digests: _Remembered[AdapterName, str] = _Remembered()
        # Apart, so that a look-up of what is known waits for nobody's cold files.
        self._look_ups = ThreadPoolExecutor(_LOOK_UP_THREADS, thread_name_prefix="adapter-dir")
        self._hashing = ThreadPoolExecutor(_HASHING_THREADS, thread_name_prefix="adapter-hash")

    @property
    def name(self) -> str:
        """``directory``, unless it was given another."""
        return self._name

    async def resolve(
        self, principal: Principal, name: AdapterName, base: BaseSpec
    ) -> AdapterDescription | None:
        """Find a version's folder; hash it unless it is unchanged since the last time.

        Raises ``UnusableAdapter`` or ``TooLarge`` for what lies there, ``Conflict`` for other
        content under a known name, ``Unavailable`` when the directory cannot be read.
        """
        loop = asyncio.get_running_loop()
        located = await loop.run_in_executor(self._look_ups, self._locate, name)
        if located is None:
            return None
        manifest = located.known
        if manifest is None:
            manifest = await loop.run_in_executor(self._hashing, self._read, located)
        return self._answer(located, manifest)

    async def list(self, tenant: str) -> tuple[ListedAdapter, ...]:
        """The versions in a tenant's folder, in order of name; at most 10,000."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._look_ups, self.find_all, tenant)

    async def close(self) -> None:
        """Stop the threads; a file that is being hashed is not waited for."""
        self._look_ups.shutdown(wait=False, cancel_futures=True)
        self._hashing.shutdown(wait=False, cancel_futures=True)

    def find(self, name: AdapterName) -> AdapterDescription | None:
        """``resolve`` without an event loop. Reads every byte of a version not yet known."""
        located = self._locate(name)
        if located is None:
            return None
        return self._answer(located, located.known or self._read(located))

    def _locate(self, name: AdapterName) -> _Located | None:
        """Find the folder and what is known of it; reads no weights."""
        with reading():
            self._layout.check()
            folder = self._layout.adapter_folder(name)
            version = None if folder is None else self._exact_version(folder, name.version)
            if folder is None or version is None:
                return None
            path = contained(folder / version, self._layout.tenant_folder(name.tenant))
            stamps = self._stamps(path)
            return _Located(name.at(version), path, stamps, self._manifests.get(stamps))

    def _read(self, located: _Located) -> Manifest:
        """Hash the files, hold them to the manifest beside them, remember the result."""
        with reading():
            manifest = checked_manifest(located.path, self._limits)
            youngest = max(stamp.changed_ns for stamp in located.stamps)
            settled = self._now_ns() - youngest > _SETTLED_NS
            if settled and located.stamps == self._stamps(located.path):
                self._manifests.put(located.stamps, manifest)
            return manifest

    def _answer(self, located: _Located, manifest: Manifest) -> AdapterDescription:
        first = self._first_digests.setdefault(located.name, manifest.digest)
        if first != manifest.digest:
            raise Conflict(
                f"The content of {located.name} changed; a version is immutable: "
                "use another version."
            )
        return AdapterDescription.of_folder(located.name, located.path, manifest)

    def _stamps(self, folder: Path) -> tuple[_Stamp, ...]:
        names = (*engine_files(folder, self._limits), MANIFEST_FILE)
        return tuple(_stamp(folder / name) for name in names)

    def find_all(self, tenant: str) -> tuple[ListedAdapter, ...]:
        """``list`` without an event loop; raises ``MalformedName`` for a wrong tenant."""
        return self._layout.find_all(tenant)

    def tenants(self) -> tuple[str, ...]:
        """The tenants that have a folder, in order."""
        return self._layout.tenants()

    def _exact_version(self, folder: Path, asked: str) -> str | None:
        """Resolve an alias; None for what is neither a version nor an alias."""
        targets = read_aliases(folder).get(asked)
        versions = version_names(folder)
        if asked in versions and (targets or asked == LATEST):
            raise Conflict(f"{quoted(asked)} is both an alias and a version.")
        if asked in versions:
            return None if is_deleted(folder / asked) else asked
        if targets:
            return self._pick(versions, asked, targets)
        if asked != LATEST:
            return None
        descending = sorted(versions, key=version_key, reverse=True)
        return next((name for name in descending if not is_deleted(folder / name)), None)

    def _pick(self, versions: set[str], alias: str, targets: tuple[AliasTarget, ...]) -> str:
        version = pick_target(targets, self._draw())
        if version not in versions:
            raise AdapterNotFound(
                f"The alias {quoted(alias)} names the version {quoted(version)}, which is absent."
            )
        return version


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What changes when a file does; all zero for an absent one."""

    path: Path
    device: int = 0
    inode: int = 0
    size: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0

    @property
    def changed_ns(self) -> int:
        return max(self.mtime_ns, self.ctime_ns)


@dataclass(frozen=True, slots=True)
class _Located:
    """A version's folder and its files' stamps; ``known`` is the manifest that they had."""

    name: AdapterName
    path: Path
    stamps: tuple[_Stamp, ...]
    known: Manifest | None


def _stamp(path: Path) -> _Stamp:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return _Stamp(path)
    except OSError as error:
        if leads_nowhere(error):
            raise UnusableAdapter(
                f"{quoted(path.name)} cannot be read: {error.strerror}."
            ) from None
        raise
    return _Stamp(path, stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class _Remembered(Generic[K, V]):
    """A bounded map for several threads that drops the least recently used."""

    def __init__(self, max_entries: int = _MAX_REMEMBERED) -> None:
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._max_entries = max_entries
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            self._trim(key)

    def setdefault(self, key: K, value: V) -> V:
        """Give what the key first had."""
        with self._lock:
            first = self._entries.setdefault(key, value)
            self._trim(key)
            return first

    def _trim(self, used: K) -> None:
        self._entries.move_to_end(used)
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)
