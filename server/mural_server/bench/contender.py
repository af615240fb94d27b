"""One thing that is measured, here or in a process of its own."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol, runtime_checkable

from mural_server.bench.setup import BenchError, Job, Setup
from mural_server.bench.timing import Sample

__all__ = ["Contender", "Remote"]

ANSWER_TIMEOUT_S = 1800.0
STOP_TIMEOUT_S = 30.0


@runtime_checkable
class Contender(Protocol):
    """Runs rounds of requests. Not thread-safe."""

    def start(self, jobs: list[Job]) -> list[str]:
        """Warm up with a whole round; lines that say what was chosen."""

    def settle(self, jobs: list[Job]) -> None:
        """Bring the adapters of a round into slots, untimed."""

    def run(self, jobs: list[Job]) -> Sample:
        """Send all at once and wait for all. Raises `BenchError` when an answer is not whole."""

    def check(self) -> None:
        """Raise `BenchError` when something is left behind or a cache is not as it must be."""

    def close(self) -> None:
        """End it; safe to call twice."""


class Remote:
    """A contender in a child process, so that none shares an allocator or a thread team.

    ``make`` is called in the child. An error there is raised here as `BenchError`; the child
    ends with `close`, or when this process does.
    """

    def __init__(self, make: Callable[[Setup], Contender], setup: Setup) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, make, setup), daemon=False)
        self._process.start()
        theirs.close()
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def start(self, jobs: list[Job]) -> list[str]:
        lines = self._ask("start", jobs)
        assert isinstance(lines, list)
        return lines

    def settle(self, jobs: list[Job]) -> None:
        self._ask("settle", jobs)

    def run(self, jobs: list[Job]) -> Sample:
        sample = self._ask("run", jobs)
        assert isinstance(sample, Sample)
        return sample

    def check(self) -> None:
        self._ask("check")

    def close(self) -> None:
        self._connection.close()
        self._process.join(STOP_TIMEOUT_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, method: str, *arguments: list[Job]) -> object:
        self._connection.send((method, arguments))
        return self._receive()

    def _receive(self) -> object:
        if not self._connection.poll(ANSWER_TIMEOUT_S):
            raise BenchError(f"A measuring process did not answer for {ANSWER_TIMEOUT_S:.0f} s.")
        try:
            answer, failure = self._connection.recv()
        except EOFError:
            raise BenchError("A measuring process died.") from None
        if failure:
            raise BenchError(f"A measuring process failed:\n{failure}")
        return answer


def _serve(connection: Connection, make: Callable[[Setup], Contender], setup: Setup) -> None:
    contender: Contender | None = None
    try:
        contender = make(setup)
        connection.send((None, ""))
        # The pipe ends when the parent closes it or is gone.
        with suppress(EOFError):
            while True:
                method, arguments = connection.recv()
                connection.send((getattr(contender, method)(*arguments), ""))
    except Exception:
        with suppress(OSError):
            connection.send((None, traceback.format_exc()))
    finally:
        if contender is not None:
            contender.close()
