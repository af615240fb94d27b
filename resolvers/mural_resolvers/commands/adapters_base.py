"""The base model that ``mural adapters`` holds an adapter against: its spec, never its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Protocol, cast

import msgspec

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.errors import InvalidInput, quoted

__all__ = ["BASE_SPEC_GROUP", "DEFAULT_MAX_LORA_RANK", "read_base"]

BASE_SPEC_GROUP = "mural.base_specs"
DEFAULT_MAX_LORA_RANK = 64

ReadBaseSpec = Callable[[str, int], BaseSpec]
"""A model's path and its ``max_lora_rank`` → its spec; raises ``InvalidInput`` with the reason."""


class _EntryPoint(Protocol):
    @property
    def name(self) -> str: ...

    def load(self) -> object: ...


def read_base(
    base: str, max_lora_rank: int | None, entry_points: Iterable[_EntryPoint] | None = None
) -> BaseSpec:
    """Read the spec of a base: a JSON file, or a model's headers by an installed server.

    ``max_lora_rank`` stands in for the JSON's own; a model has none and is taken to be served
    with the server's default. Raises ``InvalidInput``.
    """
    path = Path(base)
    if path.suffix == ".json" and not path.is_dir():
        spec = BaseSpec.from_json(_read(path))
        return msgspec.structs.replace(spec, max_lora_rank=max_lora_rank or spec.max_lora_rank)
    if not path.exists():
        raise InvalidInput(
            f"{quoted(base)} is no base: give a model's folder, a .gguf file or a base spec, .json."
        )
    read = _reader(
        metadata.entry_points(group=BASE_SPEC_GROUP) if entry_points is None else entry_points
    )
    return read(base, max_lora_rank or DEFAULT_MAX_LORA_RANK)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{quoted(str(path))}: {error.strerror}.") from None


def _reader(entry_points: Iterable[_EntryPoint]) -> ReadBaseSpec:
    reason = "no package here reads one"
    for entry in sorted(entry_points, key=lambda found: found.name):
        try:
            return cast(ReadBaseSpec, entry.load())
        except ImportError as error:
            reason = str(error)
    raise InvalidInput(
        f"A model's own files are read by the server's package ({reason}): "
        "pip install 'mural[server]', or give a base spec as .json."
    )
