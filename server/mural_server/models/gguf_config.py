"""A configuration from a GGUF file's metadata, by the renames that transformers keeps.

Where transformers passes over a key that changes the forward pass, it is honoured or refused
here: scaled rotary frequencies (``rope_freqs.weight``, ``rope.scaling``), biases, the head size
of Qwen3, Gemma 3's attention scale.
"""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig
from transformers.integrations import GGUF_CONFIG_MAPPING

from mural_server.models.errors import CheckpointError, UnsupportedModel
from mural_server.models.gguf_file import GGUFFile, MetadataValue

__all__ = ["gguf_config", "gguf_eos_ids"]

_MODEL_TYPES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3_text"}
_GEMMA3_27B_LAYERS = 62
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

Values = dict[str, MetadataValue | dict[str, int | float | str]]


def gguf_config(file: GGUFFile) -> PreTrainedConfig:
    """Raise `UnsupportedModel` naming an architecture or a key that is not implemented."""
    arch = file.text("general.architecture")
    if arch not in _MODEL_TYPES:
        known = ", ".join(_MODEL_TYPES)
        raise UnsupportedModel(f"GGUF architecture {arch!r} is not supported; supported: {known}")
    if (file.number("split.count") or 1) > 1:
        raise UnsupportedModel("split.count: a GGUF model in several files is not supported")
    if file.number(f"{arch}.expert_count"):
        raise UnsupportedModel(f"{arch}.expert_count: mixtures of experts are not supported")
    values = _renamed(file, arch)
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    if "vocab_size" not in values:
        values["vocab_size"] = _vocabulary(file)
    values |= (
        _biases(file) | _head_dim(file, arch) | _rope_scaling(file, arch) | _window(file, arch)
    )
    model_type = "mistral" if arch == "llama" and "sliding_window" in values else _MODEL_TYPES[arch]
    config = AutoConfig.for_model(model_type, **values)
    if "rope_freqs.weight" in file.tensors:
        # Llama 3's scaling, which llama.cpp writes as one divisor per frequency.
        config.rope_parameters["frequency_factors"] = file.read("rope_freqs.weight").tolist()
    if arch == "gemma3":
        config.query_pre_attn_scalar = _gemma3_scalar(config)
    return config


def gguf_eos_ids(file: GGUFFile) -> tuple[int, ...]:
    """Ids that end a generation: of the text, of a turn, of a message to a tool."""
    ids = [file.number(f"tokenizer.ggml.{key}") for key in _ENDS]
    return tuple(dict.fromkeys(int(number) for number in ids if number is not None))


def _renamed(file: GGUFFile, arch: str) -> Values:
    values: Values = {}
    for prefix in (arch, "tokenizer"):
        for key, name in GGUF_CONFIG_MAPPING[prefix].items():
            value = file.metadata.get(f"{prefix}.{key}")
            if name is not None and value is not None:
                values[name] = value
    return values


def _vocabulary(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path} holds no token_embd.weight")
    return file.tensors["token_embd.weight"].shape[0]


def _biases(file: GGUFFile) -> Values:
    # No key tells; Qwen2's biases on query, key and value alone are the family's own.
    tensors = {"attention_bias": "blk.0.attn_output.bias", "mlp_bias": "blk.0.ffn_down.bias"}
    return {name: True for name, tensor in tensors.items() if tensor in file.tensors}


def _head_dim(file: GGUFFile, arch: str) -> Values:
    width = file.number(f"{arch}.attention.key_length")
    rotated = file.number(f"{arch}.rope.dimension_count")
    if width is None:
        return {}
    if (rotated or width) != width:
        raise UnsupportedModel(f"{arch}.rope.dimension_count: partial rotation is not supported")
    if file.number(f"{arch}.attention.value_length") not in (None, width):
        raise UnsupportedModel(f"{arch}.attention.value_length differs from key_length")
    return {"head_dim": width}


def _rope_scaling(file: GGUFFile, arch: str) -> Values:
    kind, prefix = file.text(f"{arch}.rope.scaling.type"), f"{arch}.rope.scaling"
    factor = file.number(f"{prefix}.factor")
    if kind in ("", "none"):
        return {}
    if kind not in ("linear", "yarn") or factor is None:
        raise UnsupportedModel(f"{prefix}.type {kind!r} is not supported; supported: linear, yarn")
    scaling: dict[str, int | float | str] = {"rope_type": kind, "factor": factor}
    original = file.number(f"{prefix}.original_context_length")
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _window(file: GGUFFile, arch: str) -> Values:
    window = file.number(f"{arch}.attention.sliding_window")
    return {} if window is None else {"sliding_window": window}


def _gemma3_scalar(config: PreTrainedConfig) -> int:
    # The file does not say: the largest model scales by its width per head, as llama.cpp has it.
    if config.num_hidden_layers == _GEMMA3_27B_LAYERS:
        return int(config.hidden_size // config.num_attention_heads)
    return int(config.head_dim)
