"""PackedOps against ReferenceOps: linears and the small operators."""

from __future__ import annotations

import pytest
import torch

from mural_server.ops import AttentionSpec, KVLayer, PackedOps, ReferenceOps, packed_linear
from mural_server.ops.packed_linear import LinearForm

REFERENCE = ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16)
FORMS = [
    "plain",
    pytest.param(
        "prepacked",
        marks=pytest.mark.skipif(
            not packed_linear._can_prepack(torch.bfloat16), reason="oneDNN does not pack here"
        ),
    ),
    pytest.param(
        "half",
        marks=pytest.mark.skipif(
            not packed_linear._can_halve(), reason="FBGEMM does not multiply float16 here"
        ),
    ),
]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """bf16: two roundings of 2^-8 against the reference's one."""
    assert actual.dtype == expected.dtype
    tolerance = 1e-5 if actual.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_agrees_with_the_reference(
    form: LinearForm, dtype: torch.dtype, rows: int, bias: bool
) -> None:
    ops = PackedOps(dtype, form)
    weight = torch.randn(96, 64).div(8).to(dtype)
    x, residual = torch.randn(rows, 64).to(dtype), torch.randn(rows, 96).to(dtype)
    offset = torch.randn(96).to(dtype) if bias else None
    mine, theirs = ops.pack_linear(weight, offset), REFERENCE.pack_linear(weight, offset)
    assert (mine.in_features, mine.out_features) == (64, 96)
    close(ops.linear(x, mine), REFERENCE.linear(x, theirs))
    before = residual.clone()
    close(ops.linear(x, mine, residual), REFERENCE.linear(x, theirs, residual))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_takes_a_column_slice(form: LinearForm, dtype: torch.dtype) -> None:
    ops = PackedOps(dtype, form)
    weight, wide = torch.randn(32, 64).div(8).to(dtype), torch.randn(5, 100).to(dtype)
    expected = REFERENCE.linear(wide[:, 10:74], REFERENCE.pack_linear(weight))
    close(ops.linear(wide[:, 10:74], ops.pack_linear(weight)), expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("residual", [False, True])
def test_linear_takes_activations_wider_than_the_weight(form: LinearForm, residual: bool) -> None:
    ops = PackedOps(torch.bfloat16, form)
    weight, x = torch.randn(32, 64).div(8).bfloat16(), torch.randn(5, 64)
    other = torch.randn(5, 32) if residual else None
    y = ops.linear(x, ops.pack_linear(weight), other)
    expected = REFERENCE.linear(x, REFERENCE.pack_linear(weight), other)
    assert y.dtype == torch.float32
    tolerance = 1e-5 if form == "half" else 2e-2
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_a_row_is_multiplied_alike_alone_and_in_a_batch(form: LinearForm) -> None:
    ops = PackedOps(torch.bfloat16, form)
    packed = ops.pack_linear(torch.randn(96, 64).div(8).bfloat16())
    x = torch.randn(40, 64, dtype=ops.activation_dtype(torch.bfloat16))
    together = ops.linear(x, packed)
    for rows in (slice(0, 1), slice(7, 10), slice(3, 40)):
        close(ops.linear(x[rows], packed), together[rows])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [2.0**-40, 2.0**-5, 2.0**30])
def test_an_exact_weight_is_read_back_bit_for_bit(form: LinearForm, scale: float) -> None:
    ops = PackedOps(torch.bfloat16, form)
    weight = torch.randn(32, 64).mul(scale).bfloat16()
    packed = ops.pack_linear(weight, exact=True)
    assert torch.equal(ops.linear(torch.eye(64).bfloat16(), packed).t(), weight)


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**30])
def test_weights_that_float16_cannot_hold_keep_their_own_dtype(scale: float) -> None:
    ops = PackedOps(torch.bfloat16, "half")
    weight, x = torch.randn(32, 64).mul(scale).bfloat16(), torch.randn(5, 64)
    y = ops.linear(x, ops.pack_linear(weight))
    expected = REFERENCE.linear(x, REFERENCE.pack_linear(weight))
    torch.testing.assert_close(y / scale, expected / scale, rtol=2e-2, atol=0.2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (7, 3, 128)])
def test_rms_norm_agrees_with_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(PackedOps(dtype).rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_rms_norm_of_wide_activations_stays_wide(weight_dtype: torch.dtype) -> None:
    x, weight = torch.randn(9, 64), torch.randn(64).to(weight_dtype)
    actual = PackedOps(torch.bfloat16).rms_norm(x, weight, 1e-6)
    close(actual, REFERENCE.rms_norm(x, weight, 1e-6))


def test_rms_norm_keeps_a_wider_weights_precision() -> None:
    x, weight = torch.randn(9, 64).bfloat16(), 1 + torch.randn(64) / 1000
    actual = PackedOps(torch.bfloat16).rms_norm(x, weight, 1e-6)
    close(actual, REFERENCE.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [1, 33])
def test_rotary_agrees_with_the_reference(dtype: torch.dtype, head_dim: int, rows: int) -> None:
    qkv = torch.randn(rows, 7, head_dim).to(dtype)
    cos, sin = torch.randn(2, rows, head_dim).to(dtype)
    expected = REFERENCE.rotary(qkv[:, :5], cos, sin)
    close(PackedOps(dtype).rotary(qkv[:, :5], cos, sin), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_agrees_with_the_reference(dtype: torch.dtype, rows: int, activation) -> None:
    gate_up = torch.randn(rows, 96).to(dtype)
    close(PackedOps(dtype).gated(gate_up, activation), REFERENCE.gated(gate_up, activation))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [8, 16])
def test_write_kv_fills_the_same_places(paged, dtype: torch.dtype, block_size: int) -> None:
    spec = AttentionSpec(6, 3, 16, 1.0)
    step = paged(
        spec, decodes=(1, 16, 17), chunks=((0, 20), (5, 30)), block_size=block_size, dtype=dtype
    )
    ops, kv = PackedOps(dtype), step.fresh_kv()
    ops.write_kv(kv, step.keys, step.values, step.batch.kv_slots)
    REFERENCE.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    for mine, theirs in zip(kv, step.kv, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


def test_write_kv_rounds_wide_keys_and_values_to_the_pool() -> None:
    keys, values = torch.randn(2, 1, 2, 16)
    kv, expected = (
        KVLayer(torch.zeros(3, 2, 8, 16).bfloat16(), torch.zeros(3, 2, 8, 16).bfloat16())
        for _ in range(2)
    )
    PackedOps(torch.bfloat16).write_kv(kv, keys, values, torch.tensor([9]))
    REFERENCE.write_kv(expected, keys, values, torch.tensor([9]))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(kv, expected, strict=True))


def test_write_kv_notices_that_a_buffer_of_slots_was_filled_anew() -> None:
    ops = PackedOps(torch.float32)
    kv = KVLayer(torch.zeros(4, 2, 8, 16), torch.zeros(4, 2, 8, 16))
    slots = torch.tensor([9])
    first, second = torch.ones(1, 2, 16), torch.full((1, 2, 16), 2.0)
    ops.write_kv(kv, first, first, slots)
    slots.fill_(17)
    ops.write_kv(kv, second, second, slots)
    assert kv.keys[1, :, 1].eq(1).all()
    assert kv.keys[2, :, 1].eq(2).all()


def test_write_kv_clears_what_an_earlier_owner_left_in_the_block() -> None:
    for ops in (REFERENCE, PackedOps(torch.float32)):
        kv = KVLayer(torch.full((3, 2, 8, 16), torch.nan), torch.full((3, 2, 8, 16), torch.nan))
        new = torch.ones(2, 2, 16)
        ops.write_kv(kv, new, new, torch.tensor([8, 9]))
        for pool in kv:
            assert pool[1, :, :2].eq(1).all()
            assert pool[1, :, 2:].eq(0).all()
            assert pool[2].isnan().all()
