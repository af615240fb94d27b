"""Builds the native operators into wheels and editable installs; see server/native/build.py."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeOperatorsHook(BuildHookInterface):
    """A wheel with the library is bound to a platform, though to no Python; one without is not."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        library = _load_build(Path(self.root) / "server" / "native" / "build.py").build()
        if library is None:
            return
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
