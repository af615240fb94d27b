"""``mural adapters``: publish adapters, fetch them, and judge them before a server does.

Nothing here needs a server's packages; a base model's own files are read by them where they are
installed (entry-point group ``mural.base_specs``).
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from mural_resolvers.commands.adapters_arguments import Act, UsageError
from mural_resolvers.commands.adapters_output import print_json, shown
from mural_resolvers.commands.adapters_records import add_alias, add_ls, add_rm
from mural_resolvers.commands.adapters_transfer import add_pull, add_push
from mural_resolvers.commands.adapters_verdict import add_inspect, add_verify
from mural_resolvers.errors import ErrorDetail, InvalidInput, MuralError, error_body

__all__ = ["AdaptersCommand", "adapters"]


class Failed(msgspec.Struct, frozen=True):
    """What ``--json`` prints where an action fails."""

    error: ErrorDetail


class AdaptersCommand:
    """``mural adapters push|pull|ls|inspect|verify|alias|rm``."""

    help = "publish, fetch and judge adapters"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the actions."""
        parser.epilog = "Exit status: 0 done, 1 refused or failed, 2 wrong usage."
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        for add in (add_push, add_pull, add_ls, add_inspect, add_verify, add_alias, add_rm):
            add(actions)

    def run(self, args: argparse.Namespace) -> int:
        """Exit status 0, 1 for what was refused or failed, 2 for wrong usage."""
        act: Act = args.act
        try:
            return _with_reasons(act, args)
        except UsageError as error:
            print(f"mural adapters {args.action}: {error}", file=sys.stderr)
            return 2
        except MuralError as error:
            if args.json:
                print_json(Failed(error_body(error)["error"]))
            raise


def _with_reasons(act: Act, args: argparse.Namespace) -> int:
    """Do it; what the local disk refuses is told as any other reason."""
    try:
        return act(args)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = f"{shown(str(error.filename))}: " if error.filename else ""
        raise InvalidInput(f"{where}{error.strerror or error}.") from error


adapters = AdaptersCommand()
