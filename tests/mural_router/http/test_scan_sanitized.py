"""The native reader under the address sanitizer and the one for undefined behaviour."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = "tests.mural_router.http.scan_under_sanitizers"
MESSAGES = 5_000

pytestmark = pytest.mark.slow


def load_build() -> ModuleType:
    path = ROOT / "router" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("router_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def library_of(compiler: str, name: str) -> str:
    """Where a library of a compiler's is; the name alone: it has none."""
    asked = [compiler, f"-print-file-name={name}"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    return str(Path(found).resolve()) if os.path.isabs(found) else found


@pytest.fixture
def compiler() -> str:
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        pytest.skip("no headers of Python")
    build = load_build()
    try:
        compiler = str(build.shared.find_compiler(os.environ))
    except build.shared.BuildFailed as failure:
        pytest.skip(str(failure))
    for name in ("libasan.so", "libubsan.so"):
        if not Path(library_of(compiler, name)).is_file():
            pytest.skip(f"{compiler} has no {name}")
    return compiler


@pytest.mark.parametrize("kind", ["address", "undefined"])
def test_no_message_has_it_read_or_reckon_beyond_what_is_there(
    compiler: str, kind: str, tmp_path: Path
) -> None:
    build = load_build()
    library = tmp_path / build.LIBRARY.name
    build.compile_to(library, compiler, (*build.SANITIZED, f"-fsanitize={kind}"))
    environment = {**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"}
    if kind == "address":
        # Python leaves much behind at its end.
        environment |= {"ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
        environment["LD_PRELOAD"] = library_of(compiler, "libasan.so")
    done = subprocess.run(
        [sys.executable, "-m", PROGRAM, str(library), kind, str(MESSAGES)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    assert f"{MESSAGES} messages of each kind" in done.stdout
