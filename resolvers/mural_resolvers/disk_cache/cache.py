"""The disk cache: find, stage, lease, verify."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from mural_resolvers.disk_cache.content import Content
from mural_resolvers.disk_cache.interface import (
    CachedVersion,
    CacheSettings,
    CacheUsage,
    NotCached,
    SweepReport,
)
from mural_resolvers.disk_cache.layout import (
    Layout,
    disk_faults,
)
from mural_resolvers.disk_cache.lease import Lease
from mural_resolvers.disk_cache.ledger import Ledger, Stamps
from mural_resolvers.disk_cache.locks import FileLock, Mutex
from mural_resolvers.disk_cache.name_records import NameRecords
from mural_resolvers.disk_cache.probe import probe
from mural_resolvers.disk_cache.records import (
    NameRecord,
    Reservation,
    Usage,
    VersionRecord,
)
from mural_resolvers.disk_cache.room import make_room, trim_to_quota
from mural_resolvers.disk_cache.rot import drop_rotten, rotten_files
from mural_resolvers.disk_cache.staging import Staged, Staging, reserve
from mural_resolvers.disk_cache.sweep import Findings, sweep
from mural_resolvers.errors import TooLarge
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import AdapterName

__all__ = ["DiskCache"]

logger = logging.getLogger("mural.cache")

# An eviction that looks whether a version is leased locks it for some microseconds.
_LEASE_TRIES = 20
_LEASE_WAIT_S = 0.002


class DiskCache:
    """Versions of adapters on this machine's disk, within a quota. Thread-safe, but blocking.

    Several processes may share a folder, with the same quota. ``find``, ``content`` and ``lease``
    cost the same whatever the cache holds, wait for no one, and go on when the disk has become
    read-only; all else then raises ``Unavailable``, as it does when the disk is full or fails.
    """

    def __init__(
        self,
        root: Path,
        settings: CacheSettings | None = None,
        limits: AdapterLimits = DEFAULT_LIMITS,
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._settings = settings = settings or CacheSettings()
        self._limits = limits
        self._layout = Layout(root)
        self._content = Content(self._layout, limits)
        self._names = NameRecords(self._layout)
        self._stamps = Stamps(now_ns)
        mutex = Mutex(self._layout.mutex, settings.lock_timeout_s)
        self._ledger = Ledger(self._layout, self._content, mutex, self._stamps)
        self._read_only = False
        self._handed_out: weakref.WeakSet[Staging | Lease] = weakref.WeakSet()

    def open(self) -> SweepReport:
        """Make the folder, remove what crashed processes left in it, hold it to the quota.

        What a living process stages is left alone. Raises ``InvalidInput`` when the folder cannot
        be a cache, ``Unavailable`` when the disk fails. Looks at every version.
        """
        with disk_faults():
            self._read_only = not self._layout.create()
            if self._read_only:
                logger.warning("the cache of adapters is read-only: nothing can be added to it")
                return _report(sweep(self._layout, self._content, repair=False), read_only=True)
            probe(self._layout)
        with self._ledger.opening() as findings:
            trim_to_quota(self._layout, self._content, findings.usage, self._settings)
        return _report(findings)

    # -- looking -----------------------------------------------------------------------------------

    def find(self, name: AdapterName) -> CachedVersion | None:
        """What is cached under an exact name; None where its content has been evicted too."""
        with disk_faults():
            record = self._names.read(name)
            manifest = None if record is None else self._content.manifest(record.digest)
        if record is None or manifest is None:
            return None
        return self._cached(name, manifest, record)

    def content(self, digest: str) -> Manifest | None:
        """The manifest of cached content, whatever names it has."""
        with disk_faults():
            return self._content.manifest(digest)

    def lease(self, digest: str) -> Lease:
        """Keep a version in its place; it becomes the most recently used. Raises ``NotCached``."""
        with disk_faults():
            lock = self._lease_lock(digest)
            if self._content.manifest(digest) is None:
                lock.release()
                raise NotCached
            self._touch(lock)
        lease = Lease(digest, self._layout.version(digest), lock)
        if self._settings.verify_on_lease and not self.verify(digest):
            lease.release()
            raise NotCached("The adapter's files had rotted on the disk.")
        self._handed_out.add(lease)
        return lease

    def _lease_lock(self, digest: str) -> FileLock:
        path = self._layout.lock(digest)
        for _ in range(_LEASE_TRIES):
            if not self._content.has(digest):
                raise NotCached
            try:
                lock = FileLock.try_acquire(path, shared=True)
            except FileNotFoundError:
                self._mend(path)
                continue
            if lock is None:
                time.sleep(_LEASE_WAIT_S)
            elif lock.is_at(path):
                return lock
        raise NotCached

    def _mend(self, path: Path) -> None:
        """Sweep where a version's lock file is gone: an eviction has the version gone before."""
        with self._ledger.changing() as usage:
            if not path.exists():
                usage.become(self._ledger.sweep().usage)

    def _touch(self, lock: FileLock) -> None:
        stamp_ns = self._stamps.next()
        try:
            os.utime(lock.descriptor, ns=(stamp_ns, stamp_ns))
        except OSError as error:
            # Another user's, or read-only: the order of eviction is then coarser, no more.
            logger.debug("a lease's stamp could not be written: %s", error.strerror)

    # -- adding ------------------------------------------------------------------------------------

    def stage(self, num_bytes: int, tenant: str) -> Staging:
        """Reserve room for a version of so many bytes, at a tenant's expense.

        Evicts what is not leased. Raises ``TooLarge`` above the whole quota, ``Unavailable`` when
        no room can be made.
        """
        if num_bytes > self._settings.quota_bytes:
            raise TooLarge(
                f"The adapter has {num_bytes} bytes; the whole cache has "
                f"{self._settings.quota_bytes}."
            )
        asked = Reservation(tenant, num_bytes)
        with self._ledger.changing() as usage:
            make_room(self._layout, self._content, usage, self._settings, asked)
            # In here, so that a full disk ends this in good order.
            with disk_faults():
                staging = reserve(self._layout, asked, self._install)
        self._handed_out.add(staging)
        return staging

    def _install(self, staged: Staged) -> CachedVersion:
        name, manifest, tenant = staged.name, staged.manifest, staged.tenant
        record = _record(name, manifest.digest, staged.source, staged.revision, tenant)
        with self._ledger.changing() as usage:
            self._names.check(name, manifest.digest)
            if self._content.manifest(manifest.digest) is None:
                if self._content.has(manifest.digest):
                    # A broken one, which goes in a sweep as at a start.
                    usage.become(self._ledger.sweep().usage)
                stamp_ns = self._stamps.next()
                usage.bytes += self._content.install(staged.folder, manifest, tenant, stamp_ns)
                usage.add(VersionRecord(tenant, manifest.num_bytes))
            # From here its bytes are counted as used, no longer as reserved.
            staged.reservation.unlink()
            # Its fsync is the last. Who loses power may lose the version, and not a part of it.
            self._note(usage, name, record)
        return self._cached(name, manifest, record)

    def link(
        self, name: AdapterName, digest: str, *, source: str, revision: str, tenant: str
    ) -> CachedVersion | None:
        """Note a name for cached content; None where the content is not (or no longer) there.

        Raises ``Conflict`` when the name has had other content.
        """
        with self._ledger.changing() as usage:
            manifest = self._content.manifest(digest)
            if manifest is None:
                return None
            self._names.check(name, digest)
            record = _record(name, digest, source, revision, tenant)
            self._note(usage, name, record)
        return self._cached(name, manifest, record)

    def forget(self, name: AdapterName) -> None:
        """Drop a name, and with it that it had content; the content goes when its turn comes."""
        with disk_faults():
            if not os.path.lexists(self._layout.name(name)):
                return
        with self._ledger.changing() as usage:
            usage.names -= self._names.remove(name)

    def _note(self, usage: Usage, name: AdapterName, record: NameRecord) -> None:
        usage.names += self._names.write(name, record)
        if usage.names > self._settings.max_names:
            usage.names -= self._names.trim(self._content, self._settings.max_names)

    # -- checking ----------------------------------------------------------------------------------

    def verify(self, digest: str) -> bool:
        """Hash a version again; whether it is whole. False also where it is not cached.

        A file that has rotted is dropped, with every version that has it, leased or not: files
        that are open stay readable. Reads every byte.
        """
        with disk_faults():
            manifest = self._content.manifest(digest)
            if manifest is None:
                return False
            try:
                lock = self._lease_lock(digest)
            except NotCached:
                return False
            try:
                rotten = rotten_files(self._layout.version(digest), manifest)
            finally:
                lock.release()
        if not rotten:
            return True
        logger.warning("a cached version has rotted and is dropped: %s", digest)
        with self._ledger.changing() as usage:
            drop_rotten(self._layout, self._content, digest, rotten)
            usage.become(self._ledger.sweep().usage)
        return False

    def usage(self) -> CacheUsage:
        """What the cache holds; looks at every version only where that has not been noted."""
        usage = self._usage()
        return CacheUsage(
            usage.bytes, self._settings.quota_bytes, usage.versions, dict(usage.by_tenant)
        )

    def _usage(self) -> Usage:
        with disk_faults():
            noted = self._ledger.read()
            if noted is None and self._read_only:
                return sweep(self._layout, self._content, repair=False).usage
        if noted is None:
            with self._ledger.changing() as usage:
                return usage
        return noted

    def check_integrity(self, deep: bool = False) -> None:
        """Raise ``AssertionError`` where the folder is not what it should be; ``deep`` hashes.

        Needs a disk that can be written to.
        """
        with self._ledger.changing() as noted:
            findings = sweep(self._layout, self._content, repair=False)
            # What a dead process left waits for the next who stages.
            faults = {kind: n for kind, n in findings.faults.items() if kind != "unfinished"}
            assert not faults, f"the cache has {faults}"
            assert noted == findings.usage, f"{noted} is noted, {findings.usage} is there"
            if deep:
                for digest in os.listdir(self._layout.versions):
                    manifest = self._content.manifest(digest)
                    assert manifest is not None
                    assert not rotten_files(self._layout.version(digest), manifest)

    def close(self) -> None:
        """Discard what this object staged and release what it leased."""
        for handed_out in list(self._handed_out):
            if isinstance(handed_out, Staging):
                handed_out.discard()
            else:
                handed_out.release()

    def _cached(self, name: AdapterName, manifest: Manifest, record: NameRecord) -> CachedVersion:
        path = self._layout.version(manifest.digest)
        return CachedVersion(name, path, manifest, record.source, record.revision)


def _record(name: AdapterName, digest: str, source: str, revision: str, tenant: str) -> NameRecord:
    return NameRecord(
        name=name.exact, digest=digest, source=source, revision=revision, tenant=tenant
    )


def _report(findings: Findings, *, read_only: bool = False) -> SweepReport:
    faults = findings.faults
    return SweepReport(
        versions=findings.usage.versions,
        bytes=findings.usage.bytes,
        unfinished=faults["unfinished"],
        broken_versions=faults["broken version"],
        orphaned_blobs=faults["orphaned blob"],
        strays=faults["stray"],
        read_only=read_only,
    )
