"""KV blocks: who holds them, which are free, and which hold a prefix that may be shared.

The scheme is that of vLLM's automatic prefix caching: a block that is full of computed tokens is
known by a hash chained over all tokens before it, a freed block keeps its content until it is
handed out again, and the free list gives up the least recently used first.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

NULL_BLOCK = 0
"""Never handed out: padding of block tables points to it."""

_HASH_BYTES = 16


class PrefixKey(NamedTuple):
    """What besides the tokens decides the content of a KV block."""

    lora_int_id: int
    """0 for the base. Never reused within a process, so a reload cannot meet old blocks."""
    salt: str


def hash_blocks(
    tokens: Sequence[int], block_size: int, key: PrefixKey, known: Sequence[bytes] = ()
) -> list[bytes]:
    """Hashes of all full blocks of ``tokens``; ``known`` are those of its beginning."""
    hashes = list(known)
    parent = hashes[-1] if hashes else _root_hash(key)
    pack = struct.Struct(f"<{block_size}I").pack
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        parent = blake2b(
            parent + pack(*tokens[start : start + block_size]), digest_size=_HASH_BYTES
        ).digest()
        hashes.append(parent)
    return hashes


def _root_hash(key: PrefixKey) -> bytes:
    content = struct.pack("<Q", key.lora_int_id) + key.salt.encode()
    return blake2b(content, digest_size=_HASH_BYTES).digest()


class BlockPool:
    """Block numbers 1 … ``num_blocks - 1`` with reference counts and an LRU free list."""

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._ref_counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self._by_hash: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._adapter_of: dict[int, int] = {}
        self._by_adapter: dict[int, set[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold now, 0 to 1."""
        return 1.0 - len(self._free) / max(1, self.num_blocks - 1)

    def match(self, hashes: Sequence[bytes], max_blocks: int) -> list[int]:
        """The longest known run of blocks from the start; they are not taken yet."""
        found: list[int] = []
        for block_hash in hashes[:max_blocks]:
            block = self._by_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_beside(self, blocks: Iterable[int]) -> int:
        """Free blocks that would be left if ``blocks`` were taken."""
        return len(self._free) - sum(1 for block in blocks if block in self._free)

    def take(self, blocks: Iterable[int]) -> None:
        """Add a reference to each (matched) block."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._free[block]
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference; the caller made sure that they exist."""
        if count > len(self._free):
            raise AssertionError(f"{count} blocks wanted, {len(self._free)} free")
        blocks = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each; the tail of a sequence is reused before its beginning."""
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, block_hash: bytes, lora_int_id: int) -> None:
        """Let others share a block whose tokens are all computed."""
        if not self.enable_prefix_caching or block in self._hash_of or block_hash in self._by_hash:
            return
        self._by_hash[block_hash] = block
        self._hash_of[block] = block_hash
        self._adapter_of[block] = lora_int_id
        self._by_adapter.setdefault(lora_int_id, set()).add(block)

    def forget_adapter(self, lora_int_id: int) -> int:
        """Drop every prefix block of an adapter; returns how many."""
        blocks = self._by_adapter.get(lora_int_id, set()).copy()
        for block in blocks:
            self._forget(block)
            if block in self._free:
                self._free.move_to_end(block, last=False)
        return len(blocks)

    def _forget(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        del self._by_hash[block_hash]
        adapter = self._adapter_of.pop(block)
        members = self._by_adapter[adapter]
        members.discard(block)
        if not members:
            del self._by_adapter[adapter]

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless the counts are exactly those of the given tables."""
        expected = [0] * self.num_blocks
        for table in tables:
            for block in table:
                expected[block] += 1
        assert expected == self._ref_counts, "a reference count is off"
        free = {block for block in range(1, self.num_blocks) if expected[block] == 0}
        assert free == set(self._free), "a block is leaked or free while in use"
        assert expected[NULL_BLOCK] == 0, "the null block was handed out"
        assert {b: h for h, b in self._by_hash.items()} == self._hash_of, "hashes disagree"
        assert self._adapter_of.keys() == self._hash_of.keys(), "a prefix block has no adapter"
        members = {b for blocks in self._by_adapter.values() for b in blocks}
        assert members == self._hash_of.keys(), "the index by adapter disagrees"
