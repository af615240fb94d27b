"""Images that a node runs are made from what the Dockerfiles say."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from tests.cluster import images
from tests.cluster.dockerfile import COMPONENTS, ROOT, ignored, stages

COMMANDS = {"server": "serve", "router": "route", "operator": "operate"}


@pytest.mark.parametrize("component", COMPONENTS)
def test_a_dockerfile_is_read_whole(component: str) -> None:
    build, final = stages(component)
    assert build.name == "build"
    assert build.workdir == PurePosixPath("/src")
    # All that the last stage takes from the first is what `install` makes.
    assert final.taken == {images.INSTALLED: images.INSTALLED}
    assert final.user == "65532:65532"
    assert (final.entrypoint, final.command) == (["mural"], [COMMANDS[component]])
    assert final.environment["PATH"].startswith(f"{images.INSTALLED}/bin:")
    targets = {each.source: str(each.target) for each in (*build.copies, *final.copies)}
    assert targets["pyproject.toml"] == "/src/pyproject.toml"
    assert targets["server/mural_server"] == "/src/server/mural_server"
    assert all((ROOT / source).exists() for source in targets)


def test_what_the_builder_never_sees_is_left_out() -> None:
    assert ignored(Path("server/mural_server/ops/native/libmural_native.so"))
    assert ignored(Path("router/mural_router/__pycache__"))
    assert not ignored(Path("router/mural_router/proxy/forward.py"))


def test_a_package_is_installed_from_the_files_that_a_dockerfile_copies(tmp_path: Path) -> None:
    build, _ = stages("operator")
    made = images.install(build, tmp_path / "package")
    assert (made / "lib" / "mural_operator" / "commands.py").is_file()
    assert list((made / "lib").glob("mural-*.dist-info/entry_points.txt"))
    launcher = (made / "bin" / "mural").read_text(encoding="utf-8")
    assert launcher.startswith("#!/usr/bin/python3\n")
    assert "mural_resolvers.cli" in launcher
