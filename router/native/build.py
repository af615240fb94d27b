"""Compiles the reader of plain requests into ``mural_router/http/``: ``python build.py``.

Needs a C++17 compiler and Python's headers; one library serves every Python from 3.11 on. By
``MURAL_NATIVE`` as the server's operators are (``server/native/build.py``), but that without the
headers it is left out in any case: the router does without, and a request costs it more.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).resolve().parent
LIBRARY = SOURCES.parent / "mural_router" / "http" / "_scan.abi3.so"
FLAGS = (
    *("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-Wall", "-Wextra"),
)
OPTIMISED = ("-O2", "-fstack-protector-strong", "-D_FORTIFY_SOURCE=2")
SANITIZED = ("-O1", "-g", "-fno-sanitize-recover=all")
"""For tests, with ``-fsanitize=`` and one kind: g++ drops checks of one where there are two."""


def _load_shared() -> ModuleType:
    """What the build of the server's operators has for both."""
    path = SOURCES.parents[1] / "server" / "native" / "build.py"
    spec = importlib.util.spec_from_file_location("mural_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


shared = _load_shared()


def compile_to(made: Path, compiler: str, flags: tuple[str, ...]) -> None:
    """Raises ``shared.BuildFailed``."""
    digest = shared.load_source_digest()(SOURCES)
    define, include = f'-DMURAL_SOURCE_DIGEST="{digest}"', sysconfig.get_path("include")
    sources = (define, "-I", include, *map(str, sorted(SOURCES.glob("*.cpp"))))
    shared.call([compiler, *FLAGS, *flags, *sources, "-shared", "-o", str(made)])


def build(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Make the library if it is wanted and can be made; None where there is none.

    Raises ``shared.BuildFailed`` under ``MURAL_NATIVE=1`` alone.
    """
    wanted = environment.get("MURAL_NATIVE", "")
    if wanted == "0":
        LIBRARY.unlink(missing_ok=True)
        return None
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        LIBRARY.unlink(missing_ok=True)
        print("the native reader is left out: Python's headers are not installed", file=sys.stderr)
        return None
    try:
        compiler = shared.find_compiler(environment)
        with tempfile.TemporaryDirectory(prefix="mural-native-") as temporary:
            made = Path(temporary) / LIBRARY.name
            compile_to(made, compiler, OPTIMISED)
            # Onto a new file in place, so that a process that has the old one mapped keeps it.
            placed = LIBRARY.with_suffix(f".{os.getpid()}")
            shutil.copyfile(made, placed)
            placed.replace(LIBRARY)
    except shared.BuildFailed as failure:
        # What was built from other sources would read by other rules than those that stand here.
        LIBRARY.unlink(missing_ok=True)
        if wanted == "1":
            raise
        print(f"the native reader is left out: {failure}", file=sys.stderr)
        return None
    return LIBRARY


if __name__ == "__main__":
    try:
        build()
    except shared.BuildFailed as failure:
        sys.exit(f"the native reader could not be built: {failure}")
