"""Compiles what every request of the router passes through: ``python build.py [FOLDER]``.

mypyc makes extension modules of the Python sources themselves, so there is one source of truth,
and what is not compiled runs as it stands. FOLDER (``build/router``) gets copies of the packages
with the compiled modules beside: first on ``PYTHONPATH`` it is what runs. A checkout never gets
any in place, where they would hide later changes. Needs mypy (mypyc is a part of it), setuptools
and a C compiler; takes about a minute.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "router"
REQUIRES = ("mypy>=1.15", "setuptools>=70")
COMPILE_TIMEOUT_S = 1200

# Nothing that msgspec decodes into may be among them (`inspect_body`, settings): it goes by a
# class's annotations, of which mypyc keeps the plain ones alone.
MODULES = (
    "mural_resolvers/tenants/limits.py",
    "mural_router/http/chunks.py",
    "mural_router/http/client.py",
    "mural_router/http/exchange.py",
    "mural_router/http/head.py",
    "mural_router/http/upstream.py",
    "mural_router/http/watch.py",
    "mural_router/limits/account.py",
    "mural_router/limits/estimate.py",
    "mural_router/limits/local.py",
    "mural_router/placement/choose.py",
    "mural_router/placement/ledger.py",
    "mural_router/proxy/content.py",
    "mural_router/proxy/events.py",
    "mural_router/proxy/forward.py",
    "mural_router/proxy/paths.py",
    "mural_router/proxy/relay.py",
    "mural_router/proxy/usage.py",
    "mural_router/routing/dispatch.py",
    "mural_router/routing/request.py",
    "mural_router/routing/router.py",
    "mural_router/routing/target.py",
)
SHARED = "mural_router_native"
"""The library that holds all of them; each module's own file only names it."""

# Types of these do not reach what is compiled, and reading them takes minutes.
_UNREAD = (
    *("fastapi", "hatchling", "huggingface_hub", "httpx2", "numpy", "opentelemetry", "pydantic"),
    *("aiobotocore", "botocore", "gguf", "lightkube", "peft", "prometheus_client", "redis"),
    *("safetensors", "starlette", "tokenizers", "torch", "transformers", "uvicorn", "uvloop"),
    *("mural_server.api", "mural_server.engine", "mural_server.layers", "mural_server.llm"),
    *("mural_server.lora", "mural_server.models", "mural_server.ops", "mural_server.catalog"),
    *("mural_resolvers.hub", "mural_resolvers.s3", "mural_resolvers.kubernetes"),
    "mural_resolvers.open_store",
)

_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
modules = mypycify(
    ["--config-file", "mypy.ini", *sys.argv[2:]],
    opt_level="2", debug_level="0", multi_file=True, group_name=sys.argv[1],
)
setup(name=sys.argv[1], ext_modules=modules, script_args=["-q", "build_ext", "--inplace"])
"""


class BuildFailed(Exception):
    """The modules could not be made; says why in a line or with the compiler's own words."""


def build(folder: Path = FOLDER) -> dict[Path, str]:
    """Make the modules in a folder, anew: each file and its place in a wheel.

    Raises `BuildFailed`.
    """
    if importlib.util.find_spec("mypyc") is None:
        raise BuildFailed("mypyc is not installed (it comes with mypy)")
    shutil.rmtree(folder, ignore_errors=True)
    for package in ("resolvers/mural_resolvers", "router/mural_router"):
        skipped = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / package, folder / Path(package).name, ignore=skipped)
    unread = ",".join(f"{name}.*" for name in _UNREAD)
    paths = f"{folder}:{ROOT / 'server'}"
    (folder / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = true\nexplicit_package_bases = true\n"
        f"namespace_packages = true\nmypy_path = {paths}\n[mypy-{unread}]\nfollow_imports = skip\n"
    )
    try:
        subprocess.run(
            [sys.executable, "-c", _SETUP, SHARED, *MODULES],
            cwd=folder,
            check=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        raise BuildFailed(error.output) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildFailed(str(error)) from error
    shutil.rmtree(folder / "build")
    made = {path: path.relative_to(folder).as_posix() for path in folder.rglob("*.so")}
    if len(made) != len(MODULES) + 1:
        raise BuildFailed(f"{len(MODULES) + 1} files were expected, {len(made)} were made")
    return made


if __name__ == "__main__":
    try:
        build(*map(Path, sys.argv[1:2]))
    except BuildFailed as failure:
        sys.exit(f"the router's modules could not be compiled: {failure}")
