"""How ``mural adapters`` speaks: JSON for programs, tables for people, a bar while bytes move.

Results go to stdout, everything else to stderr. What a file or a server says is escaped, so that
it cannot steer a terminal.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TextIO

import msgspec

from mural_resolvers.errors import quoted

__all__ = ["ProgressBar", "print_json", "print_pairs", "print_table", "readable", "shown"]

_PLAIN = re.compile(r"[A-Za-z0-9_@+=,:./-][A-Za-z0-9 _@+=,:./-]*")
_BAR_CELLS = 24
_REDRAW_S = 0.1


def print_json(answer: msgspec.Struct) -> None:
    """Print one object, in ASCII, with the keys that ``--help`` states."""
    # The encoder leaves U+2028, bidirectional marks and the like as they are.
    text = msgspec.json.format(msgspec.json.encode(answer), indent=2).decode()
    print(re.sub(r"[^\n\x20-\x7e]", _escaped, text))


def _escaped(match: re.Match[str]) -> str:
    units = match[0].encode("utf-16-be")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows under a head, each column as wide as its widest cell."""
    lines = [tuple(head), *(tuple(row) for row in rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def print_pairs(pairs: Iterable[tuple[str, str]]) -> None:
    """Print lines of a word and what it is."""
    for word, text in pairs:
        print(f"{word:<9} {text}".rstrip())


def readable(num_bytes: int) -> str:
    """A size for people: ``4.9 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def shown(text: str) -> str:
    """A name out of a folder: as it is where that is harmless, else quoted."""
    return text if len(text) <= 80 and _PLAIN.fullmatch(text) else quoted(text)


class ProgressBar:
    """A context in which ``advance`` draws a bar, where the stream is a terminal; else nothing.

    ``advance`` may be called by any thread. The bar is gone when the context ends, so that what
    stays on the screen is the result.
    """

    def __init__(
        self,
        word: str,
        total_bytes: int,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._word = word
        self._total_bytes = max(1, total_bytes)
        self._stream = sys.stderr if stream is None else stream
        self._drawn = self._stream.isatty()
        self._now = now
        self._started = now()
        self._next = self._started
        self._bytes = 0
        self._lock = threading.Lock()

    def advance(self, num_bytes: int) -> None:
        """Note that so many further bytes went through."""
        with self._lock:
            self._bytes += num_bytes
            if self._drawn and self._now() >= self._next:
                self._next = self._now() + _REDRAW_S
                self._write(self._line())

    def __enter__(self) -> ProgressBar:
        self.advance(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            if self._drawn:
                self._write("")

    def _line(self) -> str:
        # A source that resends a range counts it twice.
        share = min(1.0, self._bytes / self._total_bytes)
        cells = "#" * int(share * _BAR_CELLS)
        rate = self._bytes / max(self._now() - self._started, 1e-3)
        line = (
            f"{self._word} [{cells:.<{_BAR_CELLS}}] {share:4.0%}  "
            f"{readable(int(share * self._total_bytes))} of {readable(self._total_bytes)}"
            f"  {readable(int(rate))}/s"
        )
        return line[: shutil.get_terminal_size().columns - 1]

    def _write(self, line: str) -> None:
        self._stream.write(f"\r\x1b[K{line}")
        self._stream.flush()
