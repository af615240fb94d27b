"""The tutorial, done as it is printed, but for making the cluster and the images."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.dockerfile import ROOT
from tests.cluster.installation import describe
from tests.cluster.kubectl import Kubectl

pytestmark = pytest.mark.cluster_node

PAGE = ROOT / "docs" / "tutorial" / "on-kubernetes.md"
_BLOCK = re.compile(r'^```(\w+)(?: title="([\w.-]+)")?\n(.*?)^```', re.DOTALL | re.MULTILINE)
# What is there already, where this runs.
GIVEN = re.compile(r"^(?:kind|docker) ", re.MULTILINE)
DO_S = 1200


def joined(first: Any, second: Any) -> Any:
    """Two values of a chart as one, lists one after the other."""
    if isinstance(first, dict) and isinstance(second, dict):
        both = {name: joined(first[name], second[name]) for name in first.keys() & second.keys()}
        return first | second | both
    return [*first, *second] if isinstance(first, list) else second


def blocks() -> list[tuple[str, str, str]]:
    """Language, file and text of each, in their order."""
    return _BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def test_the_tutorial_ends_as_it_says(
    placed_images: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    for name in ("charts", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    script = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    for language, file, text in blocks():
        if file == "tutorial.yaml":
            text = yaml.safe_dump(joined(yaml.safe_load(text), placed_images))
        if file:
            (tmp_path / file).write_text(text, encoding="utf-8")
        elif language == "sh" and not GIVEN.search(text):
            script.append(text)
    there = Kubectl("mural")
    try:
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)],
            cwd=tmp_path,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DO_S,
            check=False,
        )
        print(done.stdout)
        if done.returncode:
            pytest.fail(f"{done.stdout}\n{describe(there)}")
    finally:
        there.helm("uninstall", "mural", "--ignore-not-found", "--wait", "--timeout", "180s")
        there("delete", "namespace", "mural", "--ignore-not-found", "--timeout=90s")
    assert re.search(r"^acme-v1 +acme +v1 +2/2 +8 +\S+ +Ready$", done.stdout, re.MULTILINE)
    assert 'acme:v1 → {"product": "espresso machine", "severity": "high"}' in done.stdout
    canary, back = re.findall(r"^Counter\((.*)\)$", done.stdout, re.MULTILINE)
    assert "'acme:v1'" in canary
    assert "'acme:v2'" in canary
    assert back == "{'acme:v1': 40}"
