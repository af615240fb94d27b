"""Builds what is native into wheels and editable installs.

See server/native/build.py and router/native/build.py.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOMS = ("server", "router")


class NativeHook(BuildHookInterface):
    """A wheel with a library is bound to a platform, though to no Python; one without is not."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        found = [
            _load_build(Path(self.root) / room / "native" / "build.py").build() for room in ROOMS
        ]
        libraries = [library for library in found if library is not None]
        if not libraries:
            return
        for library in libraries:
            build_data["artifacts"].append(library.relative_to(self.root).as_posix())
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def _load_build(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("mural_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
