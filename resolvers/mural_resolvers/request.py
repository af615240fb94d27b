"""``LoRARequest``, which names an adapter inside a process, and the ids that it carries."""

from __future__ import annotations

import threading

import msgspec

__all__ = ["LoRAIdAllocator", "LoRARequest"]


class LoRARequest(msgspec.Struct, frozen=True, eq=False):
    """An adapter to run a request with.

    ``lora_name`` is for people, ``lora_int_id`` (above 0) keys slots and prefix blocks inside
    this process, ``lora_path`` is the folder, ``digest`` the sha256 over the files in it.

    Two requests are equal when name and digest are: the id follows from the digest, and the
    same content may lie at two paths. Without a digest (a folder given by hand) they are equal
    when name, id and path are. Raises ``ValueError`` when the id is not positive.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    digest: str = ""

    def __post_init__(self) -> None:
        if self.lora_int_id <= 0:
            raise ValueError(f"lora_int_id must be above 0, not {self.lora_int_id}")

    def _identity(self) -> tuple[str | int, ...]:
        if self.digest:
            return (self.lora_name, self.digest)
        return (self.lora_name, self.lora_int_id, self.lora_path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


class LoRAIdAllocator:
    """Hands out one ``lora_int_id`` per digest for the life of the process, never reused.

    Slots and prefix blocks key on the id, so an id that came back with other content would give
    one adapter another's weights or KV. Nothing is ever forgotten: about 150 bytes a digest.
    Thread-safe.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._lock = threading.Lock()

    def id_for(self, digest: str) -> int:
        """Give the digest's id, above 0; raise ``ValueError`` for an empty digest."""
        if not digest:
            raise ValueError("an id belongs to a digest")
        with self._lock:
            return self._ids.setdefault(digest, len(self._ids) + 1)
