"""What a Dockerfile says, as far as ours say it; imported by the tests of this folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("server", "router", "operator")


@dataclass(frozen=True)
class Copy:
    """A file or folder of the repository, and where the image has it."""

    source: str
    target: PurePosixPath


@dataclass
class Stage:
    """From one ``FROM`` to the next."""

    name: str | None
    environment: dict[str, str] = field(default_factory=dict)
    copies: list[Copy] = field(default_factory=list)
    taken: dict[str, str] = field(default_factory=dict)
    """Folders that come from other stages, by where the image has them."""
    workdir: PurePosixPath = field(default_factory=lambda: PurePosixPath("/"))
    user: str = "0"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)


def stages(component: str) -> list[Stage]:
    """The stages of ``component/Dockerfile`` in their order."""
    found: list[Stage] = []
    for name, text in _instructions(ROOT / component / "Dockerfile"):
        if name == "FROM":
            words = text.split()
            found.append(Stage(words[2] if len(words) == 3 else None))
            continue
        stage = found[-1]
        if name == "ENV":
            stage.environment |= dict(each.split("=", 1) for each in text.split())
        elif name == "COPY":
            _copy(stage, text.split())
        elif name == "WORKDIR":
            stage.workdir = PurePosixPath(text)
        elif name == "USER":
            stage.user = text
        elif name == "ENTRYPOINT":
            stage.entrypoint = json.loads(text)
        elif name == "CMD":
            stage.command = json.loads(text)
    return found


def _instructions(path: Path) -> list[tuple[str, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    joined = "\n".join(line for line in lines if not line.startswith("#")).replace("\\\n", " ")
    pairs = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(name, text.strip()) for name, text in pairs]


def _copy(stage: Stage, words: list[str]) -> None:
    if words[0].startswith("--from="):
        stage.taken[words[2]] = words[1]
        return
    *sources, target = words
    into = stage.workdir / target
    for source in sources:
        # A single source is the target itself, unless that is a folder by its slash.
        is_folder = len(sources) > 1 or target.endswith("/")
        stage.copies.append(Copy(source, into / Path(source).name if is_folder else into))


def ignored(path: Path) -> bool:
    """Whether .dockerignore keeps a file of a folder that it lets in from an image's builder."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    anywhere = [line.removeprefix("**/") for line in lines if line.startswith("**/")]
    return any(fnmatch(part, pattern) for part in path.parts for pattern in anywhere)
