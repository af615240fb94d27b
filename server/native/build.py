"""Compiles the native operators into ``mural_server/ops/native/``: ``python build.py``.

Needs a C++17 compiler (``$CXX``, else g++, clang++ or c++) and nothing else: no torch and no
Python headers, so one library serves every version of both. ``MURAL_NATIVE=0`` skips it and
removes what was built; ``MURAL_NATIVE=1`` makes a failure an error; otherwise a machine without a
compiler does without.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
PACKAGE = SOURCES.parent / "mural_server" / "ops" / "native"
LIBRARY = PACKAGE / "libmural_native.so"

COMPILERS = ("g++", "clang++", "c++")
COMMON = (
    *("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math", "-Wall", "-Wextra", "-Wno-psabi"),
)
ISAS = {
    "avx2": ("-mavx2", "-mfma", "-mf16c", "-mtune=haswell"),
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        *("-mprefer-vector-width=512", "-mtune=skylake-avx512"),
    ),
    "avx512fp16": (
        *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"),
        *("-mavx512fp16", "-mprefer-vector-width=512", "-mtune=sapphirerapids"),
    ),
}
"""Flags of each instruction set that kernels are compiled for; g++ knows the last from 12 on."""

COMPILE_TIMEOUT_S = 600


class BuildFailed(Exception):
    """The library could not be made; says why in a line or with the compiler's own words."""


def build(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Make the library if it is wanted and can be made; None where there is none.

    Raises BuildFailed under ``MURAL_NATIVE=1`` alone.
    """
    wanted = environment.get("MURAL_NATIVE", "")
    if wanted == "0":
        LIBRARY.unlink(missing_ok=True)
        return None
    try:
        compile_library(environment)
    except BuildFailed as failure:
        # What was built from other sources would be refused at load with a less helpful reason.
        LIBRARY.unlink(missing_ok=True)
        if wanted == "1":
            raise
        print(f"native operators are left out: {failure}", file=sys.stderr)
        return None
    return LIBRARY


def compile_library(environment: Mapping[str, str]) -> None:
    """Compile every source for every instruction set that the compiler knows, and link."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildFailed(f"there are none for {sys.platform} on {platform.machine()}")
    compiler = find_compiler(environment)
    with tempfile.TemporaryDirectory(prefix="mural-native-") as temporary:
        folder = Path(temporary)
        known = [isa for isa, flags in ISAS.items() if accepts(compiler, flags)]
        if not known:
            raise BuildFailed(f"{compiler} knows none of {', '.join(ISAS)}")
        kernels = sorted(set(SOURCES.glob("*.cpp")) - {SOURCES / "library.cpp"})
        digest = load_source_digest()(SOURCES)
        jobs = [("library", SOURCES / "library.cpp", (f'-DMURAL_SOURCE_DIGEST="{digest}"',))]
        jobs += [
            (f"{source.stem}_{isa}", source, (*ISAS[isa], f"-DMURAL_ISA={isa}"))
            for isa in known
            for source in kernels
        ]
        objects = [folder / f"{name}.o" for name, _, _ in jobs]
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(
                pool.map(
                    lambda job, made: call(
                        [compiler, *COMMON, *job[2], "-c", str(job[1]), "-o", str(made)]
                    ),
                    jobs,
                    objects,
                )
            )
        linked = folder / LIBRARY.name
        # No OpenMP runtime is named: its entry points are torch's at load (threads.h).
        call([compiler, "-shared", "-Wl,--as-needed", *map(str, objects), "-o", str(linked)])
        # Onto a new file in place, so that a process that has the old one mapped keeps it.
        placed = LIBRARY.with_suffix(f".{os.getpid()}")
        shutil.copyfile(linked, placed)
        placed.replace(LIBRARY)
    without = [isa for isa in ISAS if isa not in known]
    note = f" (without {', '.join(without)}: {compiler} is too old)" if without else ""
    print(f"native operators built for {', '.join(known)}{note}", file=sys.stderr)


def find_compiler(environment: Mapping[str, str]) -> str:
    """``$CXX`` or the first that is installed. Raises BuildFailed without one."""
    named = environment.get("CXX")
    for name in (named,) if named else COMPILERS:
        if shutil.which(name):
            return name
    raise BuildFailed(f"no C++ compiler found (looked for {named or ', '.join(COMPILERS)})")


def accepts(compiler: str, flags: tuple[str, ...]) -> bool:
    """Tell whether the compiler knows all ``flags``."""
    probe = [compiler, *flags, "-x", "c++", "-fsyntax-only", "/dev/null"]
    return subprocess.run(probe, capture_output=True, timeout=COMPILE_TIMEOUT_S).returncode == 0


def call(command: list[str]) -> None:
    try:
        subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        raise BuildFailed(f"{' '.join(command)}\n{error.stderr}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(f"{command[0]}: {error}") from error


def load_source_digest() -> Callable[[Path], str]:
    """The package's own function, read by its path: importing the package would need torch."""
    spec = importlib.util.spec_from_file_location(
        "mural_source_digest", PACKAGE / "source_digest.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function: Callable[[Path], str] = module.source_digest
    return function


if __name__ == "__main__":
    try:
        build()
    except BuildFailed as failure:
        sys.exit(f"native operators could not be built: {failure}")
