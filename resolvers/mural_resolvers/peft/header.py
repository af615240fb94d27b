"""The header of a safetensors file, read without torch and validated in full.

Format: 8 bytes of little-endian length, a JSON object of that length, then the tensors' bytes,
which must be covered exactly once (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from mural_resolvers.errors import TooLarge, UnusableAdapter, quoted
from mural_resolvers.files import open_regular
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.strict_json import JsonRefused, JsonValue, parse_object

__all__ = ["DTYPE_BYTES", "TensorInfo", "read_safetensors_header"]

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}

_LENGTH_BYTES = 8
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: safetensors' dtype name, shape, and its bytes' range after the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def num_bytes(self) -> int:
        """The size of the tensor's data in bytes."""
        return self.data_offsets[1] - self.data_offsets[0]


def read_safetensors_header(
    source: Path | bytes,
    limits: AdapterLimits = DEFAULT_LIMITS,
    *,
    file_bytes: int | None = None,
) -> dict[str, TensorInfo]:
    """Read the header of a file, or of bytes that begin one, and check every word of it.

    ``file_bytes`` is the file's whole size where ``source`` is only its beginning (at least the
    header). Links of a path are followed: a caller that must not leave a folder resolves them
    first (``files.contained``). Raises ``UnusableAdapter`` for a header that lies, ``TooLarge``.
    """
    if isinstance(source, bytes):
        head, size = source, len(source) if file_bytes is None else file_bytes
    else:
        head, size = _read_head(source, limits)
    length = _header_length(head, size, limits)
    raw = head[_LENGTH_BYTES : _LENGTH_BYTES + length]
    if len(raw) != length:
        raise _lie("it ends before its header does")
    return _parse(raw, size - _LENGTH_BYTES - length, limits)


def _read_head(path: Path, limits: AdapterLimits) -> tuple[bytes, int]:
    with open_regular(Path(os.path.realpath(path))) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH_BYTES)
        return start + file.read(_header_length(start, size, limits)), size


def _header_length(head: bytes, size: int, limits: AdapterLimits) -> int:
    if len(head) < _LENGTH_BYTES:
        raise _lie("it is shorter than 8 bytes")
    length = int.from_bytes(head[:_LENGTH_BYTES], "little")
    if length > size - _LENGTH_BYTES:
        raise _lie("its header is longer than the file")
    if length > limits.max_header_bytes:
        raise TooLarge(
            f"The safetensors header has {length} bytes; the limit is {limits.max_header_bytes}."
        )
    return length


def _parse(raw: bytes, data_bytes: int, limits: AdapterLimits) -> dict[str, TensorInfo]:
    if not raw.startswith(b"{"):
        raise _lie("its header does not begin with a brace")
    try:
        entries = parse_object(raw, max_bytes=limits.max_header_bytes, max_depth=4)
    except JsonRefused as error:
        raise _lie(f"its header is refused: {error}") from None
    _check_metadata(entries.pop("__metadata__", {}))
    if len(entries) > limits.max_tensors:
        raise TooLarge(
            f"The file has {len(entries)} tensors; at most {limits.max_tensors} are read."
        )
    tensors = {}
    for name, entry in entries.items():
        if not 0 < len(name) <= limits.max_tensor_name_chars:
            raise _lie(f"the name {quoted(name)} is empty or too long")
        tensors[name] = _tensor(name, entry)
    _check_coverage(tensors, data_bytes)
    return tensors


def _check_metadata(metadata: JsonValue) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _lie("__metadata__ is not a map of strings")


def _tensor(name: str, entry: JsonValue) -> TensorInfo:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _lie(f"tensor {quoted(name)} is not described by dtype, shape and data_offsets")
    dtype = entry["dtype"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _lie(f"tensor {quoted(name)} has an unknown dtype")
    shape, offsets = _sizes(entry["shape"]), _sizes(entry["data_offsets"])
    if shape is None or len(shape) > _MAX_DIMENSIONS:
        raise _lie(f"tensor {quoted(name)} has no valid shape")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _lie(f"tensor {quoted(name)} has no valid data_offsets")
    if math.prod(shape) * DTYPE_BYTES[dtype] != offsets[1] - offsets[0]:
        raise _lie(f"tensor {quoted(name)} has a shape that its bytes do not fill")
    return TensorInfo(dtype=dtype, shape=shape, data_offsets=(offsets[0], offsets[1]))


def _sizes(value: JsonValue) -> tuple[int, ...] | None:
    """Give a list of non-negative integers as a tuple, anything else as None."""
    if not isinstance(value, list):
        return None
    sizes = tuple(n for n in value if isinstance(n, int) and not isinstance(n, bool) and n >= 0)
    return sizes if len(sizes) == len(value) else None


def _check_coverage(tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    """Every byte after the header belongs to exactly one tensor: no hole, no overlap."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        if tensor.data_offsets[0] != end:
            raise _lie(f"tensor {quoted(name)} leaves a hole or overlaps another")
        end = tensor.data_offsets[1]
    if end != data_bytes:
        raise _lie(f"its tensors take {end} bytes and the file has {data_bytes} for them")


def _lie(reason: str) -> UnusableAdapter:
    return UnusableAdapter(f"The file is not a safetensors file: {reason}.")
