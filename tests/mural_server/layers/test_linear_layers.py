"""Fused linear layers hold their members side by side."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mural_server.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from mural_server.ops.base import Ops
from mural_server.ops.select import select_ops


@pytest.fixture(params=["reference", "packed"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return select_ops(torch.float32, wanted=request.param).ops


@pytest.mark.parametrize("layer", [ReplicatedLinear, ColumnParallelLinear, RowParallelLinear])
def test_a_plain_layer_is_a_linear_map(layer: type[LinearBase], ops: Ops) -> None:
    linear = layer(ops, 12, 7, bias=True)
    weight, bias, x = torch.randn(7, 12), torch.randn(7), torch.randn(5, 12)
    linear.load([weight], [bias])
    assert linear.output_slices == (7,)
    torch.testing.assert_close(linear(x), F.linear(x, weight, bias))


def test_members_are_fused_in_order(ops: Ops) -> None:
    merged = MergedColumnParallelLinear(ops, 12, (5, 3), bias=False)
    gate, up, x = torch.randn(5, 12), torch.randn(3, 12), torch.randn(4, 12)
    merged.load([gate, up])
    assert merged.output_slices == (5, 3)
    torch.testing.assert_close(merged(x), torch.cat((x @ gate.t(), x @ up.t()), dim=-1))


def test_qkv_has_the_sizes_of_its_heads(ops: Ops) -> None:
    qkv = QKVParallelLinear(ops, 12, 4, num_heads=6, num_kv_heads=2)
    assert qkv.output_slices == (24, 8, 8)
    assert (qkv.in_features, qkv.out_features) == (12, 40)


def test_the_residual_is_added_and_left_alone(ops: Ops) -> None:
    linear = RowParallelLinear(ops, 12, 7)
    weight, x, residual = torch.randn(7, 12), torch.randn(5, 12), torch.randn(5, 7)
    linear.load([weight])
    before = residual.clone()
    torch.testing.assert_close(linear(x, residual), x @ weight.t() + residual)
    assert torch.equal(residual, before)


def test_nothing_of_the_loaded_tensors_is_kept(ops: Ops) -> None:
    linear = ReplicatedLinear(ops, 12, 7, bias=True)
    weight, bias, x = torch.randn(7, 12), torch.randn(7), torch.randn(5, 12)
    linear.load([weight], [bias])
    before = linear(x)
    weight.zero_()
    bias.zero_()
    assert torch.equal(linear(x), before)


def test_weights_that_do_not_fit_are_refused(ops: Ops) -> None:
    merged = MergedColumnParallelLinear(ops, 12, (5, 3), bias=True)
    with pytest.raises(ValueError, match="do not fit"):
        merged.load([torch.randn(3, 12), torch.randn(5, 12)], [torch.randn(3), torch.randn(5)])
    with pytest.raises(ValueError, match="0 biases for 2 weights"):
        merged.load([torch.randn(5, 12), torch.randn(3, 12)])
    with pytest.raises(ValueError, match="do not add up"):
        LinearBase(ops, 12, 9, output_slices=(5, 3))
