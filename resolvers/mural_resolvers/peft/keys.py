"""Names of tensors in an adapter's file, and which module and which half they mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

__all__ = ["ParsedKey", "TensorKind", "normalize_module", "parse_tensor_name"]


class TensorKind(Enum):
    """What a tensor is to its module."""

    LORA_A = "lora_A"
    LORA_B = "lora_B"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    MAGNITUDE = "lora_magnitude_vector"
    BIAS = "lora_B.bias"
    FULL = "full tensor"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """A tensor's module (the base's own name for it), its kind, and how the file said it.

    ``trained_module`` is the module's name on the model that was trained, which the patterns of
    the configuration refer to. ``adapter`` is PEFT's live adapter name, where the key has one.
    """

    module: str
    kind: TensorKind
    trained_module: str
    adapter: str | None = None


_PREFIX = "base_model.model."

_FORMS = (
    (re.compile(r"(.+)\.lora_A(?:\.([^.]+))?\.weight"), TensorKind.LORA_A),
    (re.compile(r"(.+)\.lora_B(?:\.([^.]+))?\.weight"), TensorKind.LORA_B),
    (re.compile(r"(.+)\.lora_embedding_A(?:\.([^.]+))?"), TensorKind.EMBEDDING_A),
    (re.compile(r"(.+)\.lora_embedding_B(?:\.([^.]+))?"), TensorKind.EMBEDDING_B),
    (re.compile(r"(.+)\.lora_magnitude_vector(?:\.([^.]+))?"), TensorKind.MAGNITUDE),
    (re.compile(r"(.+)\.lora_magnitude_vector(?:\.([^.]+))?\.weight"), TensorKind.MAGNITUDE),
    (re.compile(r"(.+)\.lora_B(?:\.([^.]+))?\.bias"), TensorKind.BIAS),
    (re.compile(r"(.+)\.base_layer\.weight()"), TensorKind.FULL),
    (re.compile(r"(.+)\.weight()"), TensorKind.FULL),
)

# How multimodal checkpoints name the language model inside them.
_LANGUAGE_MODEL = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
)


def normalize_module(module: str) -> str:
    """Give the name that the text model alone has for a module of a multimodal one."""
    for prefix, replacement in _LANGUAGE_MODEL:
        if module.startswith(prefix):
            return replacement + module[len(prefix) :]
    return module


def parse_tensor_name(key: str) -> ParsedKey:
    """Parse a tensor's name in any form that PEFT writes; never raises.

    What has none of the forms is ``UNKNOWN`` with the whole key as its module.
    """
    name = key.removeprefix(_PREFIX)
    for form, kind in _FORMS:
        if (match := form.fullmatch(name)) and ".lora_" not in match[1]:
            module: str = match[1]
            return ParsedKey(normalize_module(module), kind, module, match[2] or None)
    return ParsedKey(name, TensorKind.UNKNOWN, name)
