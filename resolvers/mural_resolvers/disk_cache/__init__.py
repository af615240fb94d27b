"""The disk cache: content-addressed versions that the processes of a node share.

Blobs are files by their sha256; a version is a folder of hard links to them; a name is a small
record that pins a version's digest. Everything is a plain file, and every lock is the kernel's, so
that whatever a process leaves when it dies is either whole or swept.
"""

from mural_resolvers.disk_cache.cache import DiskCache
from mural_resolvers.disk_cache.interface import (
    CachedVersion,
    CacheFull,
    CacheSettings,
    CacheUsage,
    NotCached,
    SweepReport,
)
from mural_resolvers.disk_cache.lease import Lease
from mural_resolvers.disk_cache.staging import Staging

__all__ = [
    "CacheFull",
    "CacheSettings",
    "CacheUsage",
    "CachedVersion",
    "DiskCache",
    "Lease",
    "NotCached",
    "Staging",
    "SweepReport",
]
