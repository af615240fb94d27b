"""The rule under which a free slot always finds its rank rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_server.lora.rank_rows import RankRowAllocator, RankRows


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_a_free_slot_always_finds_rows_of_its_own(max_loras, max_rank, data):
    rows = RankRowAllocator(max_loras, max_rank)
    held: dict[int, RankRows] = {}
    for _ in range(data.draw(st.integers(1, 40))):
        slot = data.draw(st.integers(0, max_loras - 1))
        if slot in held:
            assert rows.free(slot) == held.pop(slot)
        else:
            rank = data.draw(st.integers(1, max_rank))
            held[slot] = rows.allocate(slot, rank)
            assert held[slot].end - held[slot].start == rank
        rows.check_integrity()
        assert rows.blocks == tuple(held.get(slot, (0, 0)) for slot in range(max_loras))


def test_low_ranks_share_a_bin_and_lie_side_by_side():
    rows = RankRowAllocator(max_loras=4, max_lora_rank=8)
    assert [rows.allocate(slot, 4) for slot in range(4)] == [(0, 4), (4, 8), (8, 12), (12, 16)]


def test_wrong_calls_are_refused():
    rows = RankRowAllocator(2, 4)
    with pytest.raises(ValueError, match="1 to 4"):
        rows.allocate(0, 5)
    rows.allocate(0, 4)
    with pytest.raises(ValueError, match="already"):
        rows.allocate(0, 1)
    with pytest.raises(ValueError, match="no rank rows"):
        rows.free(1)
