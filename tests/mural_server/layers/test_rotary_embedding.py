"""Rotary factors are transformers' for every scaling, and unknown ones are refused."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mural_server.layers.rotary import RotaryEmbedding, UnsupportedRotary, rotary_spec

SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
}


def config(rope_type: str, **extra: object) -> LlamaConfig:
    rope = {"rope_type": rope_type, "rope_theta": 5000.0} | SCALINGS.get(rope_type, {}) | extra
    return LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=rope)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rope_type", SCALINGS)
def test_factors_equal_transformers(rope_type: str, dtype: torch.dtype) -> None:
    positions = torch.tensor([0, 1, 7, 99, 255, 7])
    ours = RotaryEmbedding(rotary_spec(config(rope_type), head_dim=32), 256, dtype)(positions)
    theirs = LlamaRotaryEmbedding(config(rope_type))
    cos, sin = theirs(torch.zeros(1, dtype=dtype), positions.unsqueeze(0))
    sign = torch.cat((-torch.ones(16), torch.ones(16))).to(dtype)
    assert torch.equal(ours.cos, cos[0])
    assert torch.equal(ours.sin, sin[0] * sign)


def test_frequency_factors_divide_the_frequencies() -> None:
    stretched = config("default")
    stretched.rope_parameters["frequency_factors"] = [2.0] * 16
    plain = rotary_spec(config("default"), head_dim=32).inv_freq
    assert torch.equal(rotary_spec(stretched, head_dim=32).inv_freq, plain / 2)


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ({"rope_type": "longrope"}, "'longrope' is not supported; supported: default, linear"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "mrope_section"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
)
def test_what_is_not_known_is_refused_by_name(parameters: dict, told: str) -> None:
    unknown = config("default")
    unknown.rope_parameters = {"rope_theta": 1e4} | parameters
    with pytest.raises(UnsupportedRotary, match=told):
        rotary_spec(unknown, head_dim=32)


def test_positions_beyond_the_tables_are_an_error() -> None:
    rotary = RotaryEmbedding(rotary_spec(config("default"), head_dim=32), 8, torch.float32)
    with pytest.raises(IndexError):
        rotary(torch.tensor([8]))
