"""Slots are shared by turns: who gets one, who loses one, and how long anyone waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mural_server.engine.slot_share import SlotChange, SlotShare


def step(share: SlotShare, busy: set[int], max_changes: int = 1) -> list[SlotChange]:
    share.update_demand(busy)
    changes = share.plan(busy, busy | share.pinned | {*share.queue}, max_changes)
    share.check_integrity()
    share.count_step(busy)
    return changes


def test_free_slots_are_filled_in_order() -> None:
    share = SlotShare(2, 4)
    assert step(share, {5, 3}, max_changes=2) == [SlotChange(3, None), SlotChange(5, None)]


def test_no_more_changes_than_allowed_in_a_step() -> None:
    assert len(step(SlotShare(4, 4), {1, 2, 3}, max_changes=1)) == 1


def test_a_holder_at_work_keeps_its_slot_for_its_quantum() -> None:
    share = SlotShare(1, 3)
    step(share, {1})
    assert [step(share, {1, 2}) for _ in range(3)] == [[], [], [SlotChange(2, 1)]]
    assert list(share.queue) == [1]


def test_an_idle_holder_gives_way_at_once() -> None:
    share = SlotShare(1, 1000)
    step(share, {1})
    assert step(share, {2}) == [SlotChange(2, 1)]
    assert not share.queue


def test_a_lone_adapter_keeps_its_slot_for_ever() -> None:
    share = SlotShare(1, 2)
    step(share, {1})
    assert all(step(share, {1}) == [] for _ in range(10))


def test_a_pinned_holder_never_loses_its_slot() -> None:
    share = SlotShare(2, 1)
    share.pin(1)
    step(share, set())
    for _ in range(10):
        step(share, {1, 2, 3, 4})
        assert 1 in share.holders


def test_an_adapter_that_is_not_loaded_yet_keeps_its_place_and_blocks_nobody() -> None:
    share = SlotShare(1, 1)
    share.update_demand({1, 2})
    assert share.plan({1, 2}, {2}, 1) == [SlotChange(2, None)]
    share.count_step({2})
    assert list(share.queue) == [1]


def test_a_wanted_adapter_gets_a_slot_once_without_work() -> None:
    share = SlotShare(1, 1)
    share.want(9)
    assert step(share, set()) == [SlotChange(9, None)]
    assert step(share, {1}) == [SlotChange(1, 9)]
    assert step(share, set()) == []


def test_a_forgotten_adapter_leaves_its_slot_and_its_pin() -> None:
    share = SlotShare(1, 1)
    share.pin(1)
    step(share, set())
    assert share.forget(1)
    assert not share.holders
    assert not share.pinned
    assert not share.forget(1)


@pytest.mark.parametrize(("slots", "quantum"), [(-1, 4), (2, 0)])
def test_impossible_sizes_are_refused(slots: int, quantum: int) -> None:
    with pytest.raises(ValueError, match="slots cannot be negative"):
        SlotShare(slots, quantum)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 20))
def test_every_adapter_has_its_turn_within_the_stated_number_of_quanta(
    slots: int, quantum: int, adapters: int
) -> None:
    """With n at work and m slots nobody waits longer than ceil(n / m) turns (one change a step)."""
    share = SlotShare(slots, quantum)
    busy = set(range(1, adapters + 1))
    turn = max(quantum, slots)
    bound = -(-adapters // slots) * turn + slots
    waited = dict.fromkeys(busy, 0)
    for _ in range(4 * bound):
        step(share, busy)
        for adapter in busy:
            waited[adapter] = 0 if adapter in share.holders else waited[adapter] + 1
        assert max(waited.values()) <= bound


@given(
    st.lists(
        st.tuples(st.sets(st.integers(1, 8)), st.sets(st.integers(1, 8)), st.integers(0, 3)),
        max_size=40,
    )
)
def test_holders_are_exactly_what_the_changes_say(
    steps: list[tuple[set[int], set[int], int]],
) -> None:
    share = SlotShare(3, 2)
    holders: set[int] = set()
    for busy, ready, max_changes in steps:
        share.update_demand(busy)
        for adapter, victim in share.plan(busy, ready, max_changes):
            assert adapter in ready
            assert victim is None or victim in holders
            holders = (holders - {victim}) | {adapter}
        assert holders == set(share.holders)
        share.check_integrity()
        share.count_step(busy)


def test_a_newcomer_for_which_there_was_no_room_comes_first_when_a_turn_ends() -> None:
    share = SlotShare(4, 3)
    step(share, {1, 2}, max_changes=2)
    assert step(share, {1, 2, 3}) == [SlotChange(3, None)]
    assert share.postpone(3)
    share.check_integrity()
    # Slots are free, yet 4 must not take the room that 3 waits for.
    changes = [change for _ in range(3) for change in step(share, {1, 2, 3, 4})]
    [change, *_] = changes
    assert (change.adapter, change.victim in (1, 2)) == (3, True)


def test_a_newcomer_is_not_postponed_where_only_pins_hold_the_room() -> None:
    share = SlotShare(3, 1)
    share.pin(1)
    step(share, {1})
    assert step(share, {1, 2}) == [SlotChange(2, None)]
    assert not share.postpone(2)
