"""`mural route` says what is wrong with its ports before it starts anything."""

from __future__ import annotations

import argparse
import socket
import sys

import pytest

from mural_router import process
from mural_router.commands import route


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Routers whose start began: discovery, Redis and the rest come with it."""
    begun: list[str] = []

    async def begin(*_: object, version: str) -> int:
        begun.append(version)
        return 0

    monkeypatch.setattr(process, "run_router", begin)
    return begun


def told(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line of a router that does not start."""
    parser = argparse.ArgumentParser()
    route.add_arguments(parser)
    assert route.run(parser.parse_args(["--port", "0", "--admin-port", "0", *flags])) == 1
    (line,) = capfd.readouterr().err.splitlines()
    return line.removeprefix("mural route: ")


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--port", "http.port (--port)"),
        ("--admin-port", "admin_port (--admin-port)"),
        ("--ext-proc", "ext_proc_port (--ext-proc)"),
    ],
)
def test_a_port_that_is_taken_is_told_before_anything_starts(started, capfd, flag, setting):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = told(capfd, flag, str(port))
    assert line == (
        f"127.0.0.1:{port} cannot be listened on (Address already in use): "
        f"change {setting} or its host."
    )
    assert started == []


def test_a_certificate_that_cannot_be_read_is_told_before_anything_starts(started, capfd):
    line = told(capfd, "--ssl-certfile", "/no/c", "--ssl-keyfile", "/no/k")
    assert line == "http.tls: the certificate cannot be used: No such file or directory."
    assert started == []


def test_a_picker_without_its_packages_is_told_before_anything_starts(started, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "mural_router.picker", None)
    assert "pip install 'mural[picker]'" in told(capfd, "--ext-proc", "0")
    assert started == []
