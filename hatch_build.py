"""Builds native code into wheels and editable installs: server/native and router/native."""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):
    """A wheel with operators is bound to a platform; one with the router's modules to a Python.

    The operators are built wherever there is a compiler, the router's modules into a wheel that
    is asked to have them.
    """

    def dependencies(self) -> list[str]:
        return list(self._router().REQUIRES) if _router_is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = _load_build(Path(self.root) / "server" / "native" / "build.py").build()
        python = "py3-none"
        if library is not None:
            build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        # Not into an editable install: there they would hide what is edited.
        if version == "standard" and _router_is_wanted():
            for path, place in self._router().build().items():
                build_data["force_include"][str(path)] = place
            tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
            python = f"{tag}-{tag}"
        elif library is None:
            return
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"{python}-{platform}"

    def _router(self) -> Any:
        return _load_build(Path(self.root) / "router" / "native" / "build.py")


def _router_is_wanted() -> bool:
    return os.environ.get("MURAL_NATIVE_ROUTER") == "1"


def _load_build(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"mural_{path.parts[-3]}_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
