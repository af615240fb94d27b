"""PackedOps against ReferenceOps: linears and the small operators."""

from __future__ import annotations

import pytest
import torch

from mural_server.ops import AttentionSpec, KVLayer, PackedOps, ReferenceOps, packed

REFERENCE = ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """bf16: two roundings of 2^-8 against the reference's one."""
    assert actual.dtype == expected.dtype
    tolerance = 1e-5 if actual.dtype == torch.float32 else 1.6e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 16, 130])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_agrees_with_the_reference(dtype: torch.dtype, rows: int, bias: bool) -> None:
    ops = PackedOps(dtype)
    weight = torch.randn(96, 64).div(8).to(dtype)
    x, residual = torch.randn(rows, 64).to(dtype), torch.randn(rows, 96).to(dtype)
    offset = torch.randn(96).to(dtype) if bias else None
    mine, theirs = ops.pack_linear(weight, offset), REFERENCE.pack_linear(weight, offset)
    assert (mine.in_features, mine.out_features) == (64, 96)
    close(ops.linear(x, mine), REFERENCE.linear(x, theirs))
    before = residual.clone()
    close(ops.linear(x, mine, residual), REFERENCE.linear(x, theirs, residual))
    assert torch.equal(residual, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_takes_a_column_slice(dtype: torch.dtype) -> None:
    ops = PackedOps(dtype)
    weight, wide = torch.randn(32, 64).div(8).to(dtype), torch.randn(5, 100).to(dtype)
    expected = REFERENCE.linear(wide[:, 10:74], REFERENCE.pack_linear(weight))
    close(ops.linear(wide[:, 10:74], ops.pack_linear(weight)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_onednns_private_operators_linear_falls_back(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_can_prepack", lambda dtype: False)
    ops = PackedOps(dtype)
    assert not ops.prepacks
    weight, x = torch.randn(32, 64).div(8).to(dtype), torch.randn(5, 64).to(dtype)
    residual = torch.randn(5, 32).to(dtype)
    expected = REFERENCE.linear(x, REFERENCE.pack_linear(weight), residual)
    close(ops.linear(x, ops.pack_linear(weight), residual), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (7, 3, 128)])
def test_rms_norm_agrees_with_the_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    close(PackedOps(dtype).rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


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
