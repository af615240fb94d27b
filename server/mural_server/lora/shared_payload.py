"""Memory that the loader process fills and its parent then takes over without a copy.

Ten megabytes through a socket cost the parent's step loop the interpreter lock fifty times, and a
core for as long as they are copied. A sealed file in memory costs one message.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile

import numpy as np

from mural_server.lora.checkpoint import Bytes

__all__ = ["SharedPayload", "check_sealed"]

_HAS_MEMFD = hasattr(os, "memfd_create")
_SEALS = (
    fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    if _HAS_MEMFD
    else 0
)


class SharedPayload:
    """The child's side: one block of memory, written and then sent. `close` must be called."""

    def __init__(self) -> None:
        self._descriptor = -1
        self._memory: mmap.mmap | None = None

    def allocate(self, num_bytes: int) -> Bytes:
        """Give the block (uint8 [num_bytes], zeros); once."""
        self._descriptor = _memory_file()
        os.ftruncate(self._descriptor, num_bytes)
        self._memory = mmap.mmap(self._descriptor, num_bytes)
        return np.frombuffer(self._memory, dtype=np.uint8)

    def seal(self) -> int:
        """Take the right to write from everybody, oneself included; give the descriptor.

        Raises ``BufferError`` while anybody holds a view of the block.
        """
        assert self._memory is not None
        self._memory.close()
        self._memory = None
        if _HAS_MEMFD:
            fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return self._descriptor

    def close(self) -> None:
        """Let go; what was sent is the parent's."""
        self._memory = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _memory_file() -> int:
    if _HAS_MEMFD:
        return os.memfd_create("mural-adapter", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def check_sealed(descriptor: int, num_bytes: int) -> None:
    """The parent's side, before it maps what was sent.

    Raises ``ValueError`` unless it has this size and can change no more: the other side has read
    what strangers upload.
    """
    if os.fstat(descriptor).st_size != num_bytes:
        raise ValueError("the memory does not have the size that was said")
    if _HAS_MEMFD and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise ValueError("the memory is not sealed")
