"""Read, check and convert a PEFT folder into one block of bytes in the layout of the stacks.

Neither torch nor any other thread pool is needed for a safetensors file, so the loader process
that runs this is small and starts in a fraction of a second.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.digest import (
    BIN_WEIGHTS_FILE,
    CONFIG_FILE,
    TEMPLATE_FILE,
    WEIGHTS_FILE,
    FileEntry,
    compute_digest,
    engine_files,
    hash_file,
)
from mural_resolvers.errors import ManifestMismatch, TooLarge, UnusableAdapter, quoted
from mural_resolvers.files import contained, open_regular, read_bounded
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.manifest import read_manifest
from mural_resolvers.peft import (
    AdapterPlan,
    BaseCopy,
    ModulePlan,
    PeftConfig,
    TensorInfo,
    check_adapter,
    read_safetensors_header,
)
from mural_server.lora.host_size import ITEM_BYTES, aligned
from mural_server.lora.targets import admits

__all__ = [
    "BaseDigest",
    "Bytes",
    "CheckpointHeader",
    "LoadOptions",
    "LoadPhase",
    "ModuleHeader",
    "WeightDType",
    "no_base_digest",
    "read_checkpoint",
    "tensor_digest",
]

WeightDType = Literal["float32", "bfloat16", "float16"]
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

LoadPhase = Literal["read", "judge", "convert"]
"""In this order; ``judge`` matches the uploaded expressions, the others have no such traps."""

BaseDigest = Callable[[str], str | None]
"""`tensor_digest` of a module's raw weight as served, or None if the base keeps none."""

_BF16_EXPONENT = np.uint16(0x7F80)


class LoadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How adapters are read for one engine."""

    dtype: WeightDType
    target_modules: tuple[str, ...] | None = None
    """Suffixes of the modules that adapters may target; None: all of the base spec."""
    limits: AdapterLimits = DEFAULT_LIMITS
    max_payload_bytes: int | None = None
    """Converted bytes that one adapter may take; None: no limit."""


class ModuleHeader(msgspec.Struct, frozen=True, array_like=True):
    """Where a module's halves lie in the payload: A [rank, in], B [rank, out] with its scale."""

    module: str
    rank: int
    in_features: int
    out_features: int
    scale: float
    offset_a: int
    offset_b: int


class CheckpointHeader(msgspec.Struct, frozen=True):
    """What stands before an adapter's payload."""

    digest: str
    dtype: WeightDType
    num_bytes: int
    modules: tuple[ModuleHeader, ...]


def no_base_digest(module: str) -> str | None:
    """For a base that keeps no raw weights: copies of them cannot be compared and are refused."""
    del module
    return None


def ignore_phase(phase: LoadPhase) -> None:
    """For a caller that sets no deadline of its own to a phase."""
    del phase


def in_own_memory(num_bytes: int) -> Bytes:
    """For a caller that keeps the payload to itself."""
    return np.empty(num_bytes, dtype=np.uint8)


def tensor_digest(data: memoryview | bytes) -> str:
    """The sha256 (hex) of a contiguous tensor's bytes in the served dtype."""
    return hashlib.sha256(data).hexdigest()


def read_checkpoint(
    folder: Path,
    base: BaseSpec,
    options: LoadOptions,
    expected_digest: str = "",
    base_digest: BaseDigest = no_base_digest,
    on_phase: Callable[[LoadPhase], None] = ignore_phase,
    allocate: Callable[[int], Bytes] = in_own_memory,
) -> tuple[CheckpointHeader, Bytes]:
    """Give an adapter's header and its payload (uint8 [num_bytes]), in what ``allocate`` gives.

    Every file is read once, and what is hashed are the bytes that are parsed. The phase
    ``judge`` matches the configuration's regular expressions: what was uploaded is read in the
    loader process, under its deadline. Raises ``UnusableAdapter`` with the reason,
    ``ManifestMismatch`` when the content is not ``expected_digest``, ``TooLarge`` above a limit.
    """
    on_phase("read")
    source = _read_files(folder, options.limits, expected_digest)
    on_phase("judge")
    config = PeftConfig.from_json(source.config, options.limits)
    plan = check_adapter(config, source.tensors.infos, base, options.limits)
    _check_targets(plan, options)
    header = _lay_out(plan, source.digest, options)
    on_phase("convert")
    _check_base_copies(plan, source.tensors, options.dtype, base_digest)
    payload = allocate(header.num_bytes)
    for module, place in zip(plan.modules, header.modules, strict=True):
        _convert_module(module, place, source.tensors, options.dtype, payload)
    return header, payload


# Files


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of a file: what each is, and its raw little-endian bytes."""

    infos: dict[str, TensorInfo]
    raw: Callable[[str], Bytes]


@dataclass(frozen=True, slots=True)
class _Source:
    config: bytes
    tensors: _Tensors
    digest: str


def _read_files(folder: Path, limits: AdapterLimits, expected_digest: str) -> _Source:
    # Content that is proven by its digest may be linked from anywhere (a hub's cache is).
    within = Path("/") if expected_digest else folder
    names = engine_files(folder, limits)
    config = read_bounded(contained(folder / CONFIG_FILE, within), limits.max_config_bytes)
    weights_name = WEIGHTS_FILE if WEIGHTS_FILE in names else BIN_WEIGHTS_FILE
    weights = _read_weights(contained(folder / weights_name, within), limits)
    entries = [_entry(CONFIG_FILE, config), _entry(weights_name, weights.data)]
    if TEMPLATE_FILE in names:
        entries.append(hash_file(folder, TEMPLATE_FILE, limits, within))
    digest = compute_digest(entries)
    _check_digest(digest, folder, limits, expected_digest)
    is_pickle = weights_name == BIN_WEIGHTS_FILE
    return _Source(
        config, _pickled(weights) if is_pickle else _safetensors(weights, limits), digest
    )


def _entry(path: str, data: bytes | memoryview) -> FileEntry:
    return FileEntry(path=path, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def _check_digest(digest: str, folder: Path, limits: AdapterLimits, expected_digest: str) -> None:
    if not expected_digest and (manifest := read_manifest(folder, limits)) is not None:
        expected_digest = manifest.digest
    if expected_digest and digest != expected_digest:
        raise ManifestMismatch("The adapter's files are not those that its digest stands for.")


def _read_weights(path: Path, limits: AdapterLimits) -> Bytes:
    """Read a whole file into memory once, so that what is hashed is what is parsed."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limits.max_weights_bytes:
            raise TooLarge(
                f"{quoted(path.name)} has {size} bytes; at most "
                f"{limits.max_weights_bytes} are read."
            )
        data: Bytes = np.empty(size, dtype=np.uint8)
        view = data.data
        done = 0
        while done < size and (count := os.readv(file.fileno(), [view[done:]])):
            done += count
        if done != size or file.read(1):
            raise UnusableAdapter(f"{quoted(path.name)} changed while it was read.")
    return data


def _safetensors(weights: Bytes, limits: AdapterLimits) -> _Tensors:
    # The header alone becomes `bytes`; the tensors stay views of the one buffer.
    length = int.from_bytes(weights[:8].tobytes(), "little")
    head = weights[: 8 + min(length, limits.max_header_bytes)].tobytes()
    infos = read_safetensors_header(head, limits, file_bytes=weights.size)
    data = weights[8 + length :]

    def raw(key: str) -> Bytes:
        start, end = infos[key].data_offsets
        return data[start:end]

    return _Tensors(infos, raw)


def _pickled(weights: Bytes) -> _Tensors:
    """``adapter_model.bin``, where an admin admitted it; never with pickle's full power."""
    # Imported here so that the loader process needs no torch for safetensors.
    import io
    import pickle

    import torch

    try:
        loaded: object = torch.load(io.BytesIO(weights.data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise UnusableAdapter(
            f"{BIN_WEIGHTS_FILE} cannot be read with weights_only ({type(error).__name__})."
        ) from None
    if not isinstance(loaded, dict):
        raise UnusableAdapter(f"{BIN_WEIGHTS_FILE} does not hold a map of tensors.")
    names = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
    }
    infos: dict[str, TensorInfo] = {}
    kept: dict[str, Bytes] = {}
    for key, tensor in loaded.items():
        if not isinstance(key, str) or not isinstance(tensor, torch.Tensor):
            raise UnusableAdapter(f"{BIN_WEIGHTS_FILE} does not hold a map of tensors.")
        if tensor.dtype not in names or tensor.layout != torch.strided:
            raise UnusableAdapter(f"Tensor {quoted(key, 200)} has the dtype {tensor.dtype}.")
        flat: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        infos[key] = TensorInfo(names[tensor.dtype], tuple(tensor.shape), (0, flat.size))
        kept[key] = flat
    return _Tensors(infos, kept.__getitem__)


# Judgement


def _check_targets(plan: AdapterPlan, options: LoadOptions) -> None:
    # Dropping the module instead would answer with something that is not the adapter.
    for module in plan.modules:
        if not admits(options.target_modules, module.module):
            raise UnusableAdapter(
                f"The adapter targets {quoted(module.module, 200)}, which this server's "
                "lora_target_modules leave out."
            )


def _lay_out(plan: AdapterPlan, digest: str, options: LoadOptions) -> CheckpointHeader:
    item = ITEM_BYTES[options.dtype]
    places = []
    end = 0
    for module in plan.modules:
        offset_a = end
        offset_b = aligned(offset_a + module.rank * module.in_features * item)
        end = aligned(offset_b + module.rank * module.out_features * item)
        places.append(
            ModuleHeader(
                module.module,
                module.rank,
                module.in_features,
                module.out_features,
                module.scale,
                offset_a,
                offset_b,
            )
        )
    if options.max_payload_bytes is not None and end > options.max_payload_bytes:
        raise TooLarge(
            f"The adapter takes {end} bytes of host memory; adapters may take "
            f"{options.max_payload_bytes} in all."
        )
    return CheckpointHeader(digest, options.dtype, end, tuple(places))


def _check_base_copies(
    plan: AdapterPlan, tensors: _Tensors, dtype: WeightDType, base_digest: BaseDigest
) -> None:
    """PEFT saves a copy of the base's table beside an embedding adapter: nothing else is taken."""
    for copy in plan.base_copies:
        values = _floats(copy.key, tensors)
        converted = _converted(copy.key, values, dtype)
        if base_digest(copy.module) != tensor_digest(converted.data):
            raise UnusableAdapter(_not_the_base(copy))


def _not_the_base(copy: BaseCopy) -> str:
    return (
        f"Tensor {quoted(copy.key, 200)} replaces a weight of the base model and is not equal to "
        "it; only low-rank changes are served."
    )


# Conversion


def _convert_module(
    module: ModulePlan,
    place: ModuleHeader,
    tensors: _Tensors,
    dtype: WeightDType,
    payload: Bytes,
) -> None:
    a = _floats(module.key_a, tensors)
    _store(module.key_a, a, dtype, payload, place.offset_a)
    b = _floats(module.key_b, tensors)
    scaled: Floats = np.empty((module.rank, module.out_features), dtype=np.float32)
    with np.errstate(over="ignore"):
        np.multiply(b.T, np.float32(module.scale), out=scaled)
    _store(module.key_b, scaled, dtype, payload, place.offset_b)


def _store(key: str, values: Floats, dtype: WeightDType, payload: Bytes, offset: int) -> None:
    converted = _converted(key, values, dtype)
    payload[offset : offset + converted.size] = converted


def _floats(key: str, tensors: _Tensors) -> Floats:
    """A tensor as float32; raise ``UnusableAdapter`` if it holds NaN or an infinity."""
    info, raw = tensors.infos[key], tensors.raw(key)
    # A safetensors buffer may start at any byte: an unaligned view is copied first.
    if raw.ctypes.data % 8:
        raw = raw.copy()
    values: Floats
    if info.dtype == "BF16":
        values = (raw.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    elif info.dtype == "F32":
        values = raw.view(np.float32)
    else:
        wide = raw.view(np.float16 if info.dtype == "F16" else np.float64)
        if not np.isfinite(wide).all():
            raise _not_finite(key)
        with np.errstate(over="ignore"):
            values = wide.astype(np.float32)
    if not np.isfinite(values).all():
        raise _not_finite(key)
    return values.reshape(info.shape)


def _converted(key: str, values: Floats, dtype: WeightDType) -> Bytes:
    """The bytes of ``values`` in ``dtype``, rounded to nearest even; raise if any overflows.

    ``values`` holds no NaN: at most an infinity, where a scale carried it out of float32.
    """
    flat = np.ascontiguousarray(values).reshape(-1)
    result: Bytes
    if dtype == "bfloat16":
        upper = _rounded_to_bfloat16(flat.view(np.uint32))
        finite = not bool(((upper & _BF16_EXPONENT) == _BF16_EXPONENT).any())
        result = upper.view(np.uint8)
    else:
        with np.errstate(over="ignore"):
            narrow = flat.astype(np.float16) if dtype == "float16" else flat
        finite = bool(np.isfinite(narrow).all())
        result = narrow.view(np.uint8)
    if not finite:
        raise UnusableAdapter(
            f"Tensor {quoted(key, 200)} holds numbers that {dtype} cannot hold, scale included."
        )
    return result


def _rounded_to_bfloat16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 bits, rounded to nearest even; wraps around for a NaN alone."""
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    rounded >>= np.uint32(16)
    return rounded.astype(np.uint16)


def _not_finite(key: str) -> UnusableAdapter:
    return UnusableAdapter(f"Tensor {quoted(key, 200)} holds NaN or an infinity.")
