"""Names the state of the native library's sources; the build compiles it in, the load compares.

Imports nothing but the standard library: the build reads this file by its path.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

__all__ = ["source_digest", "source_files"]


def source_files(folder: Path) -> list[Path]:
    """What goes into the library: sources, headers and the program that says how to build it."""
    return sorted(path for path in folder.iterdir() if path.suffix in {".cpp", ".h", ".py"})


def source_digest(folder: Path) -> str:
    """Hex sha256 over names and contents of `source_files`."""
    digest = hashlib.sha256()
    for path in source_files(folder):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
