"""``mural chart``: what the Helm chart's hooks do before an upgrade and before an uninstall.

Nothing heavy is imported before `run`, so that ``mural --help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.redaction import redacted
from mural_resolvers.stderr_log import log_to_stderr

if TYPE_CHECKING:
    from mural_resolvers.kubernetes.client import KubeClient

__all__ = ["ChartCommand", "chart"]


class ChartCommand:
    """``mural chart``."""

    help = "what the Helm chart's hooks do: bring definitions up to date, release Adapters"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the two actions."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        apply = actions.add_parser(
            "apply-crds",
            help="apply custom resource definitions",
            description="Apply the custom resource definitions of a folder, server-side, and wait "
            "until each is established.",
        )
        apply.add_argument("folder", type=Path, metavar="DIR", help="holds them as *.yaml")
        release = actions.add_parser(
            "release-adapters",
            help="stop an operator and let Adapters go",
            description="Scale an operator's Deployment of this namespace to nothing, then take "
            "its finalizer off the Adapters, which could not be deleted without it.",
        )
        release.add_argument("deployment", metavar="NAME", help="the operator's Deployment")
        where = release.add_mutually_exclusive_group()
        where.add_argument(
            "--watch-namespace",
            action="append",
            default=[],
            metavar="NAME",
            help="where Adapters are looked for (default: this namespace); may be repeated",
        )
        where.add_argument(
            "--all-namespaces", action="store_true", help="look for them in every namespace"
        )

    def run(self, args: argparse.Namespace) -> int:
        """0 when it is done, 1 when it could not be, with the reason on stderr."""
        try:
            _run(_apply if args.action == "apply-crds" else _release, args)
        except MuralError as error:
            print(f"mural chart {args.action}: {redacted(error.message)}", file=sys.stderr)
            return 1
        return 0


chart = ChartCommand()

_Action = Callable[["KubeClient", argparse.Namespace], Awaitable[None]]


def _run(action: _Action, args: argparse.Namespace) -> None:
    try:
        import asyncio

        from mural_resolvers.kubernetes.client import KubeClient
        from mural_resolvers.kubernetes.config import cluster_config
    except ImportError as error:
        raise InvalidInput(
            f"The operator's packages are not installed ({error}): pip install 'mural[operator]'."
        ) from None
    log_to_stderr("info")

    async def act() -> None:
        try:
            client = KubeClient(cluster_config())
        except ValueError as error:
            raise InvalidInput(f"{error}.") from None
        async with client:
            await action(client, args)

    asyncio.run(act())


async def _apply(client: KubeClient, args: argparse.Namespace) -> None:
    from mural_operator.crds import apply_definitions, read_definitions

    await apply_definitions(client, read_definitions(args.folder))


async def _release(client: KubeClient, args: argparse.Namespace) -> None:
    from mural_operator.uninstall import release_adapters

    namespaces = None if args.all_namespaces else args.watch_namespace or [client.namespace]
    await release_adapters(client, args.deployment, namespaces)
