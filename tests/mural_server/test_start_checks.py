"""`mural serve` says what is wrong before it loads torch or starts a process."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mural_server import commands
from mural_server.commands import serve
from mural_server.settings import EngineSettings
from tests.model_folder import make_model_folder

KEY = ("--api-key", "an-admin-key")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models of servers whose start began."""
    begun: list[str] = []

    def begin(engine: EngineSettings, _: object) -> int:
        begun.append(engine.model)
        return 0

    monkeypatch.setattr(commands, "_run", begin)
    return begun


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_folder(tmp_path)


def served(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(["--port", "0", "--control-port", "0", *flags]))


def told(capfd: pytest.CaptureFixture[str], *flags: str) -> str:
    """The one line of a server that does not start."""
    assert served(*flags) == 1
    (line,) = capfd.readouterr().err.splitlines()
    return line.removeprefix("mural serve: ")


def test_a_good_start_goes_on(started, model):
    assert served(str(model)) == 0
    assert started == [str(model)]


def test_a_wrong_model_is_told_before_anything_starts(started, capfd, model):
    (model / "model.safetensors").unlink()
    assert told(capfd, str(model)) == f"{model} has no model.safetensors."
    assert started == []


@pytest.mark.parametrize("flag", ["--port", "--control-port"])
def test_a_port_that_is_taken_is_told_before_anything_starts(started, capfd, model, flag):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = told(capfd, str(model), flag, str(port))
    assert line == (
        f"127.0.0.1:{port} cannot be listened on (Address already in use): "
        f"change {flag} or its host."
    )
    assert started == []


def no_folder(tmp_path: Path) -> str:
    return f"sql={tmp_path}/absent"


def no_adapter(tmp_path: Path) -> str:
    return f"sql={tmp_path}"


def cut_off(tmp_path: Path) -> str:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 4)
    return f"sql={tmp_path}"


@pytest.mark.parametrize(
    ("place", "word"),
    [
        (no_folder, "there is no folder"),
        (no_adapter, "The adapter has no adapter_config.json."),
        (cut_off, "The file is not a safetensors file"),
    ],
)
def test_an_adapter_that_is_none_is_told_before_anything_starts(
    started, capfd, model, tmp_path, place: Callable[[Path], str], word
):
    line = told(capfd, str(model), "--lora-modules", place(tmp_path))
    assert line.startswith("--lora-modules sql: ")
    assert word in line
    assert started == []


def a_file(text: bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        (folder / "file").write_bytes(text)
        return str(folder / "file")

    return write


@pytest.mark.parametrize(
    ("flag", "value", "more", "word"),
    [
        ("--adapter-dir", lambda _: "/no/such", (), "there is no folder /no/such"),
        ("--tenants-file", a_file(b"tenants: 5"), (), "tenants:"),
        ("--chat-template", a_file(b"\xff"), (), "this is not UTF-8"),
        ("--ssl-certfile", a_file(b"none"), ("--ssl-keyfile", __file__), "certificate"),
        ("--upload-store", lambda _: "/no/such", KEY, "There is no folder '/no/such'"),
        ("--upload-store", lambda _: "http://localhost:1", KEY, "begins no source"),
        ("--upload-store", str, (*KEY, "--no-enable-lora"), "adapters are off"),
    ],
)
def test_what_a_flag_names_is_looked_at_before_anything_starts(
    started, capfd, model, tmp_path, flag, value: Callable[[Path], str], more, word
):
    line = told(capfd, str(model), flag, value(tmp_path), *more)
    assert line.startswith(flag)
    assert word in line
    assert started == []


def test_a_source_of_no_known_kind_is_told_before_anything_starts(started, capfd, model, tmp_path):
    (tmp_path / "sources.yaml").write_text("resolvers: [{type: nope}]")
    line = told(capfd, str(model), "--adapter-sources", str(tmp_path / "sources.yaml"))
    assert "There is no source of the type 'nope'" in line
    assert started == []


def test_tracing_without_its_packages_is_told_before_anything_starts(
    started, capfd, model, monkeypatch
):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.json.http.trace_exporter", None)
    line = told(capfd, str(model), "--otlp-traces-endpoint", "http://localhost:4318")
    assert line.startswith("--otlp-traces-endpoint: ")
    assert "pip install 'mural[otel]'" in line
    assert started == []


def test_a_wrong_model_is_told_without_what_takes_seconds_to_load():
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'numpy', 'fastapi', 'uvicorn', 'zmq'):\n"
        "    sys.modules[name] = None\n"
        "from mural_server.commands import main\n"
        "sys.exit(main(['/no/such', '--port', '0', '--control-port', '0']))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert found.returncode == 1
    assert found.stderr == (
        "mural serve: /no/such is neither a model directory nor a .gguf file on this machine "
        "(nothing is downloaded).\n"
    )
