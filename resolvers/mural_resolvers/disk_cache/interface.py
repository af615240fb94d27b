"""What the cache is told and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mural_resolvers.errors import InvalidInput, Unavailable
from mural_resolvers.manifest import Manifest
from mural_resolvers.names import AdapterName

__all__ = [
    "CacheFull",
    "CacheSettings",
    "CacheUsage",
    "CachedVersion",
    "NotCached",
    "SweepReport",
]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Bounds on the cache; raises ``InvalidInput`` for one that cannot mean anything.

    ``quota_bytes`` bounds the adapters' files, each content counted once. ``min_free_bytes`` stay
    free on the disk. ``max_versions`` bounds the inodes, ``max_names`` the names that are known,
    those of evicted versions included. ``verify_on_lease`` hashes a version each time that it is
    leased, which costs its load a read of every byte. A cache that other processes change is
    waited for ``lock_timeout_s`` at most.
    """

    quota_bytes: int = 10 << 30
    verify_on_lease: bool = False
    min_free_bytes: int = 256 << 20
    max_versions: int = 50_000
    max_names: int = 100_000
    lock_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if self.quota_bytes <= 0 or self.max_versions <= 0 or self.max_names <= 0:
            raise InvalidInput("The cache's quota and its numbers of versions and names are > 0.")
        if self.min_free_bytes < 0 or self.lock_timeout_s <= 0:
            raise InvalidInput("The cache's free bytes are >= 0, its lock's timeout is > 0.")


@dataclass(frozen=True, slots=True)
class CachedVersion:
    """A name whose content is in the cache: the folder, what lies in it, where it came from.

    The folder stays in its place only under a lease.
    """

    name: AdapterName
    path: Path
    manifest: Manifest
    source: str
    revision: str


@dataclass(frozen=True, slots=True)
class CacheUsage:
    """What the cache holds.

    ``bytes`` counts each content once. ``by_tenant`` (bytes) counts a version whole, at the
    expense of the tenant that staged it, so that its sum may be more.
    """

    bytes: int
    quota: int
    versions: int
    by_tenant: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What is there after a start, and what was removed because its process did not finish it.

    ``strays`` are entries that the cache would never have made; ``read_only`` says that nothing
    could be swept.
    """

    versions: int
    bytes: int
    unfinished: int = 0
    broken_versions: int = 0
    orphaned_blobs: int = 0
    strays: int = 0
    read_only: bool = False


class NotCached(Unavailable):
    """The content has left the cache, or was never in it: have it fetched again."""

    def __init__(self, message: str = "The adapter's files have left the cache.") -> None:
        super().__init__(message)


class CacheFull(Unavailable):
    """There is no room: all that could go is leased."""

    def __init__(self) -> None:
        super().__init__("The cache of adapters is full of what is in use.", retry_after_s=5.0)
