"""The command ``mural``: finds its subcommands by the entry-point group ``mural.commands``.

An entry point is an object with ``help``, ``add_arguments`` and ``run`` (``Command``). One that
cannot be loaded is named in the help and does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import NoReturn, Protocol, runtime_checkable

from mural_resolvers.errors import InvalidInput, MuralError
from mural_resolvers.redaction import redacted

__all__ = ["COMMAND_GROUP", "Command", "OneLineParser", "find_command", "main"]

COMMAND_GROUP = "mural.commands"

_INTERRUPTED = 130


@runtime_checkable
class Command(Protocol):
    """A subcommand. ``help`` is one line; ``run`` gives the exit status."""

    help: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the subcommand's own arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; a raised ``MuralError`` is printed and gives the exit status 1."""


class OneLineParser(argparse.ArgumentParser):
    """Tells a misuse in one line, with no usage before it that would fill the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {redacted(message)}; {_help_of(self.prog)}\n")


def _help_of(prog: str) -> str:
    return f"`{prog} --help` lists what it takes"


class _EntryPoint(Protocol):
    @property
    def name(self) -> str: ...

    def load(self) -> object: ...


class _Broken:
    """Stands for a subcommand that cannot be loaded."""

    def __init__(self, reason: str) -> None:
        self.reason = " ".join(reason.split())
        self.help = f"(cannot be loaded: {self.reason})".replace("%", "%%")

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """It has none that are known."""

    def run(self, args: argparse.Namespace) -> int:
        print(f"mural: {args.command} cannot be loaded: {self.reason}", file=sys.stderr)
        return 1


def main(
    argv: Sequence[str] | None = None, entry_points: Iterable[_EntryPoint] | None = None
) -> int:
    """Run ``mural``; give the exit status (argparse exits by itself on ``--help`` and misuse)."""
    found = metadata.entry_points(group=COMMAND_GROUP) if entry_points is None else entry_points
    arguments = list(sys.argv[1:] if argv is None else argv)
    commands = _load(found, arguments)
    asked = commands.get(arguments[0]) if arguments else None
    if isinstance(asked, _Broken):
        return asked.run(argparse.Namespace(command=arguments[0]))
    parser = _parser(commands)
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        # argparse would print the usage of `mural`, which has nothing of the subcommand's flags.
        prog = f"mural {args.command}"
        parser.exit(2, f"{prog}: unknown: {redacted(' '.join(unknown))}; {_help_of(prog)}\n")
    try:
        return commands[args.command].run(args)
    except MuralError as error:
        print(f"mural {args.command}: {redacted(error.message)}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader went away, as `head` does; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED


def _load(entry_points: Iterable[_EntryPoint], arguments: Sequence[str]) -> dict[str, Command]:
    """Load the one subcommand that is asked for, or all where none of them is."""
    by_name = {entry.name: entry for entry in sorted(entry_points, key=lambda e: e.name)}
    asked = arguments[0] if arguments else ""
    names = [asked] if asked in by_name else list(by_name)
    return {name: _load_one(by_name[name]) for name in names}


def find_command(name: str) -> Command:
    """The subcommand of that name, which is part of Mural; raise ``InvalidInput`` with the reason
    where it cannot be loaded."""
    (entry,) = metadata.entry_points(group=COMMAND_GROUP, name=name)
    found = _load_one(entry)
    if isinstance(found, _Broken):
        raise InvalidInput(f"`mural {name}` cannot be loaded: {found.reason}.")
    return found


def _load_one(entry: _EntryPoint) -> Command:
    try:
        command = entry.load()
        if not isinstance(command, Command):
            return _Broken("it is not a command (help, add_arguments, run)")
        command.add_arguments(argparse.ArgumentParser())
    except Exception as error:
        # Whatever a plug-in's import raises, the others must stay usable.
        return _Broken(f"{type(error).__name__}: {error}")
    return command


def _parser(commands: dict[str, Command]) -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="mural", description="Serve many tenants' LoRA adapters on one base model."
    )
    parser.add_argument("--version", action="version", version=f"mural {_version()}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in commands.items():
        command.add_arguments(
            subparsers.add_parser(
                name,
                help=command.help,
                description=command.help,
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                # A flag cut short would change its meaning when a longer one is added.
                allow_abbrev=False,
            )
        )
    return parser


def _version() -> str:
    try:
        return metadata.version("mural")
    except metadata.PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
