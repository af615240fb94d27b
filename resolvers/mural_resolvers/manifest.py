"""What a version consists of: files, PEFT's facts, digest; computed, read and verified."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mural_resolvers.digest import (
    CONFIG_FILE,
    ENGINE_FILES,
    WEIGHTS_FILE,
    FileEntry,
    compute_digest,
    engine_files,
    hash_file,
)
from mural_resolvers.errors import ManifestMismatch, UnusableAdapter, quoted
from mural_resolvers.files import contained, read_bounded
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.peft import PeftConfig, read_safetensors_header

__all__ = [
    "MANIFEST_FILE",
    "Manifest",
    "PeftFacts",
    "build_manifest",
    "checked_manifest",
    "manifest_of",
    "read_facts",
    "read_manifest",
    "verify_folder",
]

MANIFEST_FILE = "manifest.json"

_SHA256 = re.compile(r"[0-9a-f]{64}")


class PeftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the configuration says; ``rank`` is the largest that it gives any module.

    ``targets`` are the names of ``target_modules``, or the one expression that it is.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base_model_name: str | None = None
    use_rslora: bool = False
    use_dora: bool = False

    @classmethod
    def of(cls, config: PeftConfig) -> PeftFacts:
        """The facts of a configuration."""
        targets = config.target_modules
        return cls(
            rank=config.max_rank,
            alpha=config.lora_alpha,
            targets=(targets,) if isinstance(targets, str) else tuple(sorted(targets)),
            base_model_name=config.base_model_name_or_path,
            use_rslora=config.use_rslora,
            use_dora=config.use_dora,
        )


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """A version's files (in the order of ``ENGINE_FILES``), facts and digest."""

    files: tuple[FileEntry, ...]
    facts: PeftFacts
    digest: str

    @property
    def num_bytes(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)

    def to_json(self) -> bytes:
        """Give canonical JSON, the form of ``manifest.json``."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """Read ``to_json``'s form; raise ``UnusableAdapter`` where it is wrong or inconsistent."""
        try:
            manifest = msgspec.json.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise UnusableAdapter(f"{MANIFEST_FILE} is not a manifest.") from None
        paths = [file.path for file in manifest.files]
        if (
            len(set(paths)) != len(paths)
            or not set(paths) <= set(ENGINE_FILES)
            or any(f.size < 0 or _SHA256.fullmatch(f.sha256) is None for f in manifest.files)
        ):
            raise UnusableAdapter(f"{MANIFEST_FILE} lists files that are none of an adapter.")
        if compute_digest(manifest.files) != manifest.digest:
            raise UnusableAdapter(f"{MANIFEST_FILE} has a digest that is not its files'.")
        return manifest


def build_manifest(
    folder: Path, limits: AdapterLimits = DEFAULT_LIMITS, *, within: Path | None = None
) -> Manifest:
    """Compute a plain PEFT folder's manifest: hash its files and read its facts.

    Links may end anywhere inside ``within`` (default: the folder itself). The safetensors
    header is validated, so that a half-written file gets no digest. Raises ``UnusableAdapter``
    or ``TooLarge``. Reads every byte: not for an event loop.
    """
    within = folder if within is None else within
    names = engine_files(folder, limits)
    facts = _read_facts(folder, names, limits, within)
    files = tuple(hash_file(folder, name, limits, within) for name in names)
    return Manifest(files=files, facts=facts, digest=compute_digest(files))


def manifest_of(
    folder: Path, files: Sequence[FileEntry], limits: AdapterLimits = DEFAULT_LIMITS
) -> Manifest:
    """``build_manifest`` for files that were hashed as they were written into the folder."""
    by_name = {file.path: file for file in files}
    names = engine_files(folder, limits)
    if set(names) != set(by_name):
        raise UnusableAdapter("The folder holds other files than were written into it.")
    entries = tuple(by_name[name] for name in names)
    facts = _read_facts(folder, names, limits, folder)
    return Manifest(files=entries, facts=facts, digest=compute_digest(entries))


def read_facts(
    folder: Path, limits: AdapterLimits = DEFAULT_LIMITS, *, within: Path | None = None
) -> PeftFacts:
    """The facts that `build_manifest` finds, at the cost of the headers alone: nothing is hashed.

    Raises as it does.
    """
    names = engine_files(folder, limits)
    return _read_facts(folder, names, limits, folder if within is None else within)


def _read_facts(
    folder: Path, names: Sequence[str], limits: AdapterLimits, within: Path
) -> PeftFacts:
    config_bytes = read_bounded(contained(folder / CONFIG_FILE, within), limits.max_config_bytes)
    config = PeftConfig.from_json(config_bytes, limits)
    if WEIGHTS_FILE in names:
        read_safetensors_header(contained(folder / WEIGHTS_FILE, within), limits)
    return PeftFacts.of(config)


def checked_manifest(
    folder: Path, limits: AdapterLimits = DEFAULT_LIMITS, *, within: Path | None = None
) -> Manifest:
    """``build_manifest``, held to the manifest that lies in the folder, if there is one.

    Raises ``ManifestMismatch`` naming the first file that is another.
    """
    found = build_manifest(folder, limits, within=within)
    stated = read_manifest(folder, limits)
    if stated is not None:
        check_same(found, stated)
    return found


def read_manifest(folder: Path, limits: AdapterLimits = DEFAULT_LIMITS) -> Manifest | None:
    """Read the manifest that lies in a folder, or None; raise ``UnusableAdapter``, ``TooLarge``."""
    path = folder / MANIFEST_FILE
    if not os.path.lexists(path):
        return None
    return Manifest.from_json(read_bounded(contained(path, folder), limits.max_manifest_bytes))


def verify_folder(
    folder: Path,
    manifest: Manifest,
    limits: AdapterLimits = DEFAULT_LIMITS,
    *,
    within: Path | None = None,
) -> None:
    """Hash a folder and compare it; raise ``ManifestMismatch`` naming the first difference."""
    check_same(build_manifest(folder, limits, within=within), manifest)


def check_same(found: Manifest, stated: Manifest) -> None:
    """Raise ``ManifestMismatch`` naming the first file in which two manifests differ."""
    if found.digest == stated.digest:
        return
    found_files, stated_files = set(found.files), set(stated.files)
    path = min(file.path for file in found_files ^ stated_files)
    raise ManifestMismatch(f"{quoted(path)} is not the file that {MANIFEST_FILE} states.")
