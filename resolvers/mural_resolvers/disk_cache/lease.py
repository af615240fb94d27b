"""A lease: a version's folder stays where it is as long as anybody holds one."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from mural_resolvers.disk_cache.locks import FileLock

__all__ = ["Lease"]


class Lease:
    """Keeps a version from eviction until ``release``, or until the process dies."""

    def __init__(self, digest: str, path: Path, lock: FileLock) -> None:
        self.digest = digest
        self.path = path
        self._lock = lock

    def release(self) -> None:
        """Let go; idempotent."""
        self._lock.release()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
