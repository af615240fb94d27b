"""What a decoder looks like, in one plain record: the outcome of reading a configuration.

A family's `describe` turns transformers' configuration into an `Architecture` and refuses, by
name, whatever would have to be ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedConfig

from mural_server.layers.rotary import RotarySpec, UnsupportedRotary, rotary_spec
from mural_server.models.errors import UnsupportedModel
from mural_server.ops.base import Activation
from mural_server.ops.batch import AttentionSpec

__all__ = [
    "Architecture",
    "LayerKind",
    "activation",
    "head_dim",
    "layer_types",
    "read_rotary",
    "refuse",
    "served_positions",
    "sliding_kinds",
]

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Settings that change the forward pass in some model and are implemented in none here.
_NEVER = (
    "quantization_config",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "attn_logit_softcapping",
    "use_bidirectional_attention",
    "dual_chunk_attention_config",
    "is_heterogeneous",
)


class LayerKind(NamedTuple):
    """How one layer differs from its siblings."""

    rotary: int
    """Index into `Architecture.rotary`."""
    sliding_window: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Architecture:
    """A decoder's sizes and switches; sizes are counted in elements."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_scale: float
    layers: tuple[LayerKind, ...]
    rotary: tuple[RotarySpec, ...]
    max_position: int
    rms_norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    embed_scale: float | None = None
    final_logit_softcap: float | None = None

    def attention_spec(self, layer: LayerKind) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.attention_scale,
            sliding_window=layer.sliding_window,
        )


def refuse(config: PreTrainedConfig, names: Sequence[str] = ()) -> None:
    """Raise `UnsupportedModel` for a setting in ``names``, or that no family has, that is set."""
    for name in (*_NEVER, *names):
        if getattr(config, name, None):
            raise UnsupportedModel(f"{config.model_type}: {name} is not supported")


def activation(config: PreTrainedConfig, name: str) -> Activation:
    """Map a ``hidden_act`` to the operator's; raise `UnsupportedModel` for an unknown one."""
    found = _ACTIVATIONS.get(name)
    if found is None:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModel(
            f"{config.model_type}: activation {name!r} is not supported; supported: {known}"
        )
    return found


def head_dim(config: PreTrainedConfig) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )


def read_rotary(config: PreTrainedConfig, layer_type: str | None = None) -> RotarySpec:
    """`rotary_spec`, with its refusal told as one of the model."""
    try:
        return rotary_spec(config, head_dim(config), layer_type)
    except UnsupportedRotary as error:
        raise UnsupportedModel(f"{config.model_type}: {error}") from None


def served_positions(config: PreTrainedConfig) -> int:
    """Tokens that the rotary tables cover: the stated maximum, or what YaRN stretches it to."""
    stated = int(config.max_position_embeddings)
    rope = config.rope_parameters
    if rope.get("rope_type") != "yarn":
        return stated
    return max(stated, int(rope["factor"] * rope["original_max_position_embeddings"]))


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Each layer's attention, "full_attention" where the configuration says nothing."""
    count = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or [_FULL] * count)
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown or len(types) != count:
        raise UnsupportedModel(
            f"{config.model_type}: layer_types {unknown or len(types)} do not fit"
        )
    return types


def sliding_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """Layers of one rotary kind, with the window where ``layer_types`` says sliding."""
    return tuple(
        LayerKind(0, config.sliding_window if kind == _SLIDING else None)
        for kind in layer_types(config)
    )
