"""The whole command on a tiny model, with its processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from mural_server.bench.command import main


@pytest.mark.slow
def test_a_quick_run_measures_every_group_in_every_way(
    tiny_model: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "figures.json"
    flags = ["--dtype", "float32", "--threads", "1", "--quick", "--json", str(file)]
    assert main(["four-groups", str(tiny_model("llama")), *flags]) == 0
    assert "Decode steps" in capsys.readouterr().out
    result = json.loads(file.read_text())
    found = {(f["group"], f["where"]): f for f in result["four_groups"]["figures"]}
    ways = ("in-process", "http", "peft")
    groups = ("base", "one", "mixed", "churn")
    assert found.keys() == {(g, w) for g in groups for w in ways} - {("churn", "peft")}
    assert {f["output_tokens"] for f in found.values()} == {4 * 6}
    assert found["churn", "http"]["cold_adapters"] > 0
    assert [batch["batch"] for batch in result["loads"]["batches"]] == ["base", "one"]


def test_a_model_that_is_not_there_is_told_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["slots", str(tmp_path / "none"), "--quick"]) == 1
    assert "mural bench: " in capsys.readouterr().err


def test_rounds_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["slots", "--rounds", "0"])
    assert "no number from 1 on" in capsys.readouterr().err
