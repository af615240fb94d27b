"""Which versions go when room is needed, and their going."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, replace

from mural_resolvers.disk_cache.content import Content
from mural_resolvers.disk_cache.layout import Layout, is_digest
from mural_resolvers.disk_cache.locks import FileLock
from mural_resolvers.disk_cache.records import Usage, VersionRecord, read_record

__all__ = ["Candidate", "Shortage", "evict", "eviction_order"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A version: at whose expense it is kept, its size in bytes, when it was last leased.

    ``charge`` (bytes) is what its tenant's share is charged for it.
    """

    digest: str
    tenant: str
    num_bytes: int
    stamp_ns: int
    charge: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """What must go, and what may go along, so that not every stage has to look at all.

    A version is charged ``slot_bytes`` at least: there are so many slots, and a tenant with very
    many small versions holds most of them.
    """

    num_bytes: int
    versions: int = 0
    slot_bytes: int = 0
    batch_bytes: int = 0
    batch_versions: int = 0

    def met_by(self, num_bytes: int, versions: int) -> bool:
        """Whether this is enough."""
        return num_bytes >= self.num_bytes and versions >= self.versions

    def exceeded_by(self, num_bytes: int, versions: int) -> bool:
        """Whether this is more than may go along."""
        return (
            num_bytes > self.num_bytes + self.batch_bytes
            or versions > self.versions + self.batch_versions
        )


def eviction_order(
    candidates: Iterable[Candidate], held: Mapping[str, int]
) -> Generator[Candidate, bool, None]:
    """The order of eviction: always the tenant most over its share, its oldest lease first.

    All shares are the same, quota / tenants, so that it is the tenant that is charged most.
    ``held`` is what tenants are charged for beside the candidates (their reservations). Whoever
    iterates sends back whether the version can go: one that is leased goes on counting.
    """
    queues: dict[str, deque[Candidate]] = {}
    charged = dict(held)
    for candidate in sorted(candidates, key=lambda c: (c.stamp_ns, c.digest)):
        queues.setdefault(candidate.tenant, deque()).append(candidate)
        charged[candidate.tenant] = charged.get(candidate.tenant, 0) + candidate.charge
    heap = [(-charged[tenant], tenant) for tenant in queues]
    heapq.heapify(heap)
    while heap:
        _, tenant = heapq.heappop(heap)
        candidate = queues[tenant].popleft()
        if (yield candidate):
            charged[tenant] -= candidate.charge
        if queues[tenant]:
            heapq.heappush(heap, (-charged[tenant], tenant))


def evict(
    layout: Layout, content: Content, usage: Usage, shortage: Shortage, held: Mapping[str, int]
) -> bool:
    """Evict what the shortage asks for; False, with nothing gone in vain, where it cannot be.

    ``held``: see ``eviction_order``. The caller holds the mutex. Reads the record of every version.
    """
    candidates = _candidates(layout, shortage.slot_bytes)
    beside = dict(held)
    bytes_left, versions_left = shortage.num_bytes, shortage.versions
    while bytes_left > 0 or versions_left > 0:
        left = replace(shortage, num_bytes=bytes_left, versions=versions_left)
        victims = _choose(layout, candidates.values(), left, beside)
        if victims is None:
            return False
        for victim in victims:
            # Whatever becomes of it, it is not looked at again: this ends.
            del candidates[victim.digest]
            freed = _evict(layout, content, usage, victim)
            if freed is None:
                beside[victim.tenant] = beside.get(victim.tenant, 0) + victim.charge
            else:
                bytes_left -= freed
                versions_left -= 1
    return True


def _choose(
    layout: Layout, candidates: Iterable[Candidate], shortage: Shortage, held: Mapping[str, int]
) -> list[Candidate] | None:
    """Versions that nobody leases and that meet the shortage, as if no two shared a blob."""
    victims: list[Candidate] = []
    num_bytes = 0
    order = eviction_order(candidates, held)
    candidate = next(order, None)
    while candidate is not None:
        more = num_bytes + candidate.num_bytes, len(victims) + 1
        if shortage.met_by(num_bytes, len(victims)) and shortage.exceeded_by(*more):
            break
        evictable = not _is_leased(layout, candidate.digest)
        if evictable:
            victims.append(candidate)
            num_bytes += candidate.num_bytes
        try:
            candidate = order.send(evictable)
        except StopIteration:
            candidate = None
    return victims if shortage.met_by(num_bytes, len(victims)) else None


def _is_leased(layout: Layout, digest: str) -> bool:
    """A lease that is tried in this instant tries again (see ``DiskCache.lease``)."""
    try:
        lock = FileLock.try_acquire(layout.lock(digest))
    except FileNotFoundError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


def _evict(layout: Layout, content: Content, usage: Usage, victim: Candidate) -> int | None:
    """Remove a version unless it is leased by now; the bytes that this freed."""
    lock = FileLock.try_acquire(layout.lock(victim.digest))
    if lock is None:
        return None
    try:
        freed = content.remove(victim.digest)
        layout.lock(victim.digest).unlink()
    finally:
        lock.release()
    usage.bytes -= freed
    usage.remove(VersionRecord(victim.tenant, victim.num_bytes))
    return freed


def _candidates(layout: Layout, slot_bytes: int) -> dict[str, Candidate]:
    with os.scandir(layout.versions) as entries:
        present = {entry.name for entry in entries if is_digest(entry.name)}
    found: dict[str, Candidate] = {}
    with os.scandir(layout.locks) as entries:
        for entry in entries:
            if entry.name in present:
                record = read_record(entry.path, VersionRecord) or VersionRecord()
                found[entry.name] = Candidate(
                    digest=entry.name,
                    tenant=record.tenant,
                    num_bytes=record.num_bytes,
                    stamp_ns=entry.stat(follow_symlinks=False).st_mtime_ns,
                    charge=max(record.num_bytes, slot_bytes),
                )
    return found
