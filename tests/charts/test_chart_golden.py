"""What the presets come to, as text: ``MURAL_UPDATE_GOLDEN=1`` writes it anew."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.charts.chart import PRESETS, Rendered

GOLDEN = Path(__file__).with_name("golden")
# Tokens are made anew where there is no cluster to keep them.
_TOKEN = re.compile(
    r"^(  (?:token|api-key|password|url|redis\.conf): )[A-Za-z0-9+/=]{40,}$", re.MULTILINE
)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_comes_to_what_was_last_looked_at(
    render: Callable[..., Rendered], preset: str
) -> None:
    found = _TOKEN.sub(r"\1MADE-AT-INSTALL", render(preset=preset).text)
    path = GOLDEN / f"{preset}.yaml"
    if os.environ.get("MURAL_UPDATE_GOLDEN") == "1":
        path.write_text(found, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == found, "MURAL_UPDATE_GOLDEN=1 shows what changes"


def test_tokens_are_made_anew_at_each_install(render: Callable[..., Rendered]) -> None:
    first, second = (
        {
            each["metadata"]["name"]: each["data"]
            for each in render(anew=True).of("Secret")
            if each.get("data")
        }
        for _ in range(2)
    )
    assert (
        first.keys()
        == second.keys()
        == {
            "mural-router-token",
            "mural-control-token",
            "mural-redis",
        }
    )
    assert all(first[name] != second[name] for name in first)
