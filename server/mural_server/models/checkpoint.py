"""A model's tensors under Hugging Face's names, read one at a time from mapped files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import gguf
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mural_server.models.errors import CheckpointError, UnsupportedModel
from mural_server.models.gguf_file import GGUFFile

__all__ = ["Checkpoint", "GGUFCheckpoint", "SafetensorsCheckpoint", "Shape"]

Shape = tuple[int, ...]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_FLOATS = {"F64", "F32", "F16", "BF16"}


class _Slice(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> list[int]: ...


class _Shard(Protocol):
    """What is used of ``safe_open``, which has no types of its own."""

    def keys(self) -> list[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> Tensor: ...


class Checkpoint(ABC):
    """What a checkpoint holds: ``shapes`` by name, and `tensor` to read one."""

    shapes: Mapping[str, Shape]

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Read one tensor, of any float dtype; it may be a view of the mapped file."""


class SafetensorsCheckpoint(Checkpoint):
    """``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists.

    Raises `CheckpointError` naming a file that is missing or damaged or a tensor that the index
    promises and its shard does not hold, and `UnsupportedModel` for a tensor that is not floats.
    """

    def __init__(self, folder: Path) -> None:
        self._files = {name: _opened(folder / name) for name in _shard_names(folder)}
        self._owner: dict[str, str] = {}
        shapes: dict[str, Shape] = {}
        for file, handle in self._files.items():
            for name in handle.keys():  # noqa: SIM118 - a shard is no mapping
                piece = handle.get_slice(name)
                if piece.get_dtype() not in _FLOATS:
                    raise UnsupportedModel(
                        f"{file}: {name} is of type {piece.get_dtype()}; "
                        "quantised safetensors are not supported"
                    )
                if name in self._owner:
                    raise CheckpointError(f"{name} is in both {self._owner[name]} and {file}")
                self._owner[name] = file
                shapes[name] = tuple(piece.get_shape())
        self.shapes = shapes
        self._check_index(folder)

    def tensor(self, name: str) -> Tensor:
        return self._files[self._owner[name]].get_tensor(name)

    def _check_index(self, folder: Path) -> None:
        if not (folder / _INDEX).is_file():
            return
        for name, file in _weight_map(folder).items():
            if self._owner.get(name) != file:
                raise CheckpointError(f"{_INDEX} places {name} in {file}, which does not hold it")


def _shard_names(folder: Path) -> list[str]:
    if (folder / _INDEX).is_file():
        names = sorted(set(_weight_map(folder).values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{_INDEX} names {name!r}, which is not a file beside it")
        return names
    if (folder / _SINGLE).is_file():
        return [_SINGLE]
    raise CheckpointError(f"{folder} holds neither {_SINGLE} nor {_INDEX}")


def _weight_map(folder: Path) -> dict[str, str]:
    try:
        index = json.loads((folder / _INDEX).read_bytes())
        return {str(name): str(file) for name, file in index["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{folder / _INDEX} is damaged: {error!r}") from None


def _opened(path: Path) -> _Shard:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None


class GGUFCheckpoint(Checkpoint):
    """A GGUF file; quantised tensors are dequantised to float32 as they are read.

    ``expected`` are the names that the model wants, from which llama.cpp's are found; tensors of
    the file that none of them stands for keep llama.cpp's name. llama.cpp interleaves the rows of
    a Llama's query and key heads and adds 1 to Gemma's norms: both are undone here.
    """

    def __init__(self, file: GGUFFile, layers: int, expected: Iterable[str]) -> None:
        self._file = file
        self._arch = file.text("general.architecture")
        names = _name_map(self._arch, layers)
        by_gguf = {_gguf_name(names, name): name for name in expected}
        self._gguf_names = {by_gguf.get(name, name): name for name in file.tensors}
        self.shapes = {
            name: file.tensors[gguf_name].shape for name, gguf_name in self._gguf_names.items()
        }

    def tensor(self, name: str) -> Tensor:
        gguf_name = self._gguf_names[name]
        values = self._file.read(gguf_name)
        if self._arch == "llama":
            return self._uninterleaved(gguf_name, values)
        if self._arch == "gemma3" and gguf_name.endswith("norm.weight"):
            return values.sub_(1.0)
        return values

    def _uninterleaved(self, gguf_name: str, rows: Tensor) -> Tensor:
        query_heads = self._file.number("llama.attention.head_count")
        for part, key in (("attn_q", "head_count"), ("attn_k", "head_count_kv")):
            if f".{part}." in gguf_name:
                heads = int(self._file.number(f"llama.attention.{key}") or query_heads or 1)
                pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
                return pairs.swapaxes(1, 2).reshape(rows.shape)
        return rows


def _gguf_name(names: gguf.TensorNameMap, name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    return f"{names.get_name(stem)}.{suffix}"


def _name_map(arch: str, layers: int) -> gguf.TensorNameMap:
    for key, value in gguf.MODEL_ARCH_NAMES.items():
        if value == arch:
            return gguf.get_tensor_name_map(key, layers)
    raise UnsupportedModel(f"GGUF architecture {arch!r} is not known")
