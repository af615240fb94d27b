"""``mural adapters``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mural_resolvers.base_spec import BaseSpec
from mural_resolvers.cli import main
from mural_resolvers.commands.adapters import adapters
from mural_resolvers.manifest import MANIFEST_FILE, build_manifest

WriteAdapter = Callable[..., Path]


class Entry:
    def __init__(self, name: str, command: object) -> None:
        self.name = name
        self._command = command

    def load(self) -> object:
        return self._command


def mural(*argv: object) -> int:
    return main([str(arg) for arg in argv], [Entry("adapters", adapters)])


@pytest.fixture
def spec_file(tmp_path: Path, base_spec: BaseSpec) -> Path:
    path = tmp_path / "base.json"
    path.write_bytes(base_spec.to_json())
    return path


def test_inspect_tells_digest_facts_and_verdict(
    tmp_path: Path,
    write_adapter: WriteAdapter,
    spec_file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = write_adapter(tmp_path / "a")

    assert mural("adapters", "inspect", folder, "--base-spec", spec_file) == 0

    told = capsys.readouterr().out
    assert build_manifest(folder).digest in told
    assert "rank      4" in told
    assert "verdict   fits tiny: 2 modules, rank 4" in told


def test_inspect_without_a_base_says_what_it_did_not_check(
    tmp_path: Path, write_adapter: WriteAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mural("adapters", "inspect", write_adapter(tmp_path / "a")) == 0
    assert "--base-spec" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"use_dora": True}, "DoRA"), ({"r": 8}, "shape"), ({"target_modules": ["v_proj"]}, "leaves")],
)
def test_inspect_gives_the_reason_and_status_one(
    tmp_path: Path,
    write_adapter: WriteAdapter,
    spec_file: Path,
    capsys: pytest.CaptureFixture[str],
    config: dict[str, object],
    reason: str,
) -> None:
    folder = write_adapter(tmp_path / "a", config=config)

    assert mural("adapters", "inspect", folder, "--base-spec", spec_file) == 1

    told = capsys.readouterr().out
    assert "digest" in told
    assert reason in told.split("verdict")[1]


def test_inspect_follows_links_inside_the_folder(
    tmp_path: Path, write_adapter: WriteAdapter, spec_file: Path
) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "blob")
    (folder / "adapter_model.safetensors").symlink_to("blob")

    assert mural("adapters", "inspect", folder, "--base-spec", spec_file) == 0


def test_inspect_holds_a_folder_to_its_manifest(
    tmp_path: Path, write_adapter: WriteAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(tmp_path / "a")
    (folder / MANIFEST_FILE).write_bytes(build_manifest(folder).to_json())
    write_adapter(folder, fill=b"\x09")

    assert mural("adapters", "inspect", folder) == 1
    assert MANIFEST_FILE in capsys.readouterr().out


def test_inspect_lets_no_file_steer_the_terminal(
    tmp_path: Path, write_adapter: WriteAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"target_modules": ["\x1b[2J"], "base_model_name_or_path": "\u202e\x07"}
    mural("adapters", "inspect", write_adapter(tmp_path / "a", config=config))

    told = capsys.readouterr().out
    assert all(line.isprintable() for line in told.splitlines())


@pytest.mark.parametrize("argv", [("inspect",), ("list",)])
def test_an_absent_folder_is_said_to_be_none(
    argv: tuple[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mural("adapters", *argv, tmp_path / "absent") == 1
    assert "is not a folder" in capsys.readouterr().err


def test_list_prints_every_tenant_s_versions(
    tmp_path: Path, write_adapter: WriteAdapter, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("acme/default/v1", "acme/sql/v2", "globex/default/v1", "_trash/x/v1"):
        write_adapter(tmp_path / path)

    assert mural("adapters", "ls", "--store", tmp_path) == 0
    assert capsys.readouterr().out.split() == ["acme:v1", "acme/sql:v2", "globex:v1"]
