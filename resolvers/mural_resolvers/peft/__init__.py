"""PEFT's files understood in one place: configuration, safetensors header, tensor names, fit."""

from mural_resolvers.peft.config import PeftConfig
from mural_resolvers.peft.header import DTYPE_BYTES, TensorInfo, read_safetensors_header
from mural_resolvers.peft.keys import (
    ParsedKey,
    TensorKind,
    normalize_module,
    parse_tensor_name,
)
from mural_resolvers.peft.plan import AdapterPlan, BaseCopy, ModulePlan, check_adapter

__all__ = [
    "DTYPE_BYTES",
    "AdapterPlan",
    "BaseCopy",
    "ModulePlan",
    "ParsedKey",
    "PeftConfig",
    "TensorInfo",
    "TensorKind",
    "check_adapter",
    "normalize_module",
    "parse_tensor_name",
    "read_safetensors_header",
]
