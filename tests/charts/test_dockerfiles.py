"""Images are small, pinned, without root, and of the files that they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.charts.chart import CHART, ROOT

VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
DOCKERFILES = ("server/Dockerfile", "router/Dockerfile", "operator/Dockerfile")
WITH_VLLM = (*DOCKERFILES, "server/vllm.Dockerfile")
EXTRAS = {"server": "server", "router": "router", "operator": "operator"}


class Instruction(NamedTuple):
    name: str
    text: str


def instructions(path: str) -> list[Instruction]:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    joined = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    parts = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [Instruction(name, text) for name, text in parts]


def last(path: str, name: str) -> str:
    return [each.text for each in instructions(path) if each.name == name][-1]


def copied(path: str) -> list[str]:
    """What is copied out of the repository."""
    found = []
    for each in instructions(path):
        if each.name == "COPY" and not each.text.startswith("--from"):
            found += each.text.split()[:-1]
    return found


@pytest.mark.parametrize("path", WITH_VLLM)
def test_an_image_runs_as_the_user_of_the_chart(path: str) -> None:
    user = VALUES["podSecurityContext"]["runAsUser"]
    assert last(path, "USER") == f"{user}:{user}"
    after = [each.name for each in instructions(path)]
    assert "RUN" not in after[after.index("USER") :]


@pytest.mark.parametrize("path", DOCKERFILES)
def test_an_image_starts_its_own_command(path: str) -> None:
    command = {"server": "serve", "router": "route", "operator": "operate"}
    assert last(path, "ENTRYPOINT") == '["mural"]'
    assert last(path, "CMD") == f'["{command[Path(path).parent.name]}"]'


@pytest.mark.parametrize("path", WITH_VLLM)
def test_base_images_are_pinned_to_a_release(path: str) -> None:
    for each in instructions(path):
        if each.name == "FROM":
            image = each.text.split()[0]
            assert re.search(r":v?\d+\.\d+\.\d+", image), image


@pytest.mark.parametrize("path", DOCKERFILES)
def test_compilers_and_sources_stay_in_the_first_stage(path: str) -> None:
    stages = "\n".join(f"{each.name} {each.text}" for each in instructions(path)).split("\nFROM ")
    assert len(stages) == 2
    final = stages[-1]
    assert "COPY --from=build /opt/mural /opt/mural" in final
    assert "apt-get" not in final
    assert "pip " not in final


@pytest.mark.parametrize("path", WITH_VLLM)
def test_everything_that_is_copied_is_there_and_reaches_the_builder(path: str) -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for each in copied(path):
        assert (ROOT / each).exists(), each
        assert f"!{each}" in ignored, each


@pytest.mark.parametrize("path", WITH_VLLM)
def test_the_wheel_has_all_that_its_build_asks_for(path: str) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    packages = re.findall(r'^  "(\w+/mural_\w+)",$', pyproject, re.MULTILINE)
    assert len(packages) == 4
    files = {"pyproject.toml", "hatch_build.py", "README.md"}
    needed = {*packages, "server/native", "router/native", *files}
    assert needed <= set(copied(path))


@pytest.mark.parametrize("path", WITH_VLLM)
def test_packages_are_installed_by_extras_that_exist(path: str) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    text = (ROOT / path).read_text(encoding="utf-8")
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), extra


def test_the_operators_image_carries_the_definitions_of_the_chart() -> None:
    assert "charts/mural/crds /opt/mural/crds" in [
        each.text for each in instructions("operator/Dockerfile") if each.name == "COPY"
    ]


@pytest.mark.parametrize("path", DOCKERFILES)
def test_ports_are_those_of_the_chart(path: str) -> None:
    exposed = {int(port) for port in last(path, "EXPOSE").split()}
    component = Path(path).parent.name
    wanted = {"server": {8000, 8001}, "router": {8080, 9002, 9090}, "operator": {9091}}
    assert exposed == wanted[component]
