"""The chart as the real ``helm`` renders it; where there is none, the tests say NOT RUN."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.charts import chart


@pytest.fixture(scope="session")
def helm() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run ``helm`` with arguments; of the PATH, else the test cluster's."""
    built = Path(
        os.environ.get("MURAL_CLUSTER_CACHE", Path.home() / ".cache" / "mural-cluster")
    ).joinpath("bin", "helm")
    program = shutil.which("helm") or (str(built) if built.exists() else None)
    if program is None:
        missing = "NOT RUN: there is no helm on the PATH"
        if os.environ.get("MURAL_CI_FULL") == "1":
            pytest.fail(missing)
        pytest.skip(missing)

    def run(*args: str, told: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *args], input=told, capture_output=True, text=True, timeout=60, check=False
        )

    return run


@pytest.fixture(scope="session")
def render(
    helm: Callable[..., subprocess.CompletedProcess[str]],
) -> Callable[..., chart.Rendered]:
    """Render the chart as the release ``mural`` in the namespace ``mural``."""

    kept: dict[str, chart.Rendered] = {}

    def rendered(
        *, preset: str | None = None, values: dict[str, object] | None = None, anew: bool = False
    ) -> chart.Rendered:
        """Once for the same values, unless it is wanted anew."""
        key = json.dumps([preset, values])
        if anew or key not in kept:
            kept[key] = chart.render(helm, preset=preset, values=values)
        return kept[key]

    return rendered


@pytest.fixture(scope="session")
def refusal(helm: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., str]:
    """What ``helm`` says to values that it must refuse."""

    def refused(values: dict[str, object], *, preset: str | None = None) -> str:
        done = chart.template(helm, preset=preset, values=values)
        assert done.returncode != 0, "the values were taken"
        return done.stderr

    return refused
