"""``mural tenants``: make API keys."""

from __future__ import annotations

import argparse

import msgspec

from mural_resolvers.errors import InvalidInput, quoted
from mural_resolvers.names import is_tenant
from mural_resolvers.tenants import ADMIN, KeyFile, KeyRecord, mint_key

__all__ = ["TenantsCommand", "tenants"]


class TenantsCommand:
    """``mural tenants key TENANT``."""

    help = "make API keys for tenants"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the one action."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        key = actions.add_parser(
            "key", help="make a key; print it once, and the record for the key file"
        )
        key.add_argument("tenant", metavar="TENANT", help="the namespace that the key owns")
        key.add_argument(
            "--admin", action="store_true", help="let it use everything and control the server"
        )
        key.add_argument(
            "--weight", type=float, default=1.0, help="share in scheduling (default: 1)"
        )
        key.add_argument(
            "--grant",
            action="append",
            default=[],
            metavar="GLOB",
            help="more that it may use, such as globex/sql or @name (repeatable)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Print the key, which is kept nowhere, and the record that the key file takes."""
        if not is_tenant(args.tenant):
            raise InvalidInput(
                f"{quoted(args.tenant)} is not a tenant name: it is made of a-z, 0-9 and, "
                "inside, . _ -, and has at most 63 of them."
            )
        minted = mint_key()
        record = KeyRecord(
            id=minted.key_id,
            sha256=minted.sha256,
            tenant=args.tenant,
            rights=frozenset({ADMIN} if args.admin else ()),
            weight=args.weight,
            grants=tuple(args.grant),
        )
        KeyFile([record])
        print(f"key (shown once)  {minted.key}")
        print(f"record            {msgspec.json.encode(record, order='deterministic').decode()}")
        return 0


tenants = TenantsCommand()
