"""Architecture name, as a configuration gives it → class."""

from __future__ import annotations

from collections.abc import Mapping

from transformers import PreTrainedConfig

from mural_server.models.base import CausalLM
from mural_server.models.check import unsupported
from mural_server.models.gemma3 import Gemma3ForCausalLM
from mural_server.models.llama import LlamaForCausalLM, MistralForCausalLM
from mural_server.models.qwen2 import Qwen2ForCausalLM
from mural_server.models.qwen3 import Qwen3ForCausalLM

__all__ = ["MODELS", "model_class"]

MODELS: Mapping[str, type[CausalLM]] = {
    each.__name__: each
    for each in (
        *(LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM),
        Gemma3ForCausalLM,
    )
}
"""As `ARCHITECTURES` names them, where torch need not be loaded."""

# A GGUF file has a model type and no architectures.
_BY_MODEL_TYPE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}


def model_class(config: PreTrainedConfig) -> type[CausalLM]:
    """The class that runs ``config``; raise `UnsupportedModel` with the list of those there are."""
    names = list(config.architectures or [_BY_MODEL_TYPE.get(config.model_type, config.model_type)])
    for name in names:
        if name in MODELS:
            return MODELS[name]
    raise unsupported(names)
