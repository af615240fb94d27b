"""The site says what the code does: generated pages are current, named files exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
_FILE = re.compile(
    r"`((?:server|resolvers|router|operator|charts|tests|docs)/[\w./-]*(?:\.\w+|/))`"
)
_REASON = re.compile(r"^\| `[A-Z][^|]*` \| `(\w+)` \|[^|]*\| (.+) \|$", re.MULTILINE)
_SNIPPET = re.compile(r"```python\n(.*?)```", re.DOTALL)
_IMPORT = re.compile(r"^(?:from mural_\w+\S* import .+|import mural_\w+.*)$", re.MULTILINE)


def _generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_reference", ROOT / "docs/generate_reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_say_what_the_code_does() -> None:
    for name, text in _generator().pages():
        page = (ROOT / "docs/reference" / name).read_text(encoding="utf-8")
        assert page == text, f"docs/reference/{name} is stale: run docs/generate_reference.py"


def test_every_file_that_a_page_names_exists() -> None:
    named = [(page, path) for page in PAGES for path in _FILE.findall(page.read_text())]
    assert len(named) > 50
    missing = [f"{page.name}: {path}" for page, path in named if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_in_python_compile_and_import_what_exists(page: Path) -> None:
    for snippet in _SNIPPET.findall(page.read_text(encoding="utf-8")):
        compile(snippet, str(page), "exec")
        for line in _IMPORT.findall(snippet):
            exec(line, {})


def test_every_page_is_in_the_navigation() -> None:
    config = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    for page in PAGES:
        assert f'"{page.relative_to(ROOT / "docs").as_posix()}"' in config


def test_whoever_is_told_to_do_something_finds_how_to_find_out() -> None:
    reasons = (ROOT / "docs/reference/conditions.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/how-to/troubleshoot-kubernetes.md").read_text(encoding="utf-8")
    asking = {reason for reason, do in _REASON.findall(reasons) if not do.startswith("nothing")}
    assert len(asking) > 20
    # On its way is no trouble yet.
    waiting = {"NotAsked", "NotLoaded"}
    assert not {reason for reason in asking - waiting if f"`{reason}`" not in page}
