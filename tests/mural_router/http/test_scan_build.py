"""Where the native reader is built, where it is left out, and what is said of that."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from mural_router.http import scan
from tests.mural_router.http.scan_alike import native_reader

ROOT = Path(__file__).parents[3]
LIBRARY = Path("router", "mural_router", "http", "_scan.abi3.so")
SOURCES = Path("router", "native")
NEEDED = (
    SOURCES / "build.py",
    *(SOURCES / name for name in ("scan.cpp", "cut_through.cpp")),
    *(SOURCES / name for name in ("cut_through.h", "json.h", "text.h")),
    Path("server", "native", "build.py"),
    Path("server", "mural_server", "ops", "native", "source_digest.py"),
)
COMPILERS = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]

headers = pytest.mark.skipif(
    not Path(sysconfig.get_path("include"), "Python.h").is_file(), reason="no headers of Python"
)
compiler = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What the build reads, and a library of an earlier build."""
    for path in NEEDED:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, tmp_path / path)
    (tmp_path / LIBRARY).parent.mkdir(parents=True)
    (tmp_path / LIBRARY).write_bytes(b"of an earlier build")
    return tmp_path


def build(
    checkout: Path, before: str = "pass", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the build program, and a statement before it."""
    program = str(checkout / SOURCES / "build.py")
    run = f"import runpy; {before}; runpy.run_path({program!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", run],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def files(checkout: Path) -> list[str]:
    return [path.name for path in (checkout / LIBRARY).parent.iterdir()]


@headers
@compiler
def test_the_library_is_of_the_sources_beside_it_and_leaves_an_earlier_one_as_it_is(
    checkout: Path,
) -> None:
    with (checkout / LIBRARY).open("rb") as earlier:
        done = build(checkout, MURAL_NATIVE="1")
        assert done.returncode == 0, done.stderr
        # A process may have it mapped.
        assert earlier.read() == b"of an earlier build"
    assert done.stderr == ""
    assert files(checkout) == [LIBRARY.name]
    code = (
        "import importlib.util as u, sys;"
        f"s = u.spec_from_file_location('_scan', {str(checkout / LIBRARY)!r});"
        "m = u.module_from_spec(s); s.loader.exec_module(m);"
        "print(m.SOURCE_DIGEST, m.scan_answer(b''))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert out.split() == [digest_of(checkout), "None"]


def digest_of(checkout: Path) -> str:
    # By its path: to import the server's operators is to import torch.
    path = checkout / NEEDED[-1]
    spec = importlib.util.spec_from_file_location("mural_source_digest", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.source_digest(checkout / SOURCES))


@native_reader
def test_it_was_built_where_it_had_to_be_and_from_the_sources_that_stand_here() -> None:
    assert scan.plain_request is not None, "not built: make native"
    from mural_router.http._scan import SOURCE_DIGEST

    assert digest_of(ROOT) == SOURCE_DIGEST, "stale: make native"


@headers
def test_without_a_compiler_it_is_left_out_with_a_line_that_says_so(checkout: Path) -> None:
    done = build(checkout, CXX="no-such-compiler", MURAL_NATIVE="")
    assert done.returncode == 0
    assert done.stderr.startswith("the native reader is left out: no C++ compiler found")
    assert len(done.stderr.splitlines()) == 1
    assert files(checkout) == []


@headers
def test_where_it_is_demanded_a_missing_compiler_is_an_error(checkout: Path) -> None:
    done = build(checkout, CXX="no-such-compiler", MURAL_NATIVE="1")
    assert done.returncode != 0
    assert done.stderr.startswith("the native reader could not be built: no C++ compiler found")
    assert len(done.stderr.splitlines()) == 1
    assert files(checkout) == []


@headers
@compiler
@pytest.mark.parametrize("wanted", ["", "1"])
def test_what_does_not_compile_leaves_no_library_of_other_sources(
    checkout: Path, wanted: str
) -> None:
    (checkout / SOURCES / "scan.cpp").write_text("#error no such thing\n")
    done = build(checkout, MURAL_NATIVE=wanted)
    assert (done.returncode != 0) is (wanted == "1")
    assert "no such thing" in done.stderr
    assert files(checkout) == []


@pytest.mark.parametrize("wanted", ["", "1"])
def test_without_pythons_headers_it_is_left_out_in_any_case(checkout: Path, wanted: str) -> None:
    absent = f"import sysconfig; sysconfig.get_path = lambda *_: {str(checkout)!r}"
    done = build(checkout, absent, MURAL_NATIVE=wanted)
    assert done.returncode == 0
    assert done.stderr == ("the native reader is left out: Python's headers are not installed\n")
    assert files(checkout) == []


def test_where_it_is_not_wanted_nothing_is_built_and_what_was_is_removed(checkout: Path) -> None:
    done = build(checkout, MURAL_NATIVE="0")
    assert (done.returncode, done.stderr) == (0, "")
    assert files(checkout) == []
