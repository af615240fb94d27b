"""Adapter folders made without torch, and the base that they fit."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from mural_resolvers.base_spec import BaseSpec, ModuleSpec

# No test asserts a wall-clock time, and an example's first run may import a library.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

DTYPE_BYTES = {"F32": 4, "F16": 2, "I8": 1, "BF16": 2}

Tensors = dict[str, tuple[str, list[int]]]
WriteAdapter = Callable[..., Path]


def safetensors_bytes(tensors: Tensors, fill: bytes = b"\x01") -> bytes:
    """A valid safetensors file, every byte of whose data is ``fill``."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + fill * end


def pair(module: str, rank: int, in_features: int, out_features: int) -> Tensors:
    """The two tensors of a linear module, as PEFT saves them."""
    return {
        f"base_model.model.{module}.lora_A.weight": ("F32", [rank, in_features]),
        f"base_model.model.{module}.lora_B.weight": ("F32", [out_features, rank]),
    }


@pytest.fixture
def base_spec() -> BaseSpec:
    layers = {
        f"model.layers.{layer}.self_attn.{name}": ModuleSpec("linear", 8, size)
        for layer in range(2)
        for name, size in (("q_proj", 8), ("v_proj", 4))
    }
    return BaseSpec(
        model_names=("tiny",),
        modules={
            "model.embed_tokens": ModuleSpec("embedding", 20, 8),
            **layers,
            "lm_head": ModuleSpec("lm_head", 8, 20),
        },
        vocab_size=20,
        hidden_size=8,
        num_layers=2,
        max_lora_rank=16,
    )


@pytest.fixture
def write_adapter() -> WriteAdapter:
    """Write an adapter of rank 4 on both q_proj; every part can be given otherwise."""

    def write(
        folder: Path,
        *,
        config: dict[str, object] | None = None,
        tensors: Tensors | None = None,
        fill: bytes = b"\x01",
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        raw = {
            "peft_type": "LORA",
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj"],
            "base_model_name_or_path": "tiny",
            **(config or {}),
        }
        if tensors is None:
            tensors = {
                **pair("model.layers.0.self_attn.q_proj", 4, 8, 8),
                **pair("model.layers.1.self_attn.q_proj", 4, 8, 8),
            }
        (folder / "adapter_config.json").write_text(json.dumps(raw))
        (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, fill))
        return folder

    return write


@pytest.fixture
def adapter(tmp_path: Path, write_adapter: WriteAdapter) -> Path:
    return write_adapter(tmp_path / "trained")


@pytest.fixture
def other(tmp_path: Path, write_adapter: WriteAdapter) -> Path:
    """As ``adapter``, with other weights."""
    return write_adapter(tmp_path / "trained anew", fill=b"\x02")
