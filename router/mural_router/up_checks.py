"""What `mural up` can know to be wrong before it starts anything: its servers take half a minute to
say so, each for itself, and the router is started after them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import NoReturn, Protocol, runtime_checkable

from mural_resolvers.cli import Command, find_command
from mural_resolvers.errors import InvalidInput

__all__ = ["check_command"]


@runtime_checkable
class _Checked(Command, Protocol):
    def check(self, given: Mapping[str, object], environment: Mapping[str, str]) -> None:
        """Raise a `MuralError` for parsed flags with which `run` could not start."""


class _Flags(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InvalidInput(f"{self.prog}: {message}.")


def check_command(
    name: str, flags: Sequence[str], stated_by: str, environment: Mapping[str, str]
) -> None:
    """Raise a `MuralError` where ``mural name`` with these flags could not start, by its own word.

    ``stated_by`` is the flag that holds those which the user chose.
    """
    command = find_command(name)
    assert isinstance(command, _Checked)
    parser = _Flags(prog=stated_by, add_help=False, allow_abbrev=False)
    command.add_arguments(parser)
    command.check(vars(parser.parse_args(flags)), environment)
