"""The commands that pages print are ones that the shell and `mural` understand."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from mural_resolvers.cli import COMMAND_GROUP

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]
_BLOCK = re.compile(r"^( *)```(?:sh|bash)[^\n]*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
# In square brackets is what may be left out: a table of the reference, and no command.
_INLINE = re.compile(r"`(mural [a-z]+ [^`\[]* --[^`\[]+)`")
# Not the namespace `mural`: a call begins a line, a substitution, or what a pod executes.
_CALL = re.compile(r"(?:^\s*(?:\S*/)?|\$\(|-- )mural ([a-z]+\b[^|&#<>)`]*)")
_PATH = re.compile(r"(?<![\w/.-])((?:charts|examples|server|router|operator)/[\w./-]+)")


def scripts() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in _BLOCK.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            yield f"{page.relative_to(ROOT)}:{line}", block[2]


def calls() -> Iterator[tuple[str, list[str]]]:
    """Each call of `mural`, in blocks and, where it has a flag, in a sentence."""
    said = [
        (page.name, found[1])
        for page in PAGES
        for found in _INLINE.finditer(page.read_text(encoding="utf-8").replace("\n", " "))
    ]
    for where, script in [*scripts(), *said]:
        for line in script.replace("\\\n", " ").splitlines():
            for found in _CALL.finditer(line):
                words = shlex.split(re.sub(r"\$\w+", "v1", found[1]))
                yield where, [each for each in words if each != "…"]


SCRIPTS = list(scripts())
CALLS = list(calls())


def parser(name: str) -> argparse.ArgumentParser:
    """Of a subcommand; a flag must be given as it is, not as its beginning."""
    entry = next(e for e in metadata.entry_points(group=COMMAND_GROUP) if e.name == name)
    made = argparse.ArgumentParser(prog=f"mural {name}", allow_abbrev=False)
    entry.load().add_arguments(made)
    return made


def test_pages_print_commands() -> None:
    assert len(SCRIPTS) > 40
    assert len(CALLS) > 30
    names = {entry.name for entry in metadata.entry_points(group=COMMAND_GROUP)}
    assert {call[0] for _, call in CALLS} <= names


@pytest.mark.parametrize(("where", "call"), CALLS, ids=[f"{w} {c[0]}" for w, c in CALLS])
def test_a_printed_call_is_understood(
    where: str, call: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        parser(call[0]).parse_args(call[1:])
    except SystemExit:
        pytest.fail(f"{where}: mural {' '.join(call)}: {capsys.readouterr().err}")


@pytest.mark.parametrize(("where", "script"), SCRIPTS, ids=[where for where, _ in SCRIPTS])
def test_a_printed_script_is_one_that_the_shell_can_read(where: str, script: str) -> None:
    done = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, f"{where}: {done.stderr}"


def test_what_scripts_take_from_the_repository_is_there() -> None:
    named = [(where, path) for where, script in SCRIPTS for path in _PATH.findall(script)]
    assert named
    assert not [f"{where}: {path}" for where, path in named if not (ROOT / path).exists()]
