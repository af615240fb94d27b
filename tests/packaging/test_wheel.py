"""What is built is what stands here: the wheel made from the sdist holds every file, and runs."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "mural_resolvers": ROOT / "resolvers",
    "mural_server": ROOT / "server",
    "mural_router": ROOT / "router",
    "mural_operator": ROOT / "operator",
}


NAMED = os.environ.get("CXX")
COMPILER = next(filter(shutil.which, [NAMED] if NAMED else ["g++", "clang++", "c++"]), None)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    environment = dict(os.environ)
    if COMPILER is not None:
        # What is installed was optimised already, and to do it again takes most of a minute.
        compiler = tmp_path_factory.mktemp("compiler") / "c++"
        compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(COMPILER)} "$@" -O0\n')
        compiler.chmod(0o755)
        environment["CXX"] = str(compiler)
    subprocess.run(
        [*build, str(ROOT)], check=True, capture_output=True, timeout=240, env=environment
    )
    return folder


def test_the_wheel_from_the_sdist_holds_every_file_of_the_packages(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        path.relative_to(folder).as_posix()
        for package, folder in PACKAGES.items()
        for path in (folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted <= held
    assert {name.split("/")[0] for name in held} == {*PACKAGES, "mural-0.1.0.dist-info"}


def test_the_sdist_holds_no_generated_files(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    generated = ("__pycache__", ".venv", ".so")
    assert not [name for name in names if any(part in name for part in generated)]


@pytest.mark.skipif(
    os.environ.get("MURAL_NATIVE") == "0"
    or COMPILER is None
    or not Path(sysconfig.get_path("include"), "Python.h").is_file(),
    reason="nothing native is built here",
)
def test_the_wheel_holds_the_routers_reader_and_it_loads(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    assert wheel.name.startswith("mural-0.1.0-py3-none-linux_")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "from mural_router.http import _scan, scan;"
        "assert scan.plain_request is _scan.scan_request; print(_scan.__file__)"
    )
    run = [sys.executable, "-I", "-c", code]
    out = subprocess.run(run, check=True, capture_output=True, text=True, timeout=60).stdout
    assert out.strip() == str(tmp_path / "mural_router" / "http" / "_scan.abi3.so")


def test_the_wheel_runs_from_where_it_was_put(built: Path, tmp_path: Path) -> None:
    [wheel] = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # -I and an explicit path: the checkout that is installed here must not be what is found.
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r});"
        "import mural_resolvers, mural_server;"
        "print(mural_resolvers.__file__, mural_server.__file__)"
    )
    run = [sys.executable, "-I", "-c", code]
    out = subprocess.run(run, check=True, capture_output=True, text=True, timeout=60).stdout
    assert out.split() == [
        str(tmp_path / "mural_resolvers" / "__init__.py"),
        str(tmp_path / "mural_server" / "__init__.py"),
    ]


@pytest.mark.parametrize(
    "module", ["mural_resolvers.cli", "mural_server.protocol", "mural_router.placement"]
)
def test_what_others_import_needs_neither_torch_nor_a_web_framework(module: str) -> None:
    """As where only ``mural[operator]`` is installed: nothing but msgspec beside the library."""
    banned = (
        "torch",
        "transformers",
        "fastapi",
        "starlette",
        "uvicorn",
        "numpy",
        "zmq",
        "pydantic",
    )
    code = f"import sys; sys.modules.update(dict.fromkeys({banned!r})); import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
