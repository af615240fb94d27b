"""An ordered set of adapters with pins and a removal hook: one tier."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["AdapterCache"]

V = TypeVar("V")


class AdapterCache(Generic[V]):
    """Adapters by id, least recently used first.

    ``on_remove`` is called with the id and the value *before* the entry goes, by whatever way it
    goes: so a tier above never holds what this one has given up. Whoever evicts asks `oldest`,
    which never names a pinned adapter.
    """

    def __init__(self, on_remove: Callable[[int, V], None]) -> None:
        self._entries: OrderedDict[int, V] = OrderedDict()
        self._pinned: set[int] = set()
        self._on_remove = on_remove

    def __contains__(self, lora_id: int) -> bool:
        return lora_id in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __getitem__(self, lora_id: int) -> V:
        return self._entries[lora_id]

    def items(self) -> list[tuple[int, V]]:
        """A copy of the entries, least recently used first."""
        return list(self._entries.items())

    def put(self, lora_id: int, value: V) -> None:
        """Add an adapter as the most recently used; raise ``KeyError`` if it is there."""
        if lora_id in self._entries:
            raise KeyError(lora_id)
        self._entries[lora_id] = value

    def touch(self, lora_id: int) -> None:
        """Make it the most recently used; raise ``KeyError`` if it is not there."""
        self._entries.move_to_end(lora_id)

    def remove(self, lora_id: int) -> V:
        """Take it out, pinned or not; raise ``KeyError`` if it is not there."""
        value = self._entries[lora_id]
        self._on_remove(lora_id, value)
        del self._entries[lora_id]
        self._pinned.discard(lora_id)
        return value

    def pin(self, lora_id: int) -> None:
        """Keep it from being evicted; raise ``KeyError`` if it is not there."""
        if lora_id not in self._entries:
            raise KeyError(lora_id)
        self._pinned.add(lora_id)

    def unpin(self, lora_id: int) -> None:
        """Let it be evicted again; nothing happens if it is not pinned."""
        self._pinned.discard(lora_id)

    def is_pinned(self, lora_id: int) -> bool:
        return lora_id in self._pinned

    @property
    def num_pinned(self) -> int:
        return len(self._pinned)

    def oldest(self, keep: frozenset[int]) -> int | None:
        """The least recently used that is neither pinned nor in ``keep``, or None."""
        for lora_id in self._entries:
            if lora_id not in self._pinned and lora_id not in keep:
                return lora_id
        return None

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if something is pinned that is not here."""
        assert self._pinned <= self._entries.keys(), self._pinned - self._entries.keys()
