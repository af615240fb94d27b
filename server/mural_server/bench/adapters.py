"""Random adapters in PEFT's form, the same at every run."""

from __future__ import annotations

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from mural_resolvers.manifest import build_manifest
from mural_resolvers.names import parse_name
from mural_resolvers.request import LoRARequest
from mural_server.bench.setup import Setup
from mural_server.models.source import load_config

__all__ = ["ALL_LINEARS", "DTYPES", "adapter_folder", "lora_requests", "make_adapters"]

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
A_SCALE, B_SCALE = 1.0, 0.02
"""A keeps the size of its input; B makes a delta that is felt and does not drown the base."""


def make_adapters(setup: Setup) -> None:
    """Write every adapter of the setup below its ``adapter_dir``, on all seven linears."""
    rank = setup.sizes.rank
    config = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules=list(ALL_LINEARS)
    )
    # Without memory: only the names and shapes are wanted.
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(load_config(setup.model))
        shapes = {
            name: weight.shape
            for name, weight in get_peft_model_state_dict(get_peft_model(base, config)).items()
        }
    config.inference_mode = True
    for index, adapter in enumerate(setup.adapters):
        folder = adapter_folder(setup, adapter)
        folder.mkdir(parents=True)
        config.save_pretrained(str(folder))
        weights = _random_weights(shapes, setup.seed * 100_003 + index)
        dtype = DTYPES[setup.dtype]
        save_file(
            {name: weight.to(dtype) for name, weight in weights.items()},
            str(folder / "adapter_model.safetensors"),
            metadata={"format": "pt"},
        )


def adapter_folder(setup: Setup, adapter: str) -> Path:
    """Where the directory resolver finds it."""
    name = parse_name(adapter)
    return Path(setup.adapter_dir, name.tenant, name.adapter, name.version or "")


def lora_requests(setup: Setup) -> dict[str, LoRARequest]:
    """Every adapter as the engine core wants it, by name."""
    return {
        name: LoRARequest(
            lora_name=name,
            lora_int_id=index,
            lora_path=str(adapter_folder(setup, name)),
            digest=build_manifest(adapter_folder(setup, name)).digest,
        )
        for index, name in enumerate(setup.adapters, start=1)
    }


def _random_weights(shapes: dict[str, torch.Size], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        scale = (A_SCALE if ".lora_A." in name else B_SCALE) * shape[-1] ** -0.5
        weights[name] = torch.randn(shape, generator=generator) * scale
    return weights
