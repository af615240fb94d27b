"""The compiled library as it is found, checked and bound to torch's threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mural_server.ops.native import library
from mural_server.ops.native.library import ISAS, NativeUnavailable, available, load
from mural_server.ops.native.source_digest import source_digest

ROOT = Path(__file__).parents[3]

built = pytest.mark.skipif(
    not available() and os.environ.get("MURAL_NATIVE") != "1",
    reason="the native operators were not built, or this CPU has none of their instruction sets",
)


@built
def test_it_was_built_where_it_had_to_be_and_the_best_instructions_come_first() -> None:
    assert available()
    assert load().isa == available()[0]
    assert [isa for isa in ISAS if isa in available()] == list(available())


@built
def test_its_threads_are_torchs() -> None:
    """A second OpenMP runtime's team would spin against the first one's."""
    load()
    torch.ones(1 << 20).sum()
    names = {
        Path(line.split()[-1]).name
        for line in Path("/proc/self/maps").read_text().splitlines()
        if any(name in line for name in ("libgomp", "libiomp", "libomp."))
    }
    assert len(names) == 1


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """The module with nothing loaded yet."""
    for cached in (library._open, library.load):
        cached.cache_clear()
    yield monkeypatch
    for cached in (library._open, library.load):
        cached.cache_clear()


def test_without_the_file_a_sentence_says_how_to_get_it(fresh, tmp_path: Path) -> None:
    fresh.setattr(library, "LIBRARY", tmp_path / "absent.so")
    with pytest.raises(NativeUnavailable, match=r"not built with this installation.*make native"):
        load()
    assert available() == ()


def test_a_file_that_is_no_library_is_refused(fresh, tmp_path: Path) -> None:
    (tmp_path / "broken.so").write_bytes(b"no library")
    fresh.setattr(library, "LIBRARY", tmp_path / "broken.so")
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        load()


@built
def test_a_library_of_other_sources_is_refused(fresh, tmp_path: Path) -> None:
    (tmp_path / "gemm.cpp").write_text("// changed since")
    fresh.setattr(library, "SOURCES", tmp_path)
    with pytest.raises(NativeUnavailable, match=r"built from other sources.*run make native"):
        load()


@built
def test_an_installation_without_sources_takes_its_library(fresh, tmp_path: Path) -> None:
    fresh.setattr(library, "SOURCES", tmp_path / "absent")
    assert load().isa in ISAS


@built
def test_instructions_that_the_cpu_lacks_are_refused(fresh) -> None:
    fresh.setattr(library, "_usable", lambda handle: ())
    with pytest.raises(NativeUnavailable, match="this CPU has none of avx2, avx512, avx512fp16"):
        load()
    with pytest.raises(NativeUnavailable, match="lacks avx2"):
        load("avx2")


def test_the_digest_follows_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.cpp").write_text("x")
    (tmp_path / "notes.txt").write_text("not compiled")
    first = source_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("changed")
    assert source_digest(tmp_path) == first
    (tmp_path / "a.cpp").write_text("y")
    second = source_digest(tmp_path)
    (tmp_path / "a.cpp").rename(tmp_path / "b.cpp")
    assert len({first, second, source_digest(tmp_path)}) == 3


def _build_elsewhere(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the build program on a copy of the sources whose only kernel is the product."""
    native, package = folder / "native", folder / "mural_server" / "ops" / "native"
    native.mkdir(parents=True)
    package.mkdir(parents=True, exist_ok=True)
    for name in ("build.py", "library.cpp"):
        (native / name).write_bytes((ROOT / "server" / "native" / name).read_bytes())
    (native / "gemm.cpp").write_text(
        '#define NAME_(isa) mural_gemm_##isa\n#define NAME(isa) NAME_(isa)\nextern "C" '
        '__attribute__((visibility("default"))) void NAME(MURAL_ISA)() {}\n'
    )
    digest = ROOT / "server" / "mural_server" / "ops" / "native" / "source_digest.py"
    (package / "source_digest.py").write_bytes(digest.read_bytes())
    return subprocess.run(
        [sys.executable, str(native / "build.py")],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


LIBRARY = Path("mural_server", "ops", "native", "libmural_native.so")


@built
def test_the_build_makes_a_library_of_the_sources_beside_it(tmp_path: Path) -> None:
    done = _build_elsewhere(tmp_path, MURAL_NATIVE="1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / LIBRARY).exists()


def test_without_a_compiler_the_build_says_so_in_a_line_and_goes_on(tmp_path: Path) -> None:
    done = _build_elsewhere(tmp_path, CXX="no-such-compiler", MURAL_NATIVE="")
    assert done.returncode == 0
    assert done.stderr.startswith("native operators are left out: no C++ compiler found")
    assert len(done.stderr.splitlines()) == 1


def test_where_the_library_is_demanded_a_missing_compiler_is_an_error(tmp_path: Path) -> None:
    done = _build_elsewhere(tmp_path, CXX="no-such-compiler", MURAL_NATIVE="1")
    assert done.returncode != 0
    assert "no C++ compiler found" in done.stderr


def test_where_it_is_not_wanted_nothing_is_built_and_what_was_is_removed(tmp_path: Path) -> None:
    (tmp_path / LIBRARY).parent.mkdir(parents=True)
    (tmp_path / LIBRARY).write_bytes(b"of an earlier build")
    done = _build_elsewhere(tmp_path, MURAL_NATIVE="0")
    assert done.returncode == 0
    assert not (tmp_path / LIBRARY).exists()
