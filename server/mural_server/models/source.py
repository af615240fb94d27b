"""What transformers reads of a base model beside its weights.

A path is a Hugging Face directory or a ``.gguf`` file. Nothing here goes to the network, and no
code that comes with a model is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from mural_server.models.check import config_file, is_gguf
from mural_server.models.checkpoint import Checkpoint, GGUFCheckpoint, SafetensorsCheckpoint
from mural_server.models.errors import CheckpointError, ModelError, UnsupportedModel
from mural_server.models.gguf_config import gguf_config, gguf_eos_ids
from mural_server.models.gguf_file import GGUFFile
from mural_server.sampling_params import GenerationDefaults
from mural_server.tokenizer import TokenizerState

__all__ = [
    "eos_token_ids",
    "fast_backend",
    "load_config",
    "load_generation_defaults",
    "load_tokenizer",
    "open_checkpoint",
    "tokenizer_state",
]


def load_config(path: str) -> PreTrainedConfig:
    """The configuration; raise `CheckpointError` or `UnsupportedModel` with the reason."""
    if is_gguf(path):
        with _read_from(path):
            return gguf_config(GGUFFile(Path(path)))
    config_file(Path(path))
    with _read_from(path):
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer, with its chat template where the model has one."""
    if is_gguf(path):
        # AutoTokenizer would read the file thrice, slowly, to arrive at the same tokenizer.
        folder, file = str(Path(path).parent), Path(path).name
        with _read_from(path):
            return PreTrainedTokenizerFast.from_pretrained(
                folder, gguf_file=file, local_files_only=True
            )
    with _read_from(path):
        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)


def fast_backend(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """What works beneath a tokenizer; raise `UnsupportedModel` for one written in Python."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise UnsupportedModel(
            f"The model's tokenizer cannot be used: {type(tokenizer).__name__} is not a fast one"
        )
    return backend


def tokenizer_state(tokenizer: PreTrainedTokenizerBase) -> TokenizerState:
    """All that `ModelTokenizer` needs to do as ``tokenizer`` does; raise `UnsupportedModel`."""
    template: str | dict[str, str] | None = tokenizer.chat_template
    return TokenizerState(
        backend=fast_backend(tokenizer).to_str(),
        split_special_tokens=tokenizer.split_special_tokens,
        special_tokens={
            name: str(token)
            for name, token in tokenizer.special_tokens_map.items()
            if not isinstance(token, list)
        },
        chat_template=template.get("default") if isinstance(template, dict) else template,
    )


def load_generation_defaults(path: str) -> GenerationDefaults:
    """Recommended sampling."""
    config = _generation_config(path)
    names = GenerationDefaults.__struct_fields__
    return GenerationDefaults(**{name: getattr(config, name, None) for name in names})


def eos_token_ids(path: str) -> tuple[int, ...]:
    """Ids that end a generation: those of the generation defaults (else the configuration), and
    the tokenizer's own.
    """
    if is_gguf(path):
        return gguf_eos_ids(GGUFFile(Path(path)))
    stated = (_generation_config(path) or load_config(path)).eos_token_id
    ids = (*_as_ids(stated), *_as_ids(load_tokenizer(path).eos_token_id))
    return tuple(dict.fromkeys(ids))


def open_checkpoint(path: str, layers: int, expected: Iterable[str]) -> Checkpoint:
    """The tensors at ``path``, under the names that the model of ``layers`` layers expects."""
    if not is_gguf(path):
        return SafetensorsCheckpoint(Path(path))
    return GGUFCheckpoint(GGUFFile(Path(path)), layers, expected)


def _generation_config(path: str) -> GenerationConfig | None:
    if is_gguf(path) or not (Path(path) / "generation_config.json").is_file():
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
