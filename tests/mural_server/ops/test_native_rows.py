"""The compiled norm, rotation, gate and KV write against ReferenceOps."""

from __future__ import annotations

import pytest
import torch

from mural_server.ops import AttentionSpec, KVLayer, ReferenceOps
from mural_server.ops.native.library import Isa, available, load
from mural_server.ops.native.rows import NativeRows

REFERENCE = ReferenceOps()
ISAS = [
    pytest.param(isa, marks=pytest.mark.skipif(isa not in available(), reason=f"no {isa} here"))
    for isa in ("avx2", "avx512", "avx512fp16")
]
pytestmark = [
    pytest.mark.skipif(not available(), reason="the native operators were not built"),
    pytest.mark.parametrize("isa", ISAS),
]
SIZES = (1, 7, 16, 33, 64, 576, 1000)


def close(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-6) -> None:
    assert actual.dtype == expected.dtype
    rtol = 2e-6 if actual.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("rows", [0, 1, 3, 130])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_rms_norm_agrees_with_the_reference(
    isa: Isa, rows: int, size: int, dtype: torch.dtype
) -> None:
    x, weight = torch.randn(rows, size).mul(3).to(dtype), torch.randn(size).to(dtype)
    close(NativeRows(load(isa)).rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


def test_native_rms_norm_takes_heads_of_a_fused_projection_and_other_shapes(isa: Isa) -> None:
    native, fused, weight = NativeRows(load(isa)), torch.randn(70, 12, 24), torch.randn(24)
    shapes = (fused, fused[:, 3:9], fused[:, :, :24][::2], fused[0, 0], fused.view(7, 10, 12, 24))
    for x in shapes:
        close(native.rms_norm(x, weight, 1e-6), REFERENCE.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e4, 1e15])
def test_native_rms_norm_holds_for_rows_of_any_magnitude(isa: Isa, scale: float) -> None:
    x, weight = torch.randn(4, 100) * scale, torch.randn(100)
    close(NativeRows(load(isa)).rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_gate_agrees_with_the_reference(
    isa: Isa, activation, size: int, dtype: torch.dtype
) -> None:
    native = NativeRows(load(isa))
    for rows in (0, 1, 67):
        both = torch.randn(rows, 2 * size).mul(4).to(dtype)
        # The reference's 1 + tanh(u) loses all digits where it is small.
        close(native.gated(both, activation), REFERENCE.gated(both, activation), atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_native_gate_agrees_far_out_and_keeps_nan_in_its_place(isa: Isa, activation) -> None:
    gates = torch.tensor(
        [-1e4, -200.0, -88.0, -20.0, -1e-20, 0.0, 1e-20, 20.0, 88.0, 1e4, torch.nan]
    )
    both = torch.cat((gates, torch.ones_like(gates))).unsqueeze(0)
    close(NativeRows(load(isa)).gated(both, activation), REFERENCE.gated(both, activation))


def test_native_gate_takes_rows_that_are_apart(isa: Isa) -> None:
    both = torch.randn(9, 200)[:, 30:130]
    close(NativeRows(load(isa)).gated(both, "silu"), REFERENCE.gated(both, "silu"))


@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 96, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_rotary_agrees_with_the_reference(
    isa: Isa, head_dim: int, dtype: torch.dtype
) -> None:
    native = NativeRows(load(isa))
    for rows in (0, 1, 90):
        fused = torch.randn(rows, 9, head_dim).to(dtype)
        cos, sin = torch.randn(2, rows, head_dim).to(dtype)
        for x in (fused, fused[:, 2:5]):
            close(native.rotary(x, cos, sin), REFERENCE.rotary(x, cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 20, 64])
def test_native_kv_write_agrees_with_the_reference_bit_for_bit(
    paged, isa: Isa, dtype: torch.dtype, head_dim: int
) -> None:
    spec = AttentionSpec(6, 3, head_dim, 0.25)
    step = paged(spec, decodes=(5, 16, 17, 33), chunks=((13, 200), (0, 16), (7, 1)), dtype=dtype)
    keys, values = step.keys.float() * 1.01, step.values.float() * 1.01
    keys[0, 0, 0], values[3, 1, 2] = torch.nan, torch.inf
    actual = step.fresh_kv()
    NativeRows(load(isa)).write_kv(actual, keys, values, step.batch.kv_slots)
    REFERENCE.write_kv(step.kv, keys, values, step.batch.kv_slots)
    for written, expected in zip(actual, step.kv, strict=True):
        torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("narrow", [False, True])
def test_native_rotary_and_kv_write_in_one_are_the_two_after_another(
    paged, isa: Isa, dtype: torch.dtype, narrow: bool
) -> None:
    spec = AttentionSpec(6, 3, 40, 0.25)
    step = paged(spec, decodes=(5, 16, 17, 33), chunks=((13, 200), (0, 16), (7, 1)), dtype=dtype)
    qkv = torch.cat((step.queries, step.keys, step.values), dim=1)
    qkv = qkv if narrow else qkv.float()
    cos, sin = torch.randn(2, qkv.shape[0], 40).to(qkv.dtype)
    actual, expected = step.fresh_kv(), step.kv
    slots = step.batch.kv_slots
    queries = NativeRows(load(isa)).rotary_and_write_kv(qkv, cos, sin, actual, slots)
    wanted = REFERENCE.rotary_and_write_kv(qkv, cos, sin, expected, slots)
    close(queries, wanted)
    for written, reference in zip(actual, expected, strict=True):
        tolerance = 2e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(written, reference, rtol=tolerance, atol=1e-6, equal_nan=True)


def test_a_fresh_block_is_cleared_before_any_row_of_it_is_written(isa: Isa) -> None:
    kv = KVLayer(*torch.full((2, 3, 1, 4, 8), torch.nan))
    keys = torch.randn(6, 1, 8)
    slots = torch.tensor([7, 6, 5, 4, 8, 9])
    NativeRows(load(isa)).write_kv(kv, keys, keys, slots)
    assert kv.keys[0].isnan().all()
    assert torch.equal(kv.keys[1, 0], keys[:4, 0].flip(0))
    assert torch.equal(kv.values[2, 0, :2], keys[4:, 0])
    assert kv.values[2, 0, 2:].eq(0).all()


def test_large_batches_are_shared_out_among_threads_with_equal_results(isa: Isa) -> None:
    native, x, weight = NativeRows(load(isa)), torch.randn(300, 576), torch.randn(576)
    cos, sin = torch.randn(2, 300, 64)
    qkv, slots = torch.randn(300, 15, 64), torch.randperm(320)[:300] + 16
    before, outputs = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            kv = KVLayer(torch.zeros(21, 3, 16, 64), torch.zeros(21, 3, 16, 64))
            queries = native.rotary_and_write_kv(qkv, cos, sin, kv, slots)
            turned = native.rotary(qkv, cos, sin)
            normed, gated = native.rms_norm(x, weight, 1e-5), native.gated(x, "silu")
            outputs.append((normed, queries, turned, *kv, gated))
    finally:
        torch.set_num_threads(before)
    for others in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], others, strict=True))
