"""NativeOps' linears against ReferenceOps and float64, for each instruction set of this machine."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from mural_server.ops import NativeOps, ReferenceOps
from mural_server.ops.base import Activation
from mural_server.ops.native.library import ISAS, Isa, available, load
from mural_server.ops.native.linear import NativeLinear

REFERENCE = ReferenceOps()


@pytest.fixture(params=ISAS)
def ops(request: pytest.FixtureRequest) -> NativeOps:
    isa: Isa = request.param
    if isa not in available() and (available() or os.environ.get("MURAL_NATIVE") != "1"):
        pytest.skip(f"no native operators for {isa} here")
    return NativeOps(torch.bfloat16, load(isa))


def exact_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() @ weight.double().t()


def assert_close_to_float64(
    y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor | float = 0.0
) -> None:
    """Relative to the size of a sum of so many products; bfloat16 rounds it by 2^-9 at most."""
    size = weight.double().square().sum(1).sqrt() * x.double().square().mean(1, True).sqrt()
    error = (y.double() - offset - exact_product(x, weight)).abs() / (size + 1e-300)
    if error.numel():
        assert error.max() < 2**-7
        assert error.square().mean().sqrt() < 2**-9.5


@pytest.mark.parametrize("rows", [0, 1, 3, 7, 14, 15, 16, 29, 130])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(96, 64), (1, 1), (33, 65), (160, 320), (576, 1536)]
)
def test_any_shape_agrees_with_float64(
    ops: NativeOps, rows: int, out_features: int, in_features: int
) -> None:
    weight = torch.randn(out_features, in_features).bfloat16()
    x = torch.randn(rows, in_features)
    packed = ops.pack_linear(weight)
    assert isinstance(packed, NativeLinear)
    assert (packed.in_features, packed.out_features) == (in_features, out_features)
    y = ops.linear(x, packed)
    assert y.shape == (rows, out_features)
    assert_close_to_float64(y, x, weight)


@pytest.mark.parametrize("rows", [1, 16, 300])
@pytest.mark.parametrize(("out_features", "in_features"), [(31, 64), (576, 576), (960, 200)])
def test_any_number_of_threads_gives_the_same_bits(
    ops: NativeOps, rows: int, out_features: int, in_features: int
) -> None:
    packed = ops.pack_linear(torch.randn(out_features, in_features).bfloat16())
    x = torch.randn(rows, in_features)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        results.append(ops.linear(x, packed))
    torch.set_num_threads(before)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("rows", [1, 16, 40])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_bias_and_residual_are_added_at_full_precision(
    ops: NativeOps, rows: int, bias: bool, residual: bool
) -> None:
    weight, x = torch.randn(100, 200).bfloat16(), torch.randn(rows, 200)
    offset = torch.randn(100).bfloat16() if bias else None
    other = torch.randn(rows, 100) if residual else None
    before = None if other is None else other.clone()
    y = ops.linear(x, ops.pack_linear(weight, offset), other)
    added = torch.zeros(rows, 100)
    added = added if offset is None else added + offset.float()
    added = added if other is None else added + other
    assert_close_to_float64(y, x, weight, added.double())
    if other is not None and before is not None:
        assert torch.equal(other, before)


def test_rows_may_be_slices_of_wider_ones(ops: NativeOps) -> None:
    weight, wide, others = torch.randn(32, 64).bfloat16(), torch.randn(5, 101), torch.randn(5, 90)
    y = ops.linear(wide[:, 10:74], ops.pack_linear(weight), others[:, 7:39])
    assert_close_to_float64(y, wide[:, 10:74], weight, others[:, 7:39].double())
    transposed = torch.randn(64, 5).t()
    assert_close_to_float64(ops.linear(transposed, ops.pack_linear(weight)), transposed, weight)


def test_narrow_activations_give_narrow_results(ops: NativeOps) -> None:
    weight, x = torch.randn(32, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    y = ops.linear(x, ops.pack_linear(weight))
    expected = REFERENCE.linear(x, REFERENCE.pack_linear(weight))
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=1.6e-2, atol=1.6e-2)


def _normal(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width)


def _outlier(rows: int, width: int) -> torch.Tensor:
    """One massive channel, as hidden states of transformers have."""
    return torch.randn(rows, width).index_fill_(1, torch.tensor([width // 3]), 1e4)


def _tiny(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width).mul(1e-30)


def _huge(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows, width).mul(1e25)


def _positive(rows: int, width: int) -> torch.Tensor:
    return torch.rand(rows, width)


@pytest.mark.parametrize("make", [_normal, _outlier, _tiny, _huge, _positive])
@pytest.mark.parametrize("in_features", [576, 1536, 4096])
@pytest.mark.parametrize("weights", ["normal", "positive", "uneven"])
def test_errors_are_no_larger_than_those_of_a_bfloat16_product(
    ops: NativeOps, make, in_features: int, weights: str
) -> None:
    """Both are given the same bfloat16 numbers; float64 is the truth."""
    weight = torch.randn(96, in_features)
    if weights == "positive":
        weight = weight.abs()
    elif weights == "uneven":
        weight = weight * torch.logspace(-12, 8, 96).unsqueeze(1)
    weight, x = weight.bfloat16(), make(32, in_features).bfloat16()
    expected = exact_product(x, weight)
    size = expected.square().mean(0, keepdim=True).sqrt()
    mine = (ops.linear(x.float(), ops.pack_linear(weight)).double() - expected) / size
    theirs = (F.linear(x, weight).double() - expected) / size
    assert mine.square().mean() <= theirs.square().mean()
    assert mine.abs().max() <= theirs.abs().max()


def test_rows_of_zeros_give_the_bias_alone(ops: NativeOps) -> None:
    bias = torch.randn(40).bfloat16()
    packed = ops.pack_linear(torch.randn(40, 70).bfloat16(), bias)
    assert torch.equal(ops.linear(torch.zeros(3, 70), packed), bias.float().expand(3, 40))


def test_outputs_whose_weights_are_zeros_are_zero(ops: NativeOps) -> None:
    weight = torch.randn(40, 70).bfloat16()
    weight[5], weight[33] = 0, 0
    y = ops.linear(torch.randn(3, 70), ops.pack_linear(weight))
    assert y[:, [5, 33]].eq(0).all()
    assert y.ne(0).sum() == 3 * 38


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [3, 40])
def test_what_is_not_finite_stays_in_its_row(ops: NativeOps, value: float, rows: int) -> None:
    packed = ops.pack_linear(torch.randn(40, 200).bfloat16())
    x = torch.randn(rows, 200)
    clean = ops.linear(x, packed)
    x[1, 150] = value
    y = ops.linear(x, packed)
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(y[others], clean[others])
    assert not y[1].isfinite().any()


def test_a_row_is_multiplied_alike_alone_and_in_a_batch(ops: NativeOps) -> None:
    packed = ops.pack_linear(torch.randn(96, 320).bfloat16())
    x = torch.randn(40, 320)
    together = ops.linear(x, packed)
    for rows in (slice(0, 1), slice(7, 10), slice(3, 40)):
        assert torch.equal(ops.linear(x[rows], packed), together[rows])


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-5, 2.0**30])
def test_an_exact_weight_is_read_back_bit_for_bit(ops: NativeOps, scale: float) -> None:
    weight = torch.randn(32, 64).mul(scale).bfloat16()
    packed = ops.pack_linear(weight, exact=True)
    assert torch.equal(ops.linear(torch.eye(64).bfloat16(), packed).t(), weight)


def test_an_exact_weight_beyond_float16s_reach_keeps_its_own_dtype(ops: NativeOps) -> None:
    weight = torch.logspace(-30, 10, 32 * 64).view(32, 64)[:, torch.randperm(64)].bfloat16()
    weight[0, 0], weight[0, 1] = 1e10, 1e-30
    packed = ops.pack_linear(weight, exact=True)
    assert not isinstance(packed, NativeLinear)
    assert torch.equal(ops.linear(torch.eye(64).bfloat16(), packed).t(), weight)


def test_weights_that_are_not_finite_keep_their_own_dtype(ops: NativeOps) -> None:
    weight = torch.randn(32, 64).bfloat16()
    weight[3, 7] = float("inf")
    packed = ops.pack_linear(weight)
    assert not isinstance(packed, NativeLinear)
    y = ops.linear(torch.ones(2, 64), packed)
    assert y[:, 3].isinf().all()
    assert y[:, 4:].isfinite().all()


@pytest.mark.parametrize("rows", [1, 17])
def test_float32_weights_are_multiplied_in_float32(ops: NativeOps, rows: int) -> None:
    wide = NativeOps(torch.float32, load(ops.isa))
    weight, x, other = torch.randn(40, 72), torch.randn(rows, 72), torch.randn(rows, 40)
    y = wide.linear(x, wide.pack_linear(weight), other)
    expected = REFERENCE.linear(x, REFERENCE.pack_linear(weight), other)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [0, 1, 16, 29, 130])
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(64, 1), (192, 65), (320, 576), (96, 64), (128, 1100)]
)
def test_a_gated_product_is_the_gate_of_the_product(
    ops: NativeOps, activation: Activation, rows: int, out_features: int, in_features: int
) -> None:
    """Whether or not one kernel makes both; (96, 64) and (128, 1100) are for none."""
    weight = torch.randn(out_features, in_features).div(in_features**0.5).bfloat16()
    packed = ops.pack_linear(weight, torch.randn(out_features).bfloat16())
    x = torch.randn(rows, 2 * in_features)[:, :in_features]
    gated = ops.gated_linear(x, packed, activation)
    assert gated.shape == (rows, out_features // 2)
    torch.testing.assert_close(
        gated, ops.gated(ops.linear(x, packed), activation), rtol=1e-5, atol=1e-6
    )


def test_a_gated_product_keeps_what_is_not_finite_in_its_row(ops: NativeOps) -> None:
    packed = ops.pack_linear(torch.randn(128, 64).bfloat16())
    x = torch.randn(40, 64)
    x[3, 5] = torch.nan
    gated = ops.gated_linear(x, packed, "silu")
    assert gated[3].isnan().all()
    assert gated[:3].isfinite().all()
    assert gated[4:].isfinite().all()
