"""A process on one core that does not outlive who started it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

__all__ = ["pinned"]


@contextlib.contextmanager
def pinned(
    command: list[str], core: int, *, stdin: int | None = None, stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """Start one; it is killed at the end."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for end in (process.stdin, process.stdout, process.stderr):
            if end is not None:
                end.close()
