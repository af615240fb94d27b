"""Rotary position embedding (Su et al., arXiv 2104.09864) and the scalings of its frequencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

__all__ = ["RotaryEmbedding", "RotarySpec", "Rotation", "UnsupportedRotary", "rotary_spec"]

# "dynamic" changes its frequencies beyond max_position_embeddings only, where nothing is served;
# "longrope" has two sets of frequencies and is not among these.
_SCALED = ("linear", "dynamic", "yarn", "llama3")


class UnsupportedRotary(ValueError):
    """The configuration asks for a rotary embedding that is not implemented."""


class Rotation(NamedTuple):
    """One step's rotary factors, gathered once and used by every layer of one kind."""

    cos: Tensor
    """[rows, head_dim]"""
    sin: Tensor
    """[rows, head_dim], the first half negated as `Ops.rotary` wants it."""


@dataclass(frozen=True, slots=True, eq=False)
class RotarySpec:
    """``inv_freq`` float32 [head_dim / 2]; ``attention_scaling`` multiplies cos and sin (YaRN)."""

    inv_freq: Tensor
    attention_scaling: float = 1.0


def rotary_spec(
    config: PreTrainedConfig, head_dim: int, layer_type: str | None = None
) -> RotarySpec:
    """Frequencies by transformers' own functions; raise `UnsupportedRotary` naming what is new.

    ``layer_type`` picks one of several sets in a configuration that nests them. A key
    ``frequency_factors`` (what a GGUF file holds as ``rope_freqs.weight``) divides the frequencies.
    """
    nested = config.rope_parameters
    parameters: Mapping[str, object] = nested if layer_type is None else nested[layer_type]
    rope_type = str(parameters.get("rope_type", "default"))
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedRotary("partial_rotary_factor is not supported")
    if "rope_theta" not in parameters:
        raise UnsupportedRotary("rope_parameters without one rope_theta are not supported")
    if "mrope_section" in parameters:
        raise UnsupportedRotary("mrope_section (multimodal rotary embedding) is not supported")
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        inv_freq, scaling = 1.0 / (float(str(parameters["rope_theta"])) ** exponents), 1.0
    elif rope_type in _SCALED:
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_type](config, layer_type=layer_type)
    else:
        known = ", ".join(("default", *_SCALED))
        raise UnsupportedRotary(f"rope type {rope_type!r} is not supported; supported: {known}")
    factors = parameters.get("frequency_factors")
    if factors is not None:
        inv_freq = inv_freq / torch.tensor(factors, dtype=torch.float32)
    return RotarySpec(inv_freq.float(), float(scaling))


class RotaryEmbedding(nn.Module):
    """Tables of cos and sin for positions ``[0, max_position)``, in the model's dtype."""

    cos: Tensor
    sin: Tensor

    def __init__(self, spec: RotarySpec, max_position: int, dtype: torch.dtype) -> None:
        super().__init__()
        positions = torch.arange(max_position, dtype=torch.float32)
        angles = torch.outer(positions, spec.inv_freq)
        cos = angles.cos().mul_(spec.attention_scaling).to(dtype)
        sin = angles.sin().mul_(spec.attention_scaling).to(dtype)
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """``positions`` int64 [rows]; an IndexError for one outside the tables."""
        return Rotation(
            torch.index_select(self.cos, 0, positions), torch.index_select(self.sin, 0, positions)
        )
