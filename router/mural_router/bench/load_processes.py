"""A load that several processes share: they begin at one moment and report together.

One process in Python takes so many answers a second, and those of one moment one after another: of
a fast router it would soon measure itself.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from mural_router.bench.load import READY, Report
from mural_router.bench.pinned import pinned

__all__ = ["load_processes"]

_NOTICE_S = 0.1
"""Between the word and the beginning, so that it has reached all of them."""


@contextlib.contextmanager
def load_processes(load: Sequence[str], cores: Sequence[int]) -> Iterator[Callable[[], Report]]:
    """Start one for every core named, each with its part of the connections open.

    What is given runs the load and returns the whole report; the connections stay open until the
    end, so that neither opening nor closing them is in what is measured between. `RuntimeError`
    says why a process ended without a report.
    """
    command = [sys.executable, "-m", "mural_router.bench.load", *load, "--parts", str(len(cores))]
    with contextlib.ExitStack() as stack:
        pipe = subprocess.PIPE
        processes = [
            stack.enter_context(
                pinned([*command, "--part", str(part)], core, stdin=pipe, stdout=pipe)
            )
            for part, core in enumerate(cores)
        ]
        for process in processes:
            if (line := _line(process)) != READY:
                raise RuntimeError(f"{line!r} from a load process")

        def run() -> Report:
            begin = time.monotonic() + _NOTICE_S
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(b"%r\n" % begin)
                process.stdin.flush()
            reports = [msgspec.json.decode(_line(process), type=Report) for process in processes]
            return Report.together(reports)

        yield run


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(process.stderr.read().decode("utf-8", "replace")[-2000:])
    return line.rstrip(b"\n")
