"""What an adapter may target is known from a model's headers, as it is from the loaded model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from mural_resolvers.errors import InvalidInput
from mural_server.models.checkpoint import GGUFCheckpoint, SafetensorsCheckpoint
from mural_server.models.loader import load_model, read_base_spec
from mural_server.models.location import default_model_path
from mural_server.ops.reference import ReferenceOps

TinyModel = Callable[[str], Path]

FAMILIES = (
    "llama",
    "llama_untied",
    "llama_biased",
    "llama3",
    "llama_yarn",
    "mistral",
    "qwen2",
    "qwen2_sliding",
    "qwen3",
    "gemma3",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_headers_say_what_the_loaded_model_says(family: str, tiny_model: TinyModel) -> None:
    path = str(tiny_model(family))
    loaded = load_model(path, dtype=torch.float32, ops=ReferenceOps())

    spec = read_base_spec(path, 32)

    assert spec == loaded.base_spec((tiny_model(family).name,), 32)


@pytest.mark.parametrize("checkpoint", [SafetensorsCheckpoint, GGUFCheckpoint])
def test_no_weight_is_read(
    checkpoint: type, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(checkpoint, "tensor", fail)
    gguf = checkpoint is GGUFCheckpoint
    path = default_model_path() if gguf else str(tiny_model("llama_untied"))

    spec = read_base_spec(path, 64)

    assert spec.modules["lm_head"].in_features == spec.hidden_size
    assert spec.model_names == (("SmolLM2-135M-Instruct.Q4_1",) if gguf else (Path(path).name,))


def test_a_folder_s_whole_name_is_the_model_s(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "SmolLM2-1.7B")

    assert read_base_spec(str(folder), 64).model_names == ("SmolLM2-1.7B",)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"hidden_size": 128}, "other shapes"), ({"architectures": ["BertModel"]}, "BertModel")],
)
def test_a_model_that_would_not_load_is_refused_with_the_reason(
    changes: dict[str, object], reason: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))

    with pytest.raises(InvalidInput, match=reason):
        read_base_spec(str(folder), 64)


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="neither a model directory nor"):
        read_base_spec(str(tmp_path / "absent"), 64)


def test_whoever_must_not_import_the_server_finds_it_by_entry_point() -> None:
    (found,) = metadata.entry_points(group="mural.base_specs")

    assert found.load() is read_base_spec
