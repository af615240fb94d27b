"""The digest of a version: sha256 over exactly the files that the engine reads.

Facts and times stand outside it, so every source gives the same digest for the same content.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from mural_resolvers.errors import TooLarge, UnusableAdapter, quoted
from mural_resolvers.files import contained, open_regular
from mural_resolvers.limits import AdapterLimits

__all__ = [
    "BIN_WEIGHTS_FILE",
    "CONFIG_FILE",
    "ENGINE_FILES",
    "TEMPLATE_FILE",
    "WEIGHTS_FILE",
    "FileEntry",
    "choose_engine_files",
    "compute_digest",
    "engine_files",
    "hash_file",
    "max_file_bytes",
]

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
BIN_WEIGHTS_FILE = "adapter_model.bin"
TEMPLATE_FILE = "chat_template.jinja"

# Everything that the engine may read of an adapter; whatever else lies in the folder (a
# tokenizer, a README, optimizer state) is neither read nor part of the digest. The pickle is
# read, where admitted, only if there are no safetensors.
ENGINE_FILES = (CONFIG_FILE, WEIGHTS_FILE, BIN_WEIGHTS_FILE, TEMPLATE_FILE)

_CHUNK_BYTES = 1 << 20


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a version: path inside the folder, size in bytes, sha256 (hex)."""

    path: str
    size: int
    sha256: str


def compute_digest(files: Iterable[FileEntry]) -> str:
    """The sha256 (hex) over the sorted lines ``sha256 size path``, each ended by a newline."""
    lines = sorted(f"{file.sha256} {file.size} {file.path}\n" for file in files)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def engine_files(folder: Path, limits: AdapterLimits) -> tuple[str, ...]:
    """Name the files of the folder that the engine reads; raise ``UnusableAdapter``.

    Refused are a folder without a configuration or without weights, and one that has only a
    pickle where no admin admitted it.
    """
    present = [name for name in ENGINE_FILES if os.path.lexists(folder / name)]
    return choose_engine_files(present, limits)


def choose_engine_files(present: Iterable[str], limits: AdapterLimits) -> tuple[str, ...]:
    """``engine_files`` for a source that lists names: those that are read, in their order.

    Other names are passed over.
    """
    known = set(ENGINE_FILES).intersection(present)
    if CONFIG_FILE not in known:
        raise UnusableAdapter(f"The adapter has no {CONFIG_FILE}.")
    if WEIGHTS_FILE in known:
        known.discard(BIN_WEIGHTS_FILE)
    elif BIN_WEIGHTS_FILE not in known:
        raise UnusableAdapter(f"The adapter has no {WEIGHTS_FILE}.")
    elif not limits.admit_bin:
        raise UnusableAdapter(
            f"The adapter has only {BIN_WEIGHTS_FILE}, a pickle, which is not admitted here; "
            f"save it as {WEIGHTS_FILE}."
        )
    return tuple(name for name in ENGINE_FILES if name in known)


def hash_file(folder: Path, name: str, limits: AdapterLimits, within: Path) -> FileEntry:
    """Hash one file in bounded pieces; raise ``UnusableAdapter`` or ``TooLarge``.

    A link is followed only where it ends inside ``within``; only regular files are read.
    """
    max_bytes = max_file_bytes(name, limits)
    sha256 = hashlib.sha256()
    size = 0
    with open_regular(contained(folder / name, within)) as file:
        expected = os.fstat(file.fileno()).st_size
        if expected > max_bytes:
            raise TooLarge(f"{name} has {expected} bytes; the limit is {max_bytes}.")
        while chunk := file.read(min(_CHUNK_BYTES, max_bytes + 1 - size)):
            sha256.update(chunk)
            size += len(chunk)
    if size != expected:
        raise UnusableAdapter(f"{quoted(name)} changed while it was read.")
    return FileEntry(path=name, size=size, sha256=sha256.hexdigest())


def max_file_bytes(name: str, limits: AdapterLimits) -> int:
    """The limit in bytes of one of the engine's files."""
    by_name = {CONFIG_FILE: limits.max_config_bytes, TEMPLATE_FILE: limits.max_template_bytes}
    return by_name.get(name, limits.max_weights_bytes)
