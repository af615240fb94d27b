"""What may be compiled, and that it behaves as its source does."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "mural_router_build", ROOT / "router" / "native" / "build.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def source(module: str) -> str:
    room = "resolvers" if module.startswith("mural_resolvers") else "router"
    return (ROOT / room / module).read_text()


def test_nothing_that_is_compiled_is_decoded_into(build: ModuleType) -> None:
    for module in build.MODULES:
        assert (
            re.search(r"json\.Decoder\(|\bdecode\(.*type=|\bconvert\(", source(module)) is None
        ), module


def test_no_slice_of_what_is_compiled_begins_with_a_call_that_does_something(
    build: ModuleType,
) -> None:
    """mypyc makes the call twice where only the beginning of a slice is given."""
    for module in build.MODULES:
        calls = re.findall(r"\[(?!len\()[\w.]+\([^\]]*\) ?:\]", source(module))
        assert calls == [], module


@pytest.mark.slow
def test_the_compiled_modules_pass_the_tests_of_their_sources(
    build: ModuleType, tmp_path: Path
) -> None:
    build.build(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = "import mural_router.routing.router as module; print(module.__file__)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip().endswith(".so")
    folders = [
        str(ROOT / "tests" / "mural_router" / room) for room in ("http", "proxy", "placement")
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", *folders],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-4000:]
