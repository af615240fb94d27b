"""What the actions of ``mural adapters`` have in common: their arguments, and the store."""

from __future__ import annotations

import argparse
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeAlias

from mural_resolvers.errors import AdapterNotFound, InvalidInput, MalformedName, quoted
from mural_resolvers.names import LATEST, AdapterName, is_version, parse_name
from mural_resolvers.open_store import open_store
from mural_resolvers.store import AdapterStore
from mural_resolvers.versions import highest_version

__all__ = [
    "API_KEY_VARIABLE",
    "STORE_VARIABLE",
    "Act",
    "Actions",
    "UsageError",
    "adapter_of",
    "add_action",
    "add_base_arguments",
    "exact_name",
    "find_version",
    "name_or_latest",
    "opened_store",
    "tenant_and_adapter",
    "version",
]

Actions: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

STORE_VARIABLE = "MURAL_STORE"
API_KEY_VARIABLE = "MURAL_API_KEY"
_MAX_KEY_FILE_BYTES = 4096

Act = Callable[[argparse.Namespace], int]
"""Does what was asked and gives the exit status."""


class UsageError(Exception):
    """The arguments do not fit together: exit status 2."""


def add_action(
    actions: Actions, name: str, act: Act, help: str, keys: str, *, store: str = ""
) -> argparse.ArgumentParser:
    """Add an action with the flags that all have.

    ``keys`` says what ``--json`` prints. ``store`` is one more name for the flag ``--store``.
    """
    parser = actions.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=(
            f"--json prints one object: {keys}. What fails prints\n"
            '{"error": {"message", "type", "param", "code"}}.\n\n'
            "Exit status: 0 done, 1 refused or failed, 2 wrong usage."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(act=act)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    group = parser.add_argument_group("store")
    group.add_argument(
        "--store",
        *([store] if store else []),
        dest="store",
        metavar="STORE",
        help="s3://bucket/prefix[?endpoint_url=…], a folder, or a server's http(s)://host:port "
        f"(default: {STORE_VARIABLE})",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"holds the key for a server (default: {API_KEY_VARIABLE})",
    )
    return parser


def add_base_arguments(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the base model to hold an adapter against, and what a pickle needs."""
    parser.add_argument(
        "--base",
        "--base-spec",
        required=required,
        metavar="MODEL|SPEC.json",
        help="the base model that it must fit: a Hugging Face folder or a .gguf file, of which "
        "only the headers are read, or a base spec as JSON",
    )
    parser.add_argument(
        "--max-lora-rank",
        type=_rank,
        metavar="R",
        help="the largest rank that the server takes (default: the spec's, 64 for a MODEL)",
    )


def _rank(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or not 0 < int(text) <= 1 << 16:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no rank")
    return int(text)


def exact_name(text: str) -> AdapterName:
    """``tenant[/adapter]:version``, the version spelt out."""
    name = name_or_latest(text)
    if ":" not in text or name.version == LATEST:
        raise argparse.ArgumentTypeError(f"{text} names no version: write it as {name.at('v1')}")
    return name


def name_or_latest(text: str) -> AdapterName:
    """``tenant[/adapter][:version]``."""
    try:
        return parse_name(text)
    except MalformedName as error:
        raise argparse.ArgumentTypeError(error.message) from None


def tenant_and_adapter(text: str) -> AdapterName:
    """``tenant[/adapter]``; the result's version means nothing."""
    if ":" in text:
        raise argparse.ArgumentTypeError(f"{quoted(text)} must be without a version")
    return name_or_latest(text)


def version(text: str) -> str:
    """The name of a version or of an alias."""
    if not is_version(text):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no name for a version or an alias")
    return text


def adapter_of(name: AdapterName) -> str:
    """The name without its version, as people write it."""
    return name.short.rpartition(":")[0]


@asynccontextmanager
async def opened_store(args: argparse.Namespace) -> AsyncIterator[AdapterStore]:
    """The store that was asked for, closed at the end; raise ``UsageError`` where none was."""
    url = args.store or os.environ.get(STORE_VARIABLE)
    if not url:
        raise UsageError(f"which store? Give --store, or set {STORE_VARIABLE}")
    key = _read_key(args.api_key_file) if args.api_key_file else os.environ.get(API_KEY_VARIABLE)
    # Set and empty is how a shell says none; an empty file is a mistake.
    store = open_store(url, api_key=key if args.api_key_file else key or None)
    try:
        yield store
    finally:
        await store.close()


def _read_key(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as file:
            return file.read(_MAX_KEY_FILE_BYTES).strip()
    except OSError as error:
        raise InvalidInput(f"--api-key-file {quoted(str(path))}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InvalidInput(f"--api-key-file {quoted(str(path))} is not ASCII text.") from None


async def find_version(store: AdapterStore, name: AdapterName) -> AdapterName:
    """The exact version that a name means; raise ``AdapterNotFound``.

    Of an alias with several versions it is the one with the most weight. ``latest`` without an
    alias is the highest version.
    """
    if await store.manifest(name) is not None:
        return name
    targets = (await store.aliases(name.tenant, name.adapter)).get(name.version)
    if targets:
        return name.at(max(targets, key=lambda target: target.weight).version)
    found = None
    if name.version == LATEST:
        listed = await store.list(name.tenant)
        found = highest_version(
            item.name.version for item in listed if item.name.adapter == name.adapter
        )
    if found is None:
        raise AdapterNotFound(f"{name} is not in {store.location}.")
    return name.at(found)
