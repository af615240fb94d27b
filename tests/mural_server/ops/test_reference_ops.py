"""The oracle is itself held to torch and to transformers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

from mural_server.ops import AttentionSpec, ReferenceOps, build_lora_batch, segments_of

OPS = ReferenceOps()
DTYPES = (torch.float32, torch.bfloat16)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-5 if actual.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_linear_is_torch_linear(dtype: torch.dtype, bias: bool) -> None:
    weight, x, residual = torch.randn(48, 32), torch.randn(5, 32), torch.randn(5, 48)
    weight, x, residual = weight.to(dtype), x.to(dtype), residual.to(dtype)
    offset = torch.randn(48).to(dtype) if bias else None
    packed = OPS.pack_linear(weight, offset)
    assert (packed.in_features, packed.out_features) == (32, 48)
    close(OPS.linear(x, packed), F.linear(x, weight, offset))
    close(OPS.linear(x, packed, residual), F.linear(x, weight, offset) + residual)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 4, 64).to(dtype), torch.randn(64).to(dtype)
    close(OPS.rms_norm(x, weight, 1e-5), F.rms_norm(x, (64,), weight, 1e-5))


def test_rms_norm_takes_a_wider_weight_as_gemma_does() -> None:
    x = torch.randn(7, 64).bfloat16()
    norm = modeling_gemma2.Gemma2RMSNorm(64, eps=1e-6)
    norm.weight.copy_(torch.randn(64))
    assert torch.equal(OPS.rms_norm(x, 1 + norm.weight, 1e-6), norm(x))


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
def test_rotary_is_transformers_apply_rotary_pos_emb(head_dim: int) -> None:
    queries, keys = torch.randn(2, 6, 3, head_dim)
    angles = torch.outer(torch.arange(6.0), 10000 ** -torch.linspace(0, 1, head_dim // 2))
    cos, sin = (torch.cat((part, part), dim=-1) for part in (angles.cos(), angles.sin()))
    expected = modeling_llama.apply_rotary_pos_emb(
        queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], cos[None], sin[None]
    )
    half = head_dim // 2
    signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
    for x, rotated in zip((queries, keys), expected, strict=True):
        close(OPS.rotary(x, cos, signed), rotated[0].transpose(0, 1))


def test_gated_is_silu_or_tanh_gelu_of_the_first_half_times_the_second() -> None:
    gate_up = torch.randn(4, 20)
    gate, up = gate_up[:, :10], gate_up[:, 10:]
    close(OPS.gated(gate_up, "silu"), F.silu(gate) * up)
    close(OPS.gated(gate_up, "gelu_tanh"), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (9, 3), (8, 1)])
def test_attention_is_torchs_sdpa_over_each_sequence(paged, heads: int, kv_heads: int) -> None:
    spec = AttentionSpec(heads, kv_heads, 32, 0.2)
    step = paged(spec, decodes=(1, 17, 40), chunks=((0, 9), (21, 30)))
    OPS.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    actual = OPS.attention(step.queries, step.kv, step.batch, spec)
    row = 0
    for index, (keys, values) in enumerate(step.histories):
        count = 1 if index < 3 else (9, 30)[index - 3]
        mask = torch.ones(count, len(keys), dtype=torch.bool).tril(len(keys) - count)
        expected = F.scaled_dot_product_attention(
            step.queries[row : row + count].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            scale=0.2,
            enable_gqa=True,
        )
        close(actual[row : row + count], expected[0].transpose(0, 1).flatten(1))
        row += count


def test_attention_with_window_and_softcap_is_gemma_2s(paged) -> None:
    spec = AttentionSpec(4, 2, 32, 0.3, sliding_window=7, logit_softcap=2.0)
    step = paged(spec, chunks=((11, 20),), block_size=8)
    OPS.write_kv(step.kv, step.keys, step.values, step.batch.kv_slots)
    distance = torch.arange(11, 31)[:, None] - torch.arange(31)
    hidden = (distance < 0) | (distance >= 7)
    keys, values = step.histories[0]
    expected, _ = modeling_gemma2.eager_attention_forward(
        SimpleNamespace(num_key_value_groups=2, training=False),
        step.queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        torch.zeros(20, 31).masked_fill(hidden, float("-inf")),
        scaling=0.3,
        softcap=2.0,
    )
    close(OPS.attention(step.queries, step.kv, step.batch, spec), expected[0].flatten(1))


def test_lora_adds_each_rows_own_pair_slice_by_slice() -> None:
    a, b = torch.randn(2, 6, 8), [torch.randn(6, 10), torch.randn(6, 5)]
    x, y = torch.randn(3, 8), torch.randn(3, 15)
    own = [slice(2, 6), None, slice(0, 2)]
    expected = y.clone()
    for row, ranks in enumerate(own):
        if ranks is not None:
            expected[row, :10] += b[0][ranks].t() @ (a[0, ranks] @ x[row])
            expected[row, 10:] += b[1][ranks].t() @ (a[1, ranks] @ x[row])
    OPS.lora(y, x, a, b, build_lora_batch(segments_of([1, -1, 0]), [(0, 2), (2, 6)]))
    close(y, expected)


def test_lora_embedding_adds_the_tokens_column_of_a() -> None:
    a, b = torch.randn(6, 30), torch.randn(6, 10)
    ids, y = torch.tensor([4, 29, 0]), torch.zeros(3, 10)
    OPS.lora_embedding(y, ids, a, b, build_lora_batch(segments_of([1, -1, 0]), [(0, 2), (2, 6)]))
    close(y, torch.stack([a[2:, 4] @ b[2:], torch.zeros(10), a[:2, 0] @ b[:2]]))
