"""What a decoder looks like, in one plain record: the outcome of reading a configuration.

`read_architecture` has what all families share; a family's `describe` adds its own. Whatever
would have to be ignored is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from transformers import PreTrainedConfig

from mural_server.layers.rotary import RotarySpec, UnsupportedRotary, rotary_spec
from mural_server.models.errors import UnsupportedModel
from mural_server.ops.base import Activation
from mural_server.ops.batch import AttentionSpec

__all__ = [
    "FULL",
    "SLIDING",
    "Architecture",
    "LayerKind",
    "layer_types",
    "read_architecture",
    "read_rotary",
]

FULL, SLIDING = "full_attention", "sliding_attention"
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


def read_architecture(config: PreTrainedConfig, hidden_act: str) -> Architecture:
    """What all families share, layers of one rotary kind, windows where ``layer_types`` says so.

    Raises `UnsupportedModel` naming the setting that is not implemented.
    """
    for name in _NEVER:
        if getattr(config, name, None):
            raise UnsupportedModel(f"{config.model_type}: {name} is not supported")
    if config.num_attention_heads % config.num_key_value_heads:
        raise UnsupportedModel(
            f"{config.model_type}: {config.num_attention_heads} query heads cannot share "
            f"{config.num_key_value_heads} key and value heads"
        )
    sliding = [kind == SLIDING for kind in layer_types(config)]
    return Architecture(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        attention_scale=_head_dim(config) ** -0.5,
        layers=tuple(LayerKind(0, config.sliding_window if here else None) for here in sliding),
        rotary=(),
        max_position=_served_positions(config),
        rms_norm_eps=config.rms_norm_eps,
        activation=_activation(config, hidden_act),
        tie_word_embeddings=bool(config.tie_word_embeddings),
    )


def read_rotary(config: PreTrainedConfig, layer_type: str | None = None) -> RotarySpec:
    """`rotary_spec`, with its refusal told as one of the model."""
    try:
        return rotary_spec(config, _head_dim(config), layer_type)
    except UnsupportedRotary as error:
        raise UnsupportedModel(f"{config.model_type}: {error}") from None


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Each layer's attention, `FULL` where the configuration says nothing."""
    count = config.num_hidden_layers
    types = list(getattr(config, "layer_types", None) or [FULL] * count)
    if len(types) != count or not set(types) <= {FULL, SLIDING}:
        raise UnsupportedModel(
            f"{config.model_type}: layer_types {sorted(set(types))} of {len(types)} layers are not "
            f"supported; supported: {FULL} and {SLIDING}, one for each of {count} layers"
        )
    return types


def _activation(config: PreTrainedConfig, name: str) -> Activation:
    found = _ACTIVATIONS.get(name)
    if found is None:
        known = ", ".join(_ACTIVATIONS)
        raise UnsupportedModel(
            f"{config.model_type}: activation {name!r} is not supported; supported: {known}"
        )
    return found


def _head_dim(config: PreTrainedConfig) -> int:
    stated = getattr(config, "head_dim", None)
    return int(stated or config.hidden_size // config.num_attention_heads)


def _served_positions(config: PreTrainedConfig) -> int:
    # YaRN stretches the original context; configurations often state only the latter.
    stated = int(config.max_position_embeddings)
    rope = config.rope_parameters
    if rope.get("rope_type") != "yarn":
        return stated
    return max(stated, int(rope["factor"] * rope["original_max_position_embeddings"]))
