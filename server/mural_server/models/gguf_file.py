"""Reading a GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.

The vocabulary's strings are stepped over, which makes this some fifty times faster than a reader
that keeps them; the tokenizer is transformers' business. Dequantising is the gguf package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from torch import Tensor

from mural_server.models.check import GGUF_VERSIONS
from mural_server.models.errors import CheckpointError, UnsupportedModel

__all__ = ["GGUFFile", "MetadataValue", "TensorInfo"]

MetadataValue = int | float | bool | str | list[int | float | bool]

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q",
    12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4


class TensorInfo(NamedTuple):
    """Where one tensor lies."""

    shape: tuple[int, ...]
    """Slowest axis first, as torch has it."""
    kind: gguf.GGMLQuantizationType
    start: int
    """Byte offset in the file."""
    size: int
    """Bytes."""


class GGUFFile:
    """``metadata`` by key (arrays of strings left out) and ``tensors`` by llama.cpp's names.

    Raises `CheckpointError` where the file is not GGUF or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        self._at = 0
        try:
            self.metadata, self.tensors = self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError, KeyError) as error:
            raise CheckpointError(f"{path} is damaged near byte {self._at}: {error!r}") from None

    def text(self, key: str) -> str:
        """A string of the metadata; "" where it is absent."""
        value = self.metadata.get(key, "")
        return value if isinstance(value, str) else ""

    def number(self, key: str) -> int | float | None:
        """A number of the metadata; None where it is absent."""
        value = self.metadata.get(key)
        return value if isinstance(value, int | float) else None

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32."""
        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.size, info.start)
        rows = math.prod(info.shape[:-1])
        try:
            values = gguf.dequantize(raw.reshape(rows, info.size // rows), info.kind)
        except NotImplementedError:
            raise UnsupportedModel(f"{name} is of type {info.kind.name}: not supported") from None
        # A copy where the file's own bytes came back: those cannot be written to.
        return torch.from_numpy(np.require(values, np.float32, ["W"])).reshape(info.shape)

    def _parse(self) -> tuple[dict[str, MetadataValue], dict[str, TensorInfo]]:
        magic, version = self._bytes[:4], self._unpack("<4xI")
        if magic != b"GGUF" or version not in GGUF_VERSIONS:
            raise CheckpointError(f"{self.path} is not a GGUF file of version 2 or 3")
        tensor_count, key_count = self._unpack("<Q"), self._unpack("<Q")
        metadata: dict[str, MetadataValue] = {}
        for _ in range(key_count):
            key, value = self._string(), self._value(self._unpack("<I"))
            if value is not None:
                metadata[key] = value
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment cannot be {alignment!r}")
        base = -(-self._at // alignment) * alignment
        return metadata, {name: self._placed(name, info, base) for name, info in entries}

    def _placed(self, name: str, info: TensorInfo, base: int) -> TensorInfo:
        placed = info._replace(start=info.start + base)
        if placed.start + placed.size > len(self._bytes):
            raise CheckpointError(f"{self.path} is cut off: it ends before {name} does")
        return placed

    def _tensor_entry(self) -> tuple[str, TensorInfo]:
        name, dimensions = self._string(), self._unpack("<I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise CheckpointError(f"{self.path}: {name} has {dimensions} dimensions")
        shape = tuple(reversed([self._unpack("<Q") for _ in range(dimensions)]))
        number, start = self._unpack("<I"), self._unpack("<Q")
        try:
            kind = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModel(f"{name} is of GGML type {number}: not supported") from None
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block or not all(shape):
            raise CheckpointError(f"{self.path}: {name} of {kind.name} cannot have shape {shape}")
        return name, TensorInfo(shape, kind, start, math.prod(shape) // block * block_bytes)

    def _value(self, kind: int) -> MetadataValue | None:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            value: int | float | bool = self._unpack(_SCALARS[kind])
            return value
        item, count = self._unpack("<I"), self._unpack("<Q")
        if item == _STRING:
            self._step_over_strings(count)
            return None
        form = _SCALARS[item]
        data = self._take(count * struct.calcsize(form))
        return [entry for (entry,) in struct.iter_unpack(form, data)]

    def _step_over_strings(self, count: int) -> None:
        # A vocabulary and its merges are a hundred thousand, in a file that is read thrice.
        length_at, at = struct.Struct("<Q").unpack_from, self._at
        for _ in range(count):
            at += 8 + length_at(self._bytes, at)[0]
        self._at = at

    def _string(self) -> str:
        return self._take(self._unpack("<Q")).decode()

    def _unpack(self, form: str) -> int:
        value: int = struct.unpack(form, self._take(struct.calcsize(form)))[0]
        return value

    def _take(self, size: int) -> bytes:
        start, self._at = self._at, self._at + size
        if self._at > len(self._bytes):
            raise CheckpointError(f"{self.path} is cut off at byte {len(self._bytes)}")
        return self._bytes[start : self._at]
