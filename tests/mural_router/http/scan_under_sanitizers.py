"""Reads many messages with a reader that was built with a sanitizer: ``LIBRARY KIND MESSAGES``.

That for addresses has to be loaded before Python is (``LD_PRELOAD``), and objects have to come from
malloc (``PYTHONMALLOC``). Whatever is wrong ends the process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

TESTS = [
    str(Path(__file__).with_name(name))
    for name in ("test_scan.py", "test_scan_tables.py", "test_cut_through.py")
]
HEADER_BYTES = bytes.__basicsize__ - 1
"""Of an object of bytes, before its first one; behind its last stands a NUL."""


def to_the_byte(call: Callable[..., object]) -> Callable[..., object]:
    """``call``, for which not even the NUL behind its bytes may be read."""
    process = ctypes.CDLL(None)
    bar, let = process.__asan_poison_memory_region, process.__asan_unpoison_memory_region
    bar.argtypes = let.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    bar.restype = let.restype = None

    def called(*arguments: object) -> object:
        data = arguments[0] if arguments else None
        # One byte and none are objects that Python has made beforehand.
        if not isinstance(data, bytes) or len(data) < 2:
            return call(*arguments)
        behind = id(data) + HEADER_BYTES + len(data)
        bar(behind, 1)
        try:
            return call(*arguments)
        finally:
            let(behind, 1)

    return called


def main(library: Path, kind: str, messages: int) -> int:
    spec = importlib.util.spec_from_file_location("_scan", library)
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    sys.modules["mural_router.http._scan"] = native
    if kind == "address":
        for name in ("scan_request", "scan_answer", "scan_answer_head", "scan_events"):
            setattr(native, name, to_the_byte(getattr(native, name)))
    # The tables, with all that was ever found wrong, but no other programs and large libraries.
    failed = pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", *TESTS])
    if failed:
        return failed
    # After the reader was put in its place.
    from tests.mural_router.http.scan_alike import is_accepted_alike, is_answered_alike
    from tests.mural_router.http.scan_messages import Writer

    class Through(native.CutThrough):  # type: ignore[name-defined]
        deadline = now = 0.0
        bytes_sent = 0

        def take_in(self, data: bytes) -> None:
            if len(data) % 7 == 0:
                self.cut_through(self, -1, self, self, 1.0)

        write = take_in

    random, accepted, through = Random(messages), 0, Through()
    through.cut_through(through, -1, through, through, 1.0)
    for _ in range(messages):
        writer = Writer(random)
        request, answer = writer.request(), writer.answer()
        accepted += is_accepted_alike(request) + is_answered_alike(answer)
        at = random.randrange(len(request))
        is_accepted_alike(request[:at])
        is_answered_alike(answer[: random.randrange(len(answer))])
        events = b"%x\r\n%b\r\n" % (at, request[:at])
        for data in (events, events[: random.randrange(len(events))]):
            native.scan_events(data)
            through.data_received(data)
    print(f"{messages} messages of each kind, {accepted} accepted")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
