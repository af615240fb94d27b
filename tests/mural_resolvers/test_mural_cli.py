"""The command ``mural`` and its plug-ins."""

from __future__ import annotations

import argparse

import pytest

from mural_resolvers.cli import main
from mural_resolvers.errors import InvalidInput


class Greet:
    help = "say hello (100%)"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--to", default="you", help="whom to greet")

    def run(self, args: argparse.Namespace) -> int:
        if args.to == "nobody":
            raise InvalidInput("Nobody is there.")
        print(f"hello {args.to}")
        return 3


class Unfit(Greet):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        raise RuntimeError("no arguments today")


class Entry:
    def __init__(self, name: str, value: object) -> None:
        self.name = name
        self._value = value
        self.loaded = 0

    def load(self) -> object:
        self.loaded += 1
        if isinstance(self._value, Exception):
            raise self._value
        return self._value


def greet() -> Greet:
    command = Greet()
    command.help = command.help.replace("%", "%%")
    return command


def entries() -> list[Entry]:
    return [
        Entry("greet", greet()),
        Entry("broken", ImportError("no module\nnamed 'torch' 50%")),
        Entry("odd", object()),
        Entry("unfit", Unfit()),
    ]


def test_a_subcommand_runs_and_gives_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "--to", "me"], entries()) == 3
    assert capsys.readouterr().out == "hello me\n"


def test_only_the_subcommand_that_is_asked_for_is_loaded() -> None:
    found = entries()
    main(["greet"], found)

    assert [entry.loaded for entry in found] == [1, 0, 0, 0]


def test_a_typed_error_is_one_line_and_status_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["greet", "--to", "nobody"], entries()) == 1
    assert capsys.readouterr().err == "mural greet: Nobody is there.\n"


def test_an_error_that_quotes_a_key_is_told_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    class Quotes(Greet):
        def run(self, args: argparse.Namespace) -> int:
            raise InvalidInput(f"No mural_abcdefgh_{'s' * 43} here.")

    assert main(["quote"], [Entry("quote", Quotes())]) == 1
    assert capsys.readouterr().err == "mural quote: No mural_abcdefgh_… here.\n"


def test_help_names_every_subcommand_and_what_is_broken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"], entries())

    told = " ".join(capsys.readouterr().out.split())
    assert caught.value.code == 0
    assert "greet say hello (100%)" in told
    assert "broken (cannot be loaded: ImportError: no module named 'torch' 50%)" in told
    assert "odd (cannot be loaded: it is not a command" in told
    assert "unfit (cannot be loaded: RuntimeError: no arguments today)" in told


@pytest.mark.parametrize("name", ["broken", "odd", "unfit"])
def test_a_broken_subcommand_says_why(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--any", "argument"], entries()) == 1
    assert f"{name} cannot be loaded" in capsys.readouterr().err


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"], entries())

    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("mural ")


@pytest.mark.parametrize("argv", [[], ["unknown"]])
def test_misuse_is_status_two(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(argv, entries())

    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "mural: the following arguments are required: COMMAND; `mural --help`"),
        (["greet", "--to"], "mural greet: argument --to: expected one argument; `mural greet --"),
    ],
)
def test_misuse_is_told_in_one_line(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(argv, [Entry("greet", greet())])

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(told)


@pytest.mark.parametrize("flag", ["--unknown", "--t"])
def test_a_flag_is_taken_whole_or_refused_by_name(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["greet", flag, "me"], entries())

    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith(f"mural greet: unknown: {flag} me;")
    assert "`mural greet --help`" in told
