"""Names and the versions that they stand for. Whoever changes anything here holds the mutex."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mural_resolvers.disk_cache.content import Content
from mural_resolvers.disk_cache.layout import (
    Layout,
    is_real_folder,
    remove_tree,
    write_atomically,
)
from mural_resolvers.disk_cache.records import MAX_RECORD_BYTES, NameRecord, encode, read_record
from mural_resolvers.errors import Conflict, UnusableAdapter
from mural_resolvers.names import AdapterName, is_tenant, is_version

__all__ = ["FoundName", "NameRecords", "levelled"]


@dataclass(frozen=True, slots=True)
class FoundName:
    """A record's file, or what lies where one should be (``stray``)."""

    path: Path
    tenant: str
    stray: bool
    stamp_ns: int = 0


class NameRecords:
    """The records of a cache's folder. A record outlives the content that it stands for."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def read(self, name: AdapterName) -> NameRecord | None:
        """The record of a name, unless there is none or it is not one of ours."""
        record = read_record(self._layout.name(name), NameRecord)
        # The name is in it too, so that no link among the folders makes one of another.
        return record if record is not None and record.name == name.exact else None

    def check(self, name: AdapterName, digest: str) -> None:
        """Raise ``Conflict`` when the name has had other content."""
        record = self.read(name)
        if record is not None and record.digest != digest:
            raise Conflict(
                f"The content of {name} changed; a version is immutable: use another version."
            )

    def write(self, name: AdapterName, record: NameRecord) -> int:
        """Note what a name stands for; gives by how many the names are more."""
        path = self._layout.name(name)
        data = encode(record)
        if len(data) > MAX_RECORD_BYTES:
            raise UnusableAdapter("The source's revision is too long to be noted.")
        known = self.read(name)
        if known == record:
            return 0
        self._clear_way(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        existed = os.path.lexists(path)
        write_atomically(path, data, self._layout.temporary)
        return 0 if existed else 1

    def remove(self, name: AdapterName) -> int:
        """Forget a name; gives by how many the names are fewer."""
        try:
            self._layout.name(name).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return 0
        except IsADirectoryError:
            remove_tree(self._layout.name(name))
        return 1

    def _clear_way(self, path: Path) -> None:
        for folder in (path.parent.parent, path.parent):
            if os.path.lexists(folder) and not is_real_folder(folder):
                remove_tree(folder)
        if is_real_folder(path):
            remove_tree(path)

    def trim(self, content: Content, max_names: int) -> int:
        """Drop records down to nine tenths of ``max_names``; gives how many went.

        They are the oldest of the tenant with the most, those without content first.
        """
        by_tenant: dict[str, list[FoundName]] = {}
        for found in self.walk():
            if not found.stray:
                by_tenant.setdefault(found.tenant, []).append(found)
        counts = Counter({tenant: len(names) for tenant, names in by_tenant.items()})
        surplus = counts.total() - max_names * 9 // 10
        if surplus <= 0:
            return 0
        doomed = levelled(counts, surplus)
        for tenant, number in doomed.items():
            keyed = [(self._has_content(content, n), n.stamp_ns, n.path) for n in by_tenant[tenant]]
            for _, _, path in sorted(keyed)[:number]:
                path.unlink(missing_ok=True)
        return doomed.total()

    def _has_content(self, content: Content, found: FoundName) -> bool:
        record = read_record(found.path, NameRecord)
        return record is not None and content.has(record.digest)

    def walk(self) -> Iterator[FoundName]:
        """All records, and all strays."""
        for tenant in _entries(self._layout.names):
            if not (is_tenant(tenant.name) and tenant.is_dir(follow_symlinks=False)):
                yield FoundName(Path(tenant.path), tenant.name, stray=True)
                continue
            for adapter in _entries(Path(tenant.path)):
                if not (is_tenant(adapter.name) and adapter.is_dir(follow_symlinks=False)):
                    yield FoundName(Path(adapter.path), tenant.name, stray=True)
                    continue
                for version in _entries(Path(adapter.path)):
                    ours = is_version(version.name) and version.is_file(follow_symlinks=False)
                    stamp_ns = version.stat(follow_symlinks=False).st_mtime_ns if ours else 0
                    yield FoundName(Path(version.path), tenant.name, not ours, stamp_ns)


def levelled(counts: Mapping[str, int], surplus: int) -> Counter[str]:
    """How many each gives up, one by one always from the one that has most."""
    low, high = 0, max(counts.values(), default=0)
    while low < high:  # the lowest level above which there are no more than the surplus
        level = (low + high) // 2
        if sum(max(0, number - level) for number in counts.values()) <= surplus:
            high = level
        else:
            low = level + 1
    doomed = Counter({name: max(0, number - low) for name, number in counts.items()})
    at_level = sorted(name for name, number in counts.items() if number >= low)
    doomed.update(at_level[: surplus - doomed.total()])
    return doomed


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
