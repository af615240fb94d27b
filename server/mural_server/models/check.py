"""What of a base model can be judged without torch, which takes seconds to load: that it is one, of
a family that runs here, and that its files are there to their ends."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mural_server.models.errors import CheckpointError, UnsupportedModel

__all__ = ["ARCHITECTURES", "GGUF_VERSIONS", "check_model", "config_file", "is_gguf", "unsupported"]

ARCHITECTURES: Final = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "Gemma3ForCausalLM",
)
"""Those that run here, by the names that a configuration gives them."""
GGUF_VERSIONS: Final = (2, 3)
MAX_JSON_BYTES: Final = 100_000_000
"""Of a safetensors header, as its own library has it, and of what else is read here."""

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_HEAD_BYTES = 8  # a safetensors header's length; a GGUF file's magic and version
_LFS_POINTER = b"version https://git-lfs."

T = TypeVar("T")


class _Config(msgspec.Struct):
    architectures: list[str] | None = None


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Entry(msgspec.Struct):
    """Of a header; its ``__metadata__`` has no place in the file."""

    data_offsets: tuple[int, int] = (0, 0)


def check_model(path: str) -> None:
    """Raise `CheckpointError` or `UnsupportedModel` for what no core could load.

    What is in its weights, and what a GGUF file says of itself, the core finds.
    """
    try:
        if is_gguf(path):
            _check_gguf(Path(path))
        else:
            _check_folder(Path(path))
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {error.strerror}") from None


def is_gguf(path: str) -> bool:
    """Whether it is a GGUF file rather than a directory; raise `CheckpointError` for neither."""
    if path.endswith(".gguf"):
        return True
    # transformers would take a name that is no folder for one to download.
    if not Path(path).is_dir():
        raise CheckpointError(
            f"{path} is neither a model directory nor a .gguf file on this machine (nothing is "
            "downloaded)"
        )
    return False


def config_file(folder: Path) -> Path:
    """The configuration's file; raise `CheckpointError` where there is none."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} is no model directory: it has no config.json")
    return folder / "config.json"


def unsupported(names: Iterable[str]) -> UnsupportedModel:
    """The refusal of a model of these architectures."""
    return UnsupportedModel(
        f"{', '.join(names)} is not supported; supported architectures: {', '.join(ARCHITECTURES)}"
    )


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head[:4] != b"GGUF" or int.from_bytes(head[4:], "little") not in GGUF_VERSIONS:
        raise _pointer(path, head) or CheckpointError(
            f"{path} is not a GGUF file of version 2 or 3"
        )


def _check_folder(folder: Path) -> None:
    names = _read(config_file(folder), _Config).architectures
    if names and not set(names) & set(ARCHITECTURES):
        raise unsupported(names)
    shards = {_SINGLE}
    if (folder / _INDEX).is_file():
        shards = set(_read(folder / _INDEX, _Index).weight_map.values())
    for name in sorted(shards):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder} has no {name}")
        _check_shard(folder / name)


def _check_shard(path: Path) -> None:
    """By its header: so is found what was not downloaded, or not to its end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
        length = int.from_bytes(head, "little")
        if length > min(size - _HEAD_BYTES, MAX_JSON_BYTES):
            raise _pointer(path, head) or CheckpointError(
                f"{path} is no safetensors file, or cut off"
            )
        header = file.read(length)
    try:
        entries = msgspec.json.decode(header, type=dict[str, _Entry])
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path} is no safetensors file") from None
    end = _HEAD_BYTES + length + max((e.data_offsets[1] for e in entries.values()), default=0)
    if end > size:
        raise CheckpointError(f"{path} is cut off: it has {size} bytes of {end}")


def _pointer(path: Path, head: bytes) -> CheckpointError | None:
    """The refusal of what a clone without Git LFS has in a file's place, if it is that."""
    if len(head) < _HEAD_BYTES or not _LFS_POINTER.startswith(head):
        return None
    return CheckpointError(f"{path} is a pointer of Git LFS: `git lfs pull` fetches the file")


def _read(path: Path, kind: type[T]) -> T:
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
