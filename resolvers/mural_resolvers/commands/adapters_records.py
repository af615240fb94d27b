"""``mural adapters ls``, ``alias`` and ``rm``: what a store knows of its adapters."""

from __future__ import annotations

import argparse
import asyncio
import sys

import msgspec

from mural_resolvers.commands.adapters_arguments import (
    Actions,
    UsageError,
    adapter_of,
    add_action,
    exact_name,
    opened_store,
    tenant_and_adapter,
    version,
)
from mural_resolvers.commands.adapters_output import (
    print_json,
    print_pairs,
    print_table,
    readable,
)
from mural_resolvers.errors import AdapterNotFound, quoted
from mural_resolvers.names import AdapterName, is_tenant, is_version
from mural_resolvers.store import AdapterStore, Aliases, StoredVersion
from mural_resolvers.versions import AliasTarget, version_key

__all__ = ["add_alias", "add_ls", "add_rm"]

_DIGEST_CHARS = 12
_LOOK_UPS = 16


class Target(msgspec.Struct, frozen=True):
    """One version of an alias, with its share."""

    version: str
    weight: float


class ListedVersion(msgspec.Struct, frozen=True):
    """One version of ``ls --json``; ``aliases`` are those that point at it."""

    name: str
    tenant: str
    adapter: str
    version: str
    digest: str | None
    bytes: int
    aliases: tuple[str, ...]


class Listing(msgspec.Struct, frozen=True):
    """What ``ls --json`` prints."""

    store: str
    versions: tuple[ListedVersion, ...]


class AliasRecord(msgspec.Struct, frozen=True):
    """What ``alias --json`` prints."""

    adapter: str
    aliases: dict[str, tuple[Target, ...]]


class Removed(msgspec.Struct, frozen=True):
    """What ``rm --json`` prints."""

    name: str
    removed: bool
    store: str


def add_ls(actions: Actions) -> None:
    """Add ``ls [TENANT]``."""
    parser = add_action(
        actions,
        "ls",
        _ls,
        "list the versions in a store",
        "store, versions\n[{name, tenant, adapter, version, digest, bytes, aliases}]",
    )
    parser.add_argument(
        "tenant", nargs="?", type=_tenant, metavar="TENANT", help="only this one's (default: all)"
    )


def add_alias(actions: Actions) -> None:
    """Add ``alias NAME ALIAS``."""
    parser = add_action(
        actions,
        "alias",
        _alias,
        "point an alias at versions, by weight, or remove it",
        "adapter,\naliases {alias: [{version, weight}]}",
    )
    parser.add_argument(
        "name", type=tenant_and_adapter, metavar="NAME", help="the adapter: acme, or acme/sql"
    )
    parser.add_argument(
        "alias", type=version, metavar="ALIAS", help="latest, stable, canary or any other"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--version",
        action="append",
        type=_target,
        metavar="V[=WEIGHT]",
        help="a version, and its share of the requests (default 1; repeatable)",
    )
    what.add_argument("--remove", action="store_true", help="remove the alias")


def add_rm(actions: Actions) -> None:
    """Add ``rm NAME``."""
    parser = add_action(
        actions,
        "rm",
        _rm,
        "delete a version; its name is never used again",
        "name, removed, store",
    )
    parser.add_argument("name", type=exact_name, metavar="NAME", help="acme:v1 or acme/sql:v1")
    parser.add_argument("--yes", action="store_true", help="do not ask")


def _tenant(text: str) -> str:
    if not is_tenant(text):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a tenant name")
    return text


def _target(text: str) -> AliasTarget:
    name, equals, weight = text.partition("=")
    try:
        share = float(weight) if equals else 1.0
    except ValueError:
        share = -1.0
    if not is_version(name) or not 0 <= share <= 1e9:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is no VERSION or VERSION=WEIGHT")
    return AliasTarget(name, share)


def _ls(args: argparse.Namespace) -> int:
    listing = asyncio.run(_list(args))
    if args.json:
        print_json(listing)
        return 0
    if not listing.versions:
        of_tenant = f" of {args.tenant}" if args.tenant else ""
        print(f"no versions{of_tenant} in {listing.store}", file=sys.stderr)
        return 0
    print_table(
        ("NAME", "SIZE", "DIGEST", "ALIASES"),
        [
            (
                item.name,
                readable(item.bytes),
                item.digest[:_DIGEST_CHARS] if item.digest else "(not computed)",
                ", ".join(item.aliases),
            )
            for item in listing.versions
        ],
    )
    return 0


async def _list(args: argparse.Namespace) -> Listing:
    async with opened_store(args) as store:
        tenants = (args.tenant,) if args.tenant else await store.tenants()
        versions = [item for tenant in tenants for item in await _of_tenant(store, tenant)]
        return Listing(store.location, tuple(versions))


async def _of_tenant(store: AdapterStore, tenant: str) -> list[ListedVersion]:
    listed = await store.list(tenant)
    adapters = sorted({item.name.adapter for item in listed})
    turns = asyncio.Semaphore(_LOOK_UPS)

    async def look_up(adapter: str) -> Aliases:
        async with turns:
            return await store.aliases(tenant, adapter)

    found = await asyncio.gather(*map(look_up, adapters))
    records = dict(zip(adapters, found, strict=True))
    ordered = sorted(listed, key=lambda item: (item.name.adapter, version_key(item.name.version)))
    return [_listed(item, records[item.name.adapter]) for item in ordered]


def _listed(item: StoredVersion, aliases: Aliases) -> ListedVersion:
    name = item.name
    pointing = (
        alias
        for alias, targets in aliases.items()
        if any(target.version == name.version for target in targets)
    )
    return ListedVersion(
        name=str(name),
        tenant=name.tenant,
        adapter=name.adapter,
        version=name.version,
        digest=item.digest,
        bytes=item.num_bytes,
        aliases=tuple(sorted(pointing)),
    )


def _alias(args: argparse.Namespace) -> int:
    targets = [] if args.remove else args.version
    if not args.remove:
        _check_targets(targets)
    aliases = asyncio.run(_set_alias(args, targets))
    record = AliasRecord(
        adapter_of(args.name),
        {
            alias: tuple(Target(target.version, target.weight) for target in targets)
            for alias, targets in sorted(aliases.items())
        },
    )
    if args.json:
        print_json(record)
        return 0
    if not record.aliases:
        print(f"{record.adapter} has no aliases now", file=sys.stderr)
        return 0
    print_table(
        ("ALIAS", "VERSIONS"),
        [(f"{record.adapter}:{alias}", _shares(held)) for alias, held in record.aliases.items()],
    )
    return 0


def _check_targets(targets: list[AliasTarget]) -> None:
    if len({target.version for target in targets}) < len(targets):
        raise UsageError("a version is given twice")
    if not any(target.weight > 0 for target in targets):
        raise UsageError("at least one version needs a weight above 0")


def _shares(targets: tuple[Target, ...]) -> str:
    if len(targets) == 1:
        return targets[0].version
    total = sum(target.weight for target in targets)
    return ", ".join(f"{target.version} {target.weight / total:.0%}" for target in targets)


async def _set_alias(args: argparse.Namespace, targets: list[AliasTarget]) -> Aliases:
    async with opened_store(args) as store:
        return await store.set_alias(args.name.tenant, args.name.adapter, args.alias, targets)


def _rm(args: argparse.Namespace) -> int:
    if not args.yes:
        _confirm(args.name)
    removed = asyncio.run(_delete(args))
    if args.json:
        print_json(removed)
    else:
        print_pairs([("deleted", f"{removed.name} ({removed.store}); the name stays taken")])
    return 0


def _confirm(name: AdapterName) -> None:
    if not sys.stdin.isatty():
        raise UsageError("give --yes: there is no terminal to ask on")
    print(f"Delete {name}? Its name is never used again. [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UsageError("nothing was deleted")


async def _delete(args: argparse.Namespace) -> Removed:
    async with opened_store(args) as store:
        if not await store.delete(args.name):
            raise AdapterNotFound(f"{args.name} is not in {store.location}.")
        return Removed(str(args.name), True, store.location)
