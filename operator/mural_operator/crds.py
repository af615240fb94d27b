"""Brings the custom resource definitions up to date: Helm installs them, and never looks again.

By server-side apply, so that what others have put on them (labels, a conversion webhook) stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import yaml

from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import JsonObject, KubeClient, KubeError
from mural_resolvers.kubernetes.objects import GROUP

__all__ = ["apply_definitions", "read_definitions"]

DEFINITIONS: Final = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
MANAGER: Final = "mural-crds"
ESTABLISHED_S: Final = 30.0
LOOK_S: Final = 0.2
MAX_FILE_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


class _Condition(msgspec.Struct):
    type: str
    status: str


class _DefinitionStatus(msgspec.Struct):
    conditions: tuple[_Condition, ...] = ()


class _Definition(msgspec.Struct):
    status: _DefinitionStatus = msgspec.field(default_factory=_DefinitionStatus)

    @property
    def established(self) -> bool:
        return any(
            each.type == "Established" and each.status == "True" for each in self.status.conditions
        )


def read_definitions(folder: Path) -> list[JsonObject]:
    """The definitions in a folder's ``*.yaml``, in the order of the files' names.

    Raises `InvalidInput` where a file is none of Mural's definitions, or there is no file.
    """
    found = [_read(path) for path in sorted(folder.glob("*.yaml"))]
    if not found:
        raise InvalidInput(f"{folder}: there is no definition (*.yaml).")
    return found


def _read(path: Path) -> JsonObject:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}.") from None
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(f"{path} is larger than {MAX_FILE_BYTES} bytes.")
    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError):
        raise InvalidInput(f"{path}: this is not YAML.") from None
    if not isinstance(found, dict) or found.get("kind") != "CustomResourceDefinition":
        raise InvalidInput(f"{path}: a CustomResourceDefinition is wanted.")
    if not _name(found).endswith(f".{GROUP}"):
        raise InvalidInput(f"{path}: a definition of the group {GROUP} is wanted.")
    return found


def _name(definition: JsonObject) -> str:
    metadata = definition.get("metadata")
    return str(metadata.get("name", "")) if isinstance(metadata, dict) else ""


async def apply_definitions(client: KubeClient, definitions: Sequence[JsonObject]) -> None:
    """Apply them one after the other; each is in force when the next one is looked at.

    Raises `InvalidInput` with a sentence that says what to do.
    """
    for definition in definitions:
        name = _name(definition)
        path = f"{DEFINITIONS}/{name}"
        try:
            await client.patch(
                path,
                definition,
                kind="apply",
                params={"fieldManager": MANAGER, "force": "true"},
            )
            async with asyncio.timeout(ESTABLISHED_S):
                await _established(client, path)
        except KubeError as error:
            raise InvalidInput(f"{name} cannot be applied: {_advice(error)}") from None
        except TimeoutError:
            raise InvalidInput(
                f"{name} is not established after {ESTABLISHED_S:g} s: `kubectl describe crd "
                f"{name}` says why."
            ) from None
        log.info("%s is up to date", name)


async def _established(client: KubeClient, path: str) -> None:
    while True:
        if msgspec.json.decode(await client.get(path), type=_Definition).established:
            return
        await asyncio.sleep(LOOK_S)


def _advice(error: KubeError) -> str:
    if error.status == 403:
        # Rights to create cannot be given for some names alone, so nobody is given them here.
        return (
            f"{error.message}. If it is not there yet, somebody with the right to create "
            "definitions has to: kubectl apply --server-side -f charts/mural/crds"
        )
    return f"{error}."
