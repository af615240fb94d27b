"""``mural adapters push`` and ``pull``: between a folder and a store."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mural_resolvers.commands.adapters_arguments import (
    Actions,
    UsageError,
    adapter_of,
    add_action,
    add_base_arguments,
    exact_name,
    find_version,
    name_or_latest,
    opened_store,
    version,
)
from mural_resolvers.commands.adapters_base import read_base
from mural_resolvers.commands.adapters_judgement import judge
from mural_resolvers.commands.adapters_output import (
    ProgressBar,
    print_json,
    print_pairs,
    readable,
    shown,
)
from mural_resolvers.digest import BIN_WEIGHTS_FILE, CONFIG_FILE, WEIGHTS_FILE, FileEntry
from mural_resolvers.errors import InvalidInput, MuralError, UnusableAdapter
from mural_resolvers.limits import DEFAULT_LIMITS
from mural_resolvers.manifest import MANIFEST_FILE, Manifest
from mural_resolvers.names import AdapterName
from mural_resolvers.store import AdapterStore
from mural_resolvers.versions import AliasTarget

__all__ = ["add_pull", "add_push"]

_NAMED_AT_MOST = 6
_STAGING = ".mural-pull-"

_CONVERT = (
    'python -c "import torch, safetensors.torch as s; s.save_file({k: v.contiguous() for k, v in '
    f"torch.load('{BIN_WEIGHTS_FILE}', weights_only=True, map_location='cpu').items()}}, "
    f"'{WEIGHTS_FILE}', {{'format': 'pt'}})\""
)


class Pushed(msgspec.Struct, frozen=True):
    """What ``push --json`` prints."""

    name: str
    digest: str
    bytes: int
    files: tuple[FileEntry, ...]
    created: bool
    aliases: tuple[str, ...]
    left_out: tuple[str, ...]
    store: str


class Pulled(msgspec.Struct, frozen=True):
    """What ``pull --json`` prints."""

    name: str
    digest: str
    bytes: int
    files: tuple[FileEntry, ...]
    folder: str
    store: str


@dataclass(frozen=True, slots=True)
class _Checked:
    """A folder that may be published, and what of it is not."""

    manifest: Manifest
    left_out: tuple[str, ...]


def add_push(actions: Actions) -> None:
    """Add ``push FOLDER NAME``."""
    parser = add_action(
        actions,
        "push",
        _push,
        "check a PEFT folder, as training left it, and publish it under a name",
        "name, digest, bytes, files [{path, size, sha256}],\n"
        "created (false: it was there already), aliases, left_out, store",
        store="--to",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what save_pretrained wrote")
    parser.add_argument(
        "name", type=exact_name, metavar="NAME", help="acme:v1 or acme/sql:v1; never to be reused"
    )
    parser.add_argument(
        "--alias",
        action="append",
        default=[],
        type=version,
        metavar="ALIAS",
        help="also point an alias, such as stable, at it (repeatable)",
    )
    add_base_arguments(parser, required=False)


def add_pull(actions: Actions) -> None:
    """Add ``pull NAME FOLDER``."""
    parser = add_action(
        actions,
        "pull",
        _pull,
        "bring a version into a local folder, verified",
        "name (exact), digest, bytes,\nfiles [{path, size, sha256}], folder, store",
        store="--from",
    )
    parser.add_argument(
        "name", type=name_or_latest, metavar="NAME", help="acme:v1, acme/sql:stable; acme: latest"
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="new, or empty")


def _push(args: argparse.Namespace) -> int:
    if args.name.version in args.alias:
        raise UsageError(f"{args.name.version} cannot be a version and an alias")
    pushed = asyncio.run(_publish(args, _checked(args)))
    if args.json:
        print_json(pushed)
        return 0
    size = f"{readable(pushed.bytes)} in {len(pushed.files)} files"
    print_pairs(
        [
            ("published" if pushed.created else "same", _outcome(pushed)),
            ("digest", pushed.digest),
            ("size", size),
            *((("aliases", ", ".join(pushed.aliases)),) if pushed.aliases else ()),
            *((("left out", _some(pushed.left_out)),) if pushed.left_out else ()),
        ]
    )
    return 0


def _outcome(pushed: Pushed) -> str:
    already = "" if pushed.created else " is already there, with this very content"
    return f"{pushed.name}{already} ({pushed.store})"


def _checked(args: argparse.Namespace) -> _Checked:
    """Judge the folder before a byte of it is sent; raise ``UnusableAdapter`` with the reason."""
    folder: Path = args.folder
    if not folder.is_dir():
        raise InvalidInput(f"{shown(str(folder))} is not a folder.")
    _refuse_other_layouts(folder)
    base = read_base(args.base, args.max_lora_rank) if args.base else None
    # The folder is the user's own, and a hub's cache is made of links.
    judgement = judge(folder, base, DEFAULT_LIMITS, within=Path(folder.resolve().anchor))
    if judgement.refusals:
        raise UnusableAdapter(" ".join(judgement.refusals))
    kept = {file.path for file in judgement.manifest.files} | {MANIFEST_FILE}
    with os.scandir(folder) as entries:
        others = (entry.name + "/" * entry.is_dir() for entry in entries if entry.name not in kept)
        return _Checked(judgement.manifest, tuple(sorted(others)))


def _refuse_other_layouts(folder: Path) -> None:
    """Say what to do about a folder that holds an adapter in another form."""
    if not (folder / CONFIG_FILE).exists():
        inner = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))
        if inner:
            raise UnusableAdapter(
                f"{shown(str(folder))} has no {CONFIG_FILE}, but folders with one: "
                f"{_some(tuple(inner))}. Push one of those."
            )
    if (folder / BIN_WEIGHTS_FILE).exists() and not (folder / WEIGHTS_FILE).exists():
        raise UnusableAdapter(
            f"{shown(str(folder))} has its weights as {BIN_WEIGHTS_FILE}, a pickle, which can run "
            f"code where it is read. Convert it first, inside the folder: {_CONVERT}"
        )


def _some(names: tuple[str, ...]) -> str:
    told = ", ".join(shown(name) for name in names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return f"{told} and {more} more" if more > 0 else told


async def _publish(args: argparse.Namespace, checked: _Checked) -> Pushed:
    manifest = checked.manifest
    async with opened_store(args) as store:
        with ProgressBar("push", manifest.num_bytes) as bar:
            created = await store.publish(args.name, args.folder, manifest, bar.advance)
        for alias in args.alias:
            await _point(store, args.name, alias)
        return Pushed(
            name=str(args.name),
            digest=manifest.digest,
            bytes=manifest.num_bytes,
            files=manifest.files,
            created=created,
            aliases=tuple(f"{adapter_of(args.name)}:{alias}" for alias in args.alias),
            left_out=checked.left_out,
            store=store.location,
        )


async def _point(store: AdapterStore, name: AdapterName, alias: str) -> None:
    """Point one alias at what was published just now, and say so where that fails."""
    try:
        await store.set_alias(name.tenant, name.adapter, alias, [AliasTarget(name.version, 1.0)])
    except MuralError as error:
        raise type(error)(
            f"{name} is published, but the alias {alias} is as it was: {error.message}"
        ) from None


def _pull(args: argparse.Namespace) -> int:
    folder: Path = args.folder
    pulled = _pull_into(folder, args) if os.path.lexists(folder) else _pull_as(folder, args)
    if args.json:
        print_json(pulled)
        return 0
    print_pairs(
        [
            ("pulled", f"{pulled.name} ({pulled.store})"),
            ("digest", pulled.digest),
            ("size", f"{readable(pulled.bytes)} in {len(pulled.files)} files"),
            ("folder", shown(pulled.folder)),
        ]
    )
    return 0


def _pull_as(folder: Path, args: argparse.Namespace) -> Pulled:
    """Make the folder, whole or not at all: it is renamed into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=folder.parent) as place:
        staged = Path(place) / "adapter"
        staged.mkdir()
        pulled = asyncio.run(_fetch(args, staged))
        staged.rename(folder)
        return pulled


def _pull_into(folder: Path, args: argparse.Namespace) -> Pulled:
    """Fill an empty folder, which may be a mount; what a pull that died left is no content."""
    found = list(folder.iterdir()) if folder.is_dir() else [folder]
    if not all(path.name.startswith(_STAGING) for path in found):
        raise InvalidInput(f"{shown(str(folder))} exists and is not an empty folder.")
    for path in found:
        shutil.rmtree(path)
    with tempfile.TemporaryDirectory(prefix=_STAGING, dir=folder) as place:
        pulled = asyncio.run(_fetch(args, Path(place)))
        # The configuration comes last: without it the folder is no adapter.
        for file in sorted(pulled.files, key=lambda file: file.path == CONFIG_FILE):
            os.rename(Path(place) / file.path, folder / file.path)
        return pulled


async def _fetch(args: argparse.Namespace, staged: Path) -> Pulled:
    async with opened_store(args) as store:
        name = await find_version(store, args.name)
        stated = await store.manifest(name)
        with ProgressBar("pull", stated.num_bytes if stated else 0) as bar:
            manifest = await store.fetch(name, staged, bar.advance)
        return Pulled(
            name=str(name),
            digest=manifest.digest,
            bytes=manifest.num_bytes,
            files=manifest.files,
            folder=str(args.folder),
            store=store.location,
        )
