"""Making room: what is asked for, what is short, and who has to go for it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from mural_resolvers.disk_cache.content import Content
from mural_resolvers.disk_cache.eviction import Shortage, evict
from mural_resolvers.disk_cache.interface import CacheFull, CacheSettings
from mural_resolvers.disk_cache.layout import Layout, remove_tree
from mural_resolvers.disk_cache.records import Reservation, Usage
from mural_resolvers.disk_cache.staging import LiveReservation, reservations
from mural_resolvers.errors import Unavailable

__all__ = ["make_room", "trim_to_quota"]

# Room is made for a twentieth of what is there at once, so that few stages look at every
# version, but for so many versions at most that nobody waits long for their files to go.
_BATCH = 20
_BATCH_VERSIONS = 128


def make_room(
    layout: Layout, content: Content, usage: Usage, settings: CacheSettings, asked: Reservation
) -> None:
    """Evict until one more version fits; the caller holds the mutex.

    Raises ``Unavailable``, having evicted nothing, when it cannot be made to fit.
    """
    live = _living(layout)
    over_quota = _over_quota(usage, settings, live) + asked.num_bytes
    unwritten = asked.num_bytes + sum(reservation.unwritten for reservation in live)
    over_disk = unwritten + settings.min_free_bytes - _free_bytes(layout.root)
    shortage = Shortage(
        num_bytes=max(0, over_quota, over_disk),
        versions=max(0, usage.versions + len(live) + 1 - settings.max_versions),
        slot_bytes=_slot_bytes(settings),
        batch_bytes=min(settings.quota_bytes, usage.bytes) // _BATCH,
        batch_versions=min(_BATCH_VERSIONS, settings.max_versions // _BATCH),
    )
    held = _held(live, shortage.slot_bytes)
    held[asked.tenant] += max(asked.num_bytes, shortage.slot_bytes)
    if _relieve(layout, content, usage, shortage, held):
        return
    if over_disk > max(0, over_quota):
        raise Unavailable("The disk of the cache of adapters is full.", retry_after_s=10.0)
    raise CacheFull


def trim_to_quota(layout: Layout, content: Content, usage: Usage, settings: CacheSettings) -> None:
    """Evict what is above a quota that has become less; what is leased stays above it."""
    live = _living(layout)
    excess = max(0, _over_quota(usage, settings, live))
    versions = max(0, usage.versions + len(live) - settings.max_versions)
    shortage = Shortage(excess, versions, _slot_bytes(settings))
    _relieve(layout, content, usage, shortage, _held(live, shortage.slot_bytes))


def _relieve(
    layout: Layout, content: Content, usage: Usage, shortage: Shortage, held: Counter[str]
) -> bool:
    if shortage.met_by(0, 0):
        return True
    # Another program's files fill the disk: ours would go for nothing.
    if shortage.num_bytes > usage.bytes:
        return False
    return evict(layout, content, usage, shortage, held)


def _living(layout: Layout) -> Sequence[LiveReservation]:
    """What living processes have reserved; what dead ones left is removed."""
    dead: list[Path] = []
    live = list(reservations(layout, dead))
    for path in dead:
        remove_tree(path)
    return live


def _over_quota(usage: Usage, settings: CacheSettings, live: Sequence[LiveReservation]) -> int:
    return usage.bytes + sum(r.num_bytes for r in live) - settings.quota_bytes


def _slot_bytes(settings: CacheSettings) -> int:
    return settings.quota_bytes // settings.max_versions


def _held(live: Sequence[LiveReservation], slot_bytes: int) -> Counter[str]:
    held: Counter[str] = Counter()
    for reservation in live:
        held[reservation.tenant] += max(reservation.num_bytes, slot_bytes)
    return held


def _free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize
