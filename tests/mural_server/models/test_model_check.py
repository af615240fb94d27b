"""What of a base model is judged without torch: that it is one, and that its files are whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mural_server.models.check import ARCHITECTURES, check_model
from mural_server.models.errors import ModelError
from mural_server.models.location import default_model_path
from mural_server.models.registry import MODELS

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"


def header(end: int) -> bytes:
    data = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, end]}}).encode()
    return len(data).to_bytes(8, "little") + data


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (tmp_path / "model.safetensors").write_bytes(header(4) + b"1234")
    return tmp_path


def test_what_can_be_loaded_is_let_by(tiny_model: Callable[[str], Path], folder: Path) -> None:
    check_model(str(tiny_model("llama")))
    check_model(default_model_path())
    check_model(str(folder))


def test_the_architectures_are_those_that_there_are_classes_for() -> None:
    assert tuple(MODELS) == ARCHITECTURES


def absent(folder: Path) -> Path:
    return folder / "absent"


def another_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def no_configuration(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def damaged_configuration(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def another_family(folder: Path) -> Path:
    (folder / "config.json").write_text('{"architectures": ["BertModel"]}')
    return folder


def no_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def half_the_shards(folder: Path) -> Path:
    index = {"weight_map": {"a": "model.safetensors", "b": "second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def damaged_index(folder: Path) -> Path:
    (folder / "model.safetensors.index.json").write_text("[]")
    return folder


def weights_of(data: bytes) -> Callable[[Path], Path]:
    def spoil(folder: Path) -> Path:
        (folder / "model.safetensors").write_bytes(data)
        return folder

    return spoil


def gguf_of(data: bytes) -> Callable[[Path], Path]:
    def spoil(folder: Path) -> Path:
        (folder / "m.gguf").write_bytes(data)
        return folder / "m.gguf"

    return spoil


def absent_gguf(folder: Path) -> Path:
    return folder / "m.gguf"


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (absent, "neither a model directory nor a .gguf file"),
        (another_file, "neither a model directory nor a .gguf file"),
        (no_configuration, "it has no config.json"),
        (damaged_configuration, "config.json is damaged"),
        (another_family, "BertModel is not supported; supported architectures: LlamaForCausalLM"),
        (no_weights, "has no model.safetensors"),
        (half_the_shards, "has no second.safetensors"),
        (damaged_index, "index.json is damaged"),
        (weights_of(POINTER), "is a pointer of Git LFS"),
        (weights_of(b"<html>"), "is no safetensors file, or cut off"),
        (weights_of(header(4)[:20]), "is no safetensors file, or cut off"),
        (weights_of(header(9) + b"12"), "is cut off: it has"),
        (weights_of(b"\2" + bytes(7) + b"[]"), "is no safetensors file"),
        (gguf_of(b"<html>"), "is not a GGUF file"),
        (gguf_of(b"GGUF\1\0\0\0"), "is not a GGUF file of version 2 or 3"),
        (gguf_of(POINTER), "is a pointer of Git LFS"),
        (absent_gguf, "No such file"),
    ],
)
def test_what_no_core_could_load_is_told_with_its_path(
    folder: Path, spoil: Callable[[Path], Path], word: str
) -> None:
    path = str(spoil(folder))
    with pytest.raises(ModelError) as caught:
        check_model(path)
    assert word in str(caught.value)
    assert path in str(caught.value) or "BertModel" in word
