"""Stacks: what is written, what is silent, and what memory is touched."""

from __future__ import annotations

import mmap

import pytest
import torch

from mural_server.lora.rank_rows import RankRows
from mural_server.lora.stack import LoRAStack
from mural_server.lora.weights import LoRALayerWeights
from mural_server.ops.zeroed import allocate_zeroed

CPU = torch.device("cpu")


def weights(rank: int, fan_in: int, fan_out: int) -> LoRALayerWeights:
    return LoRALayerWeights("m", rank, 1.0, torch.randn(rank, fan_in), torch.randn(rank, fan_out))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_slices_take_their_own_rank_and_the_rest_is_silent():
    stack = LoRAStack(8, 5, (3, 4), torch.float32, CPU)
    full = (weights(3, 5, 3), weights(3, 5, 4))
    stack.set(0, RankRows(2, 5), full)
    assert torch.equal(stack.a[0, 2:5], full[0].lora_a)
    assert torch.equal(stack.b[1][2:5], full[1].lora_b)
    # A smaller adapter with one member takes the rows over: nothing of the former shows through.
    small = weights(1, 5, 4)
    stack.set(0, RankRows(2, 5), (None, small))
    assert torch.equal(stack.a[1, 2:3], small.lora_a)
    assert not stack.a[0].any()
    assert not stack.a[1, 3:].any()


def test_the_table_is_silenced_by_its_smaller_half():
    stack = LoRAStack(4, 100, (3,), torch.float32, CPU, zero_half="b")
    stack.set(1, RankRows(0, 2), (weights(2, 100, 3),))
    stack.reset(1, RankRows(0, 2))
    assert not stack.b[0].any()
    assert stack.slots == 0


def test_slots_are_noted_as_bits():
    stack = LoRAStack(4, 2, (2,), torch.float32, CPU)
    stack.set(0, RankRows(0, 1), (weights(1, 2, 2),))
    stack.set(2, RankRows(1, 2), (weights(1, 2, 2),))
    assert stack.slots == 0b101
    stack.clear(0)
    assert stack.slots == 0b100


def test_memory_follows_the_rank_rows_in_use_and_comes_back_when_released():
    rows, width = 4096, 4096
    pair = weights(rows // 2, width, width)  # held to the end: malloc may keep what is freed
    before = resident_bytes()
    stack = LoRAStack(rows, width, (width,), torch.float32, CPU)
    stack.reset(0, RankRows(0, rows))
    whole = stack.bytes_per_rank_row * rows
    assert resident_bytes() - before < whole // 4
    stack.set(0, RankRows(0, rows // 2), (pair,))
    assert resident_bytes() - before > whole // 4
    stack.clear(0)
    stack.release(RankRows(0, rows // 2))
    assert resident_bytes() - before < whole // 4
    assert not stack.a[0, ::97].any()


def test_fresh_rows_are_finite_zeros():
    for dtype in (torch.float32, torch.bfloat16):
        tensor, _ = allocate_zeroed((3, 7), dtype, CPU)
        assert tensor.dtype == dtype
        assert not tensor.any()


def test_what_does_not_fit_is_refused():
    stack = LoRAStack(4, 2, (2, 2), torch.float32, CPU)
    with pytest.raises(ValueError, match="members"):
        stack.set(0, RankRows(0, 1), (weights(1, 2, 2),))
    with pytest.raises(ValueError, match="rank"):
        stack.set(0, RankRows(0, 1), (weights(2, 2, 2), None))
