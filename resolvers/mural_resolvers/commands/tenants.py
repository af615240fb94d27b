"""``mural tenants``: API keys, and the file that has their hashes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import msgspec

from mural_resolvers.errors import InvalidInput, quoted
from mural_resolvers.names import is_tenant
from mural_resolvers.tenants import KeyRecord, Tenant, TenantsConfig, mint_key, read_tenants
from mural_resolvers.tenants.config import MAX_NOTE_CHARS, parse_moment, parse_tenants
from mural_resolvers.tenants.edit import (
    add_key,
    add_tenant,
    key_yaml,
    remove_key,
    rewrite,
    says_nothing,
)

__all__ = ["TenantsCommand", "tenants"]

_SPAN = re.compile(r"([1-9][0-9]{0,4})([dh])")
_ADMIN: Final = "(admin)"


class TenantsCommand:
    """``mural tenants create-key | revoke-key | list | check``."""

    help = "make and revoke tenants' API keys, check the tenants file"

    def __init__(self, clock: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._clock = clock

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the four actions."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        _add_create_key(
            actions.add_parser("create-key", help="make a key, which is shown this once")
        )
        revoke = actions.add_parser(
            "revoke-key", help="take a key out of the file; servers notice within seconds"
        )
        revoke.add_argument("key_id", metavar="KEY_ID", help="the part after mural_, as list shows")
        _add_file(revoke)
        listing = actions.add_parser("list", help="show the keys of a file")
        _add_file(listing)
        listing.add_argument("--json", action="store_true", help="for programs")
        check = actions.add_parser("check", help="say whether a server would take the file")
        check.add_argument("file", type=Path, metavar="FILE")

    def run(self, args: argparse.Namespace) -> int:
        """Exit status 0, or 1 with a sentence for what cannot be done."""
        if args.action == "create-key":
            return self._create_key(args)
        if args.action == "revoke-key":
            rewrite(args.file, lambda text: remove_key(text, args.key_id))
            print(f"{args.key_id} is revoked.")
            return 0
        if args.action == "list":
            return _list(read_tenants(args.file), self._clock(), as_json=args.json)
        return _check(read_tenants(args.file), self._clock())

    def _create_key(self, args: argparse.Namespace) -> int:
        tenant = _tenant_of(args)
        now = self._clock().replace(microsecond=0)
        minted = mint_key()
        record = KeyRecord(
            id=minted.key_id,
            sha256=minted.sha256,
            created=now,
            expires=None if args.expires is None else _expiry(args.expires, now),
            note=_note(args.note),
        )
        if args.file is not None:
            # Written first: a key that was shown and is not in the file is of no use to anybody.
            rewrite(args.file, lambda text: _extended(text, tenant, record, new=args.new_tenant))
        print(f"key (shown once)  {minted.key}")
        if args.file is None:
            place = "admin_keys" if tenant is None else f"the keys of {tenant}"
            print(f"record for {place}: {key_yaml(record)}")
        return 0


def _add_create_key(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tenant", nargs="?", metavar="TENANT", help="whose key it is")
    parser.add_argument(
        "--admin",
        action="store_true",
        help="in place of TENANT: a key that may use everything and control the server",
    )
    parser.add_argument(
        "--file",
        type=Path,
        metavar="FILE",
        help="put its record into this file, which keeps its comments; left out: print the record",
    )
    parser.add_argument(
        "--new-tenant", action="store_true", help="add the tenant where the file lacks it"
    )
    parser.add_argument(
        "--expires", metavar="WHEN", help="90d, 12h, or a date or time in UTC; left out: never"
    )
    parser.add_argument("--note", default="", metavar="TEXT", help="what the key is for")


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--file", type=Path, required=True, metavar="FILE")


def _tenant_of(args: argparse.Namespace) -> str | None:
    if args.admin == (args.tenant is not None):
        raise InvalidInput("Give either a TENANT or --admin.")
    if args.tenant is not None and not is_tenant(args.tenant):
        raise InvalidInput(
            f"{quoted(args.tenant)} is not a tenant name: it is made of a-z, 0-9 and, "
            "inside, . _ -, and has at most 63 of them."
        )
    return None if args.admin else str(args.tenant)


def _note(text: str) -> str:
    if len(text) > MAX_NOTE_CHARS or not text.isprintable():
        raise InvalidInput(f"A note has at most {MAX_NOTE_CHARS} printable characters.")
    return text


def _expiry(text: str, now: datetime) -> datetime:
    span = _SPAN.fullmatch(text)
    if span is None:
        moment = parse_moment(text).replace(microsecond=0)
    else:
        count = int(span[1])
        moment = now + (timedelta(days=count) if span[2] == "d" else timedelta(hours=count))
    if moment <= now:
        raise InvalidInput(f"--expires: {quoted(text)} is past.")
    return moment


def _extended(text: str, tenant: str | None, record: KeyRecord, *, new: bool) -> str:
    if says_nothing(text):
        if tenant is None:
            text = f"{text}tenants: []\n"
        elif not new:
            raise InvalidInput("The file is absent or says nothing: begin it with --new-tenant.")
    if tenant is not None and new and not _has(text, tenant):
        text = add_tenant(text, tenant)
    return add_key(text, tenant, record)


def _has(text: str, tenant: str) -> bool:
    return not says_nothing(text) and parse_tenants(text.encode()).find(tenant) is not None


def _list(config: TenantsConfig, now: datetime, *, as_json: bool) -> int:
    rows = [
        {
            "tenant": None if tenant is None else tenant.id,
            "key_id": key.id,
            "created": key.created,
            "expires": key.expires,
            "expired": key.has_expired(now),
            "note": key.note,
        }
        for tenant, key in config.all_keys()
    ]
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return 0
    head = ("TENANT", "KEY", "CREATED", "EXPIRES", "NOTE")
    table = [head, *(_row(tenant, key, now) for tenant, key in config.all_keys())]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _row(tenant: Tenant | None, key: KeyRecord, now: datetime) -> tuple[str, ...]:
    expires = "never" if key.expires is None else f"{key.expires:%Y-%m-%d %H:%M}"
    return (
        _ADMIN if tenant is None else tenant.id,
        key.id,
        "" if key.created is None else f"{key.created:%Y-%m-%d}",
        f"{expires} (expired)" if key.has_expired(now) else expires,
        key.note,
    )


def _check(config: TenantsConfig, now: datetime) -> int:
    keys = len(list(config.all_keys()))
    print(f"{len(config.tenants)} tenants, {keys} keys: a server takes this file.")
    for warning in _warnings(config, now):
        print(f"note: {warning}")
    return 0


def _warnings(config: TenantsConfig, now: datetime) -> Iterator[str]:
    for tenant in config.tenants:
        if all(key.has_expired(now) for key in tenant.keys):
            yield f"{tenant.id} has no key that is valid"
    known = {tenant.id for tenant in config.tenants}
    for tenant in config.tenants:
        for grant in tenant.grants:
            granted = re.split("[/:]", grant)[0]
            if not set("@*?") & set(granted) and granted not in known:
                yield f"{tenant.id} is granted {grant}, and {granted} is no tenant of this file"


tenants = TenantsCommand()
