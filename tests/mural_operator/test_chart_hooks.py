"""``mural chart``: what it refuses before it asks anybody, and what it makes of refusals."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from mural_operator.chart_hooks import chart
from mural_operator.crds import apply_definitions, read_definitions
from mural_operator.uninstall import release_adapters
from mural_resolvers.errors import InvalidInput
from mural_resolvers.kubernetes.client import KubeClient

CRDS = Path(__file__).resolve().parents[2] / "charts/mural/crds"


def test_the_charts_own_definitions_are_read_in_order() -> None:
    names = [each["metadata"]["name"] for each in read_definitions(CRDS)]  # type: ignore[index]  # JSON
    assert names == sorted(names)
    assert len(names) == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: [", "this is not YAML"),
        ("kind: ConfigMap", "a CustomResourceDefinition is wanted"),
        (
            "{kind: CustomResourceDefinition, metadata: {name: pods.example.com}}",
            "a definition of the group mural.dev is wanted",
        ),
    ],
)
def test_a_file_that_is_none_of_the_definitions_is_refused_by_name(
    tmp_path: Path, content: str, said: str
) -> None:
    (tmp_path / "wrong.yaml").write_text(content)
    with pytest.raises(InvalidInput, match=rf"wrong\.yaml: {said}"):
        read_definitions(tmp_path)


def test_a_folder_without_definitions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="there is no definition"):
        read_definitions(tmp_path)


async def test_a_definition_that_may_not_be_applied_is_said_with_what_to_do(kube_api: Any) -> None:
    kube_api.refusal = (403, "Forbidden")
    async with KubeClient(kube_api.config()) as client:
        with pytest.raises(InvalidInput, match=r"kubectl apply --server-side -f charts/mural/crds"):
            await apply_definitions(client, read_definitions(CRDS))


async def test_adapters_that_may_not_be_listed_are_an_error(kube_api: Any) -> None:
    kube_api.refusal = (403, "Forbidden")
    async with KubeClient(kube_api.config()) as client:
        with pytest.raises(InvalidInput, match="The Adapters cannot be released"):
            await release_adapters(client, "mural-operator", ["prod"])


def test_a_failure_is_one_line_and_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kubeconfig"
    config.write_text(
        json.dumps(
            {
                "clusters": [{"name": "a", "cluster": {"server": "http://127.0.0.1:9"}}],
                "contexts": [{"name": "a", "context": {"cluster": "a"}}],
                "current-context": "a",
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(config))
    parser = argparse.ArgumentParser()
    chart.add_arguments(parser)
    assert chart.run(parser.parse_args(["apply-crds", str(tmp_path)])) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mural chart apply-crds: ")
