"""What a file's header tells of host memory is what the adapter then takes there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mural_resolvers.limits import DEFAULT_LIMITS
from mural_server.lora.base_copies import BaseDigests
from mural_server.lora.checkpoint import LoadOptions
from mural_server.lora.host_size import host_bytes_of_files
from mural_server.lora.model import LoRAModel

WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize("served", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"r": 3, "rank_pattern": {"down_proj": 7}},
        {"target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    ],
)
def test_the_header_tells_what_the_weights_take(lab, served, stored, config) -> None:
    path = lab.write(**config).path
    tensors = load_file(path / WEIGHTS)
    # A base's table must stay the base's.
    save_file(
        {key: t.to(stored) if "lora_" in key else t for key, t in tensors.items()}, path / WEIGHTS
    )
    model = LoRAModel.from_local_checkpoint(
        path,
        lab.spec,
        LoadOptions(dtype=served),
        lora_model_id=1,
        base_digest=BaseDigests(lambda module: weight_of(lab, module, served)),
    )
    assert host_bytes_of_files(path, served, DEFAULT_LIMITS) == model.nbytes


def weight_of(lab, module: str, served: str) -> torch.Tensor | None:
    weight = lab.model().base_weight(module)
    return None if weight is None else weight.to(getattr(torch, served))


@pytest.mark.parametrize("weights", [None, b"no header"])
def test_files_that_do_not_tell_it_are_none(tmp_path: Path, weights: bytes | None) -> None:
    if weights is not None:
        (tmp_path / WEIGHTS).write_bytes(weights)
    assert host_bytes_of_files(tmp_path, "float32", DEFAULT_LIMITS) is None
