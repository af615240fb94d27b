"""Quarantine: where an upload's files lie while they arrive and until they were judged.

Limits are held while the bytes come, and a safetensors header is judged before a byte of the
weights behind it is kept.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from mural_resolvers.digest import (
    BIN_WEIGHTS_FILE,
    ENGINE_FILES,
    WEIGHTS_FILE,
    FileEntry,
    max_file_bytes,
)
from mural_resolvers.errors import (
    InvalidInput,
    MuralError,
    TooLarge,
    Unavailable,
    UnusableAdapter,
    quoted,
)
from mural_resolvers.limits import DEFAULT_LIMITS, AdapterLimits
from mural_resolvers.manifest import Manifest, manifest_of
from mural_resolvers.peft import read_safetensors_header
from mural_resolvers.scratch import ScratchFolder, sweep_scratch
from mural_resolvers.strict_json import JsonRefused, parse_object

__all__ = ["UPLOADED_FILES", "FileSink", "Intake", "Quarantine"]

UPLOADED_FILES = tuple(name for name in ENGINE_FILES if name != BIN_WEIGHTS_FILE)

_LENGTH_BYTES = 8
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileSink(Protocol):
    """What takes the files of a body, one after the other, piece by piece."""

    def begin(self, name: str, size: int | None = None) -> None:
        """A file begins; ``size`` in bytes where it is known beforehand."""

    def write(self, data: bytes | memoryview) -> None:
        """A piece of the file that has begun."""

    def end(self) -> None:
        """The file is whole."""


class Quarantine:
    """A folder of this machine that only we may enter."""

    def __init__(self, root: Path, limits: AdapterLimits = DEFAULT_LIMITS) -> None:
        self._root = root
        self._limits = limits

    def open(self) -> None:
        """Make the folder, and sweep what dead processes left in it.

        Raises ``InvalidInput`` where it cannot be used: what is there must be a folder of this
        user's that no other can write to.
        """
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._root.lstat()
            if (
                not stat.S_ISDIR(status.st_mode)
                or status.st_uid != os.geteuid()
                or status.st_mode & 0o022
            ):
                raise InvalidInput(f"{self._root} is not a folder of this user's alone.")
            sweep_scratch(self._root)
            ScratchFolder(self._root).close()
        except OSError as error:
            raise InvalidInput(f"{self._root} cannot be used: {error.strerror}.") from None

    def intake(self, max_bytes: int, over: MuralError) -> Intake:
        """Begin an upload of at most ``max_bytes``; ``over`` is raised above them."""
        with _keeping():
            return Intake(ScratchFolder(self._root), max_bytes, over, self._limits)


class Intake:
    """One upload's files. Its calls come from threads, one at a time, but for ``discard``."""

    def __init__(
        self, scratch: ScratchFolder, max_bytes: int, over: MuralError, limits: AdapterLimits
    ) -> None:
        self._scratch = scratch
        self._left = max_bytes
        self._over = over
        self._limits = limits
        self._files: dict[str, FileEntry] = {}
        self._open: _IncomingFile | None = None
        self._lock = threading.Lock()
        self._discarded = False

    @property
    def folder(self) -> Path:
        """Where the files lie until ``discard``."""
        return self._scratch.path

    def begin(self, name: str, size: int | None = None) -> None:
        """Take a file of one of the engine's names; raise ``UnusableAdapter``, ``TooLarge``."""
        if name == BIN_WEIGHTS_FILE:
            raise UnusableAdapter(
                f"{BIN_WEIGHTS_FILE} is a pickle, which is not taken: save it as {WEIGHTS_FILE}."
            )
        if name not in UPLOADED_FILES:
            raise UnusableAdapter(
                f"{quoted(name)} is none of an adapter's files: {', '.join(UPLOADED_FILES)}."
            )
        if name in self._files:
            raise UnusableAdapter(f"{name} was sent twice.")
        if size is not None and size > self._left:
            raise self._over
        with self._keeping():
            self._open = _IncomingFile(self.folder / name, size, self._limits)

    def write(self, data: bytes | memoryview) -> None:
        """Keep a piece; raise ``TooLarge``, or ``UnusableAdapter`` for a header that lies."""
        if len(data) > self._left:
            raise self._over
        self._left -= len(data)
        with self._keeping():
            assert self._open is not None
            self._open.write(data)

    def end(self) -> None:
        """Close the file; raise ``UnusableAdapter`` where it is not whole."""
        with self._keeping():
            assert self._open is not None
            entry = self._open.finish()
            self._files[entry.path] = entry
            self._open = None

    def finish(self) -> Manifest:
        """The manifest of what has come; raise ``UnusableAdapter`` where it is no adapter."""
        with self._keeping():
            return manifest_of(self.folder, tuple(self._files.values()), self._limits)

    def discard(self) -> None:
        """Remove all of it. Idempotent; waits for a call that is under way."""
        with self._lock:
            if self._discarded:
                return
            self._discarded = True
            if self._open is not None:
                self._open.close()
            self._scratch.close()

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        with self._lock, _keeping():
            if self._discarded:
                raise Unavailable("The upload was given up.")
            yield


class _IncomingFile:
    """A file that arrives, held to the limit of its name."""

    def __init__(self, path: Path, size: int | None, limits: AdapterLimits) -> None:
        self._name = path.name
        self._limits = limits
        self._announced = size
        self._max_bytes = max_file_bytes(path.name, limits)
        self._check_size(size or 0)
        self._header = bytearray() if path.name == WEIGHTS_FILE else None
        self._expected: int | None = None
        self._sha256 = hashlib.sha256()
        self._size = 0
        self._file: BinaryIO = path.open("xb")

    def write(self, data: bytes | memoryview) -> None:
        self._size += len(data)
        self._check_size(self._size)
        if self._header is None:
            self._keep(data)
            return
        # Nothing of the file is kept until its header is known to be one.
        self._header += data
        head = self._header
        if len(head) < _LENGTH_BYTES:
            return
        header_bytes = _LENGTH_BYTES + int.from_bytes(head[:_LENGTH_BYTES], "little")
        if header_bytes > _LENGTH_BYTES + self._limits.max_header_bytes:
            raise TooLarge(
                f"The safetensors header has {header_bytes - _LENGTH_BYTES} bytes; the limit is "
                f"{self._limits.max_header_bytes}."
            )
        if len(head) >= header_bytes:
            self._judge_header(bytes(head[:header_bytes]))
            self._header = None
            self._keep(head)

    def _judge_header(self, head: bytes) -> None:
        """Hold the header to itself, and from here on the file to what it says."""
        self._expected = len(head) + _data_bytes(head[_LENGTH_BYTES:], self._limits)
        read_safetensors_header(head, self._limits, file_bytes=self._expected)
        self._check_size(self._expected)
        if self._announced not in (None, self._expected):
            raise UnusableAdapter(
                f"{self._name} has {self._announced} bytes, but its tensors need {self._expected}."
            )

    def _check_size(self, size: int) -> None:
        if size > self._max_bytes:
            raise TooLarge(f"{self._name} has more than {self._max_bytes} bytes, the limit.")

    def _keep(self, data: bytes | bytearray | memoryview) -> None:
        if self._expected is not None and self._size > self._expected:
            raise UnusableAdapter(f"{self._name} goes on after its last tensor.")
        self._sha256.update(data)
        self._file.write(data)

    def finish(self) -> FileEntry:
        self._file.close()
        if self._header is not None or (
            self._expected is not None and self._size != self._expected
        ):
            raise UnusableAdapter(f"{self._name} ends before its tensors do.")
        return FileEntry(self._name, self._size, self._sha256.hexdigest())

    def close(self) -> None:
        self._file.close()


def _data_bytes(raw: bytes, limits: AdapterLimits) -> int:
    """Where the last tensor of a header ends; whether that is true is for others to judge."""
    try:
        entries = parse_object(raw, max_bytes=limits.max_header_bytes, max_depth=4)
    except JsonRefused as error:
        raise UnusableAdapter(
            f"The file is not a safetensors file: its header is refused: {error}."
        ) from None
    ends = [0]
    for entry in entries.values():
        offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
        if isinstance(offsets, list):
            ends.extend(end for end in offsets if isinstance(end, int))
    return max(ends)


@contextmanager
def _keeping() -> Iterator[None]:
    """Turn what the disk refuses into a server that cannot take uploads now."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Unavailable(
                "The server's disk for uploads is full.", retry_after_s=60.0
            ) from error
        raise Unavailable(f"The server cannot keep the upload: {error.strerror}.") from error
