"""KV blocks: counts, the free list's order, and which content is shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_server.engine.block_pool import NULL_BLOCK, BlockPool, PrefixKey, hash_blocks

BASE = PrefixKey(0, "")


def pool_of(blocks: int = 8) -> BlockPool:
    return BlockPool(blocks, 4, enable_prefix_caching=True)


def test_null_block_is_never_handed_out() -> None:
    pool = pool_of(4)
    assert NULL_BLOCK not in pool.allocate(3)
    assert pool.num_free == 0


def test_fresh_blocks_are_consecutive() -> None:
    assert pool_of().allocate(4) == [1, 2, 3, 4]


def test_blocks_of_another_adapter_or_salt_have_other_hashes() -> None:
    tokens = [1, 2, 3, 4]
    keys = [BASE, PrefixKey(1, ""), PrefixKey(2, ""), PrefixKey(1, "a"), PrefixKey(0, "a")]
    assert len({hash_blocks(tokens, 4, key)[0] for key in keys}) == len(keys)


def test_a_hash_depends_on_all_tokens_before() -> None:
    first = hash_blocks([1, 2, 3, 4, 9, 9, 9, 9], 4, BASE)
    second = hash_blocks([5, 2, 3, 4, 9, 9, 9, 9], 4, BASE)
    assert first[1] != second[1]
    assert hash_blocks([1, 2, 3, 4, 9, 9, 9, 9], 4, BASE, first[:1]) == first


def test_released_prefix_is_found_again_until_its_block_is_reused() -> None:
    pool = pool_of(4)
    hashes = hash_blocks(list(range(8)), 4, BASE)
    blocks = pool.allocate(2)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.publish(block, block_hash, 0)
    pool.release(blocks)
    assert pool.match(hashes, 2) == blocks
    assert pool.match(hashes, 1) == blocks[:1]
    # The unused block goes first, then the tail of the sequence, its beginning last.
    assert pool.allocate(1) == [3]
    assert pool.allocate(1) == [blocks[1]]
    assert pool.match(hashes, 2) == blocks[:1]


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = pool_of()
    [block] = pool.allocate(1)
    pool.take([block])
    pool.release([block])
    pool.check_integrity([[block]])
    pool.release([block])
    pool.check_integrity([])


def test_forgetting_an_adapter_drops_its_prefix_blocks_only() -> None:
    pool = pool_of()
    own, other = PrefixKey(7, ""), PrefixKey(8, "")
    blocks = pool.allocate(2)
    pool.publish(blocks[0], hash_blocks([1] * 4, 4, own)[0], 7)
    pool.publish(blocks[1], hash_blocks([1] * 4, 4, other)[0], 8)
    pool.release(blocks)
    assert pool.forget_adapter(7) == 1
    assert pool.match(hash_blocks([1] * 4, 4, own), 1) == []
    assert pool.match(hash_blocks([1] * 4, 4, other), 1) == [blocks[1]]
    pool.check_integrity([])


def test_allocating_more_than_is_free_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="9 blocks wanted"):
        pool_of().allocate(9)


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)),
        max_size=60,
    )
)
def test_counts_hold_whatever_comes_and_goes(actions: list[tuple[int, int, int, int]]) -> None:
    pool = pool_of(12)
    tables: list[list[int]] = []
    for kind, size, pick, adapter in actions:
        if kind == 0 and size <= pool.num_free:
            table = pool.allocate(size)
            hashes = hash_blocks([adapter, pick] * 2 * size, 4, PrefixKey(adapter, ""))
            for block, block_hash in zip(table, hashes, strict=True):
                pool.publish(block, block_hash, adapter)
            tables.append(table)
        elif kind == 1 and tables:
            pool.release(tables.pop(pick % len(tables)))
        elif kind == 2:
            hashes = hash_blocks([adapter, pick] * 2 * size, 4, PrefixKey(adapter, ""))
            found = pool.match(hashes, size)
            pool.take(found)
            tables.append(found)
        elif kind == 3:
            pool.forget_adapter(adapter)
        pool.check_integrity(tables)
