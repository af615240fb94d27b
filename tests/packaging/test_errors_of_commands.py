"""What a command says when it cannot start holds no key, whatever its error quotes."""

from __future__ import annotations

import argparse
from importlib import import_module

import pytest

from mural_resolvers.errors import InvalidInput


@pytest.mark.parametrize(
    ("module", "command", "said"),
    [
        ("mural_server.commands", "serve", "mural serve"),
        ("mural_router.commands", "route", "mural route"),
        ("mural_operator.commands", "operate", "mural operate"),
        ("mural_operator.chart_hooks", "chart", "mural chart release"),
    ],
)
def test_a_start_that_fails_tells_no_key(
    module: str,
    command: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object) -> int:
        raise InvalidInput(f"No mural_abcdefgh_{'s' * 43} here.")

    commands = import_module(module)
    for name in ("_run", "server_settings"):
        monkeypatch.setattr(commands, name, fails, raising=False)
    arguments = argparse.Namespace(action="release")
    assert getattr(commands, command).run(arguments) == 1
    assert capsys.readouterr().err == f"{said}: No mural_abcdefgh_… here.\n"
